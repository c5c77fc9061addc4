"""Describe what a stage did, when, and what it then kept and sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autopipe.schedule import LETTERS, Instruction, Op, StageProgram


@dataclass(frozen=True)
class Span:
    """Time one instruction of a stage, or one transfer.

    Spans are numbers only, so that processes can send them to each other.

    Args:
        op: the instruction; a receive lasts as long as the stage waited in it.
        start_s, end_s: seconds of `time.perf_counter`, which processes of one machine share. On a
            CUDA device, when its stream began and finished the instruction.
        num_bytes: a transfer's copied bytes; 0 if it was handed over in shared memory.
        payload_bytes: a transfer's bytes, copied or handed over.
        peer: the stage that a transfer goes to; None for a stage's own instruction.
        step: the mini-batch's number in the trace, from 0.
        num_in_flight: micro-batches with a graph or an input kept at the end.
        num_graphs: micro-batches with a graph at the end.
        kept_bytes: activations kept at the end: inputs, and what graphs saved.
        peak_bytes: the most kept at any moment of the span.
    """

    stage: int
    op: Op
    micro_batch: int
    start_s: float
    end_s: float
    num_bytes: int = 0
    payload_bytes: int = 0
    peer: int | None = None
    step: int = 0
    num_in_flight: int = 0
    num_graphs: int = 0
    kept_bytes: int = 0
    peak_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "op": self.op.value}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Span:
        return Span(**{**fields, "op": Op(fields["op"])})

    @property
    def is_compute(self) -> bool:
        return self.op in LETTERS

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def label(self) -> str:
        """Return the grid's cell, such as F0; a transfer's is a0 (activation) or g0 (gradient)."""
        letter = LETTERS.get(self.op)
        if letter is None:
            letter = "a" if self.op.is_forward else "g"
        return f"{letter}{self.micro_batch}"


def programs(spans: Sequence[Span]) -> dict[int, StageProgram]:
    """Return what each stage computed, in order of time; stages ascend."""
    ran: dict[int, StageProgram] = dict.fromkeys(sorted({s.stage for s in spans}), ())
    for span in sorted((s for s in spans if s.is_compute), key=lambda s: s.start_s):
        ran[span.stage] += (Instruction(span.op, span.micro_batch),)
    return ran
