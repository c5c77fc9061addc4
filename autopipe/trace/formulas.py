"""Find out from a trace what a schedule's formulas need: its order, and one micro-batch's memory.

A stage of 1F1B with the first two of three micro-batches checkpointed keeps, after each of its
instructions (i an input, G a graph with its input):

    F0   F1   R0   B0   F2   R1   B1   B2
    i    ii   Gi   i    iG   GG   G

What a recomputation adds is the graph without the input, what another forward adds is the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopipe.schedule import LETTERS, SCHEDULES, Op, Schedule, StageProgram, forward_only
from autopipe.trace.span import Span


def programs(spans: Sequence[Span], *, step: int) -> dict[int, StageProgram]:
    """Return what each stage computed in a mini-batch, in its order."""
    compute = sorted((s for s in spans if s.is_compute and s.step == step), key=_start)
    stages = sorted({span.stage for span in spans})
    return {j: tuple(s.instruction for s in compute if s.stage == j) for j in stages}


def _start(span: Span) -> float:
    return span.start_s


def recognize(
    programs: dict[int, StageProgram], num_micro_batches: int, recomputed: Iterable[int]
) -> str:
    """Name the schedule that orders instructions as they were measured.

    Returns:
        a name of `SCHEDULES`, "forward only", or "another order", as of a step that failed.
    """
    size = (max(programs) + 1, num_micro_batches)
    known: dict[str, Schedule] = {
        name: make(*size, recomputed=set(recomputed)) for name, make in SCHEDULES.items()
    }
    known["forward only"] = forward_only(*size)
    for name, schedule in known.items():
        if all(
            program == tuple(ins for ins in schedule[j] if ins.op in LETTERS)
            for j, program in programs.items()
        ):
            return name
    return "another order"


def peak_graphs(program: StageProgram, checkpointed: set[int]) -> int:
    """Count the most graphs alive at once: a checkpointed forward has none, its repetition has."""
    alive = peak = 0
    for ins in program:
        alive += ins.op is Op.RECOMPUTE
        alive += ins.op is Op.FORWARD and ins.micro_batch not in checkpointed
        alive -= ins.op is Op.BACKWARD
        peak = max(peak, alive)
    return peak


@dataclass(frozen=True)
class MemoryOfOne:
    """Hold a stage's bytes of one micro-batch: input, graph, and graph without the input."""

    input_bytes: int
    graph_bytes: int
    rest_bytes: int


def memory_of_one(compute: Sequence[Span], checkpointed: set[int]) -> MemoryOfOne:
    """Read the largest input and graph from what each forward or recomputation added."""
    grown: dict[bool, int] = {False: 0, True: 0}
    kept: dict[int, int] = {}
    for span in compute:
        recomputes = span.op is Op.RECOMPUTE
        if recomputes or (span.op is Op.FORWARD and span.micro_batch not in checkpointed):
            added = span.kept_bytes - kept.get(span.step, 0)
            grown[recomputes] = max(grown[recomputes], added)
        kept[span.step] = span.kept_bytes
    # Of a forward its payload is the input.
    input_bytes = max((span.payload_bytes for span in compute), default=0)
    # A recomputation adds to an input that is kept already.
    rest_bytes = max(grown[True], grown[False] - input_bytes, 0)
    return MemoryOfOne(input_bytes, grown[False] or grown[True] + input_bytes, rest_bytes)
