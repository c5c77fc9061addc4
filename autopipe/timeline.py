"""Trace a step: when each stage ran which instruction, and when each copy was under way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from autopipe.schedule import Instruction, Op


@dataclass(frozen=True)
class Span:
    """Say when a stage was at an instruction, in seconds of `time.perf_counter`.

    Args:
        stage: whose.
        op: what was done; a send or receive lasts as long as the stage waited in it.
        micro_batch: on which micro-batch.
        start_s, end_s: when.
        num_bytes: what crossed the link in a send; 0 where memory is shared.
    """

    stage: int
    op: Op
    micro_batch: int
    start_s: float
    end_s: float
    num_bytes: int = 0


class Recorder:
    """Note when one stage ran its instructions."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.spans: list[Span] = []
        self.sent_bytes = 0

    @contextmanager
    def span(self, instruction: Instruction) -> Iterator[None]:
        """Note when the instruction inside ran."""
        start_s, self.sent_bytes = time.perf_counter(), 0
        yield
        self.spans.append(
            Span(
                self.stage,
                instruction.op,
                instruction.micro_batch,
                start_s,
                time.perf_counter(),
                self.sent_bytes,
            )
        )


class Trace:
    """Hold the spans of the steps that ran while it was open."""

    def __init__(self) -> None:
        self._recorders: list[Recorder] = []

    def recorder(self, stage: int) -> Recorder:
        """Return a new recorder whose spans belong to this trace."""
        self._recorders.append(Recorder(stage))
        return self._recorders[-1]

    @property
    def spans(self) -> list[Span]:
        """Return all spans, by stage and start."""
        return sorted(
            (span for recorder in self._recorders for span in recorder.spans),
            key=lambda span: (span.stage, span.start_s),
        )
