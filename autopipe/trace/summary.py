"""Sum up a trace in tables: times, kept activations and traffic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from autopipe.schedule import LETTERS, SCHEDULES, Op, StageProgram, forward_only, unflushed
from autopipe.trace.span import Span, programs


@dataclass(frozen=True)
class StageSummary:
    """Sum up one stage: the part of the steps' time in which it computed, and the most it kept."""

    stage: int
    busy_fraction: float
    peak_in_flight: int
    peak_graphs: int
    peak_bytes: int


@dataclass(frozen=True)
class LinkSummary:
    """Sum up what crossed between two stages in a step, on average.

    Stages with a link may be no neighbours: skips go straight. Activations go up, gradients down.
    Bytes that were not copied were handed over in shared memory.
    """

    below: int
    above: int
    activation_bytes: float
    gradient_bytes: float
    copied_bytes: float


@dataclass(frozen=True)
class Summary:
    """Sum up a trace; `str` gives tables.

    Args:
        schedule: a name of `SCHEDULES`, "forward only", "1f1b without flushes" or "another
            order", such as a failed step's.
        step_s: mean time from a step's first span to its last, the caller's work between forward
            and backward included.
        bubble: part of the stages' time in which they did not compute.
        formula_bubble: (K-1) / (M+K-1) for K stages and M micro-batches, if all forwards took
            equal times, and all backwards (Huang et al., GPipe, 2019).
        stages, links: from the first stage on.
    """

    schedule: str
    num_stages: int
    num_micro_batches: int
    num_checkpointed: int
    num_steps: int
    step_s: float
    bubble: float
    formula_bubble: float
    stages: tuple[StageSummary, ...]
    links: tuple[LinkSummary, ...]

    @property
    def title(self) -> str:
        checkpointed = f" ({self.num_checkpointed} checkpointed)" if self.num_checkpointed else ""
        steps = "" if self.num_steps == 1 else f", mean of {self.num_steps} steps"
        return (
            f"{self.schedule}: {self.num_stages} stage{'s' if self.num_stages != 1 else ''}, "
            f"{self.num_micro_batches} micro-batch{'es' if self.num_micro_batches != 1 else ''}"
            f"{checkpointed}{steps}"
        )

    @property
    def times(self) -> str:
        return (
            f"step {self.step_s * 1e3:.2f} ms, bubble {self.bubble:.1%} measured, "
            f"{self.formula_bubble:.1%} by (K-1)/(M+K-1)"
        )

    def __str__(self) -> str:
        stages = [("stage", "busy", "in flight", "graphs", "activations")]
        for s in self.stages:
            busy, kept = f"{s.busy_fraction:.1%}", as_bytes(s.peak_bytes)
            stages.append((str(s.stage), busy, str(s.peak_in_flight), str(s.peak_graphs), kept))
        tables = [f"{self.title}\n{self.times}", text_table(stages)]
        if self.links:
            tables.append(text_table(self._link_rows()))
        return "\n\n".join(tables)

    def _link_rows(self) -> list[tuple[str, ...]]:
        rows: dict[str, tuple[float, ...]] = {}
        for link in self.links:
            up, down = link.activation_bytes, link.gradient_bytes
            rows[f"{link.below}-{link.above}"] = (up, down, up + down, link.copied_bytes)
        rows["all"] = tuple(map(sum, zip(*rows.values(), strict=True)))
        columns = ("link", "activations", "gradients", "sent a step", "copied")
        return [columns, *((name, *map(as_bytes, values)) for name, values in rows.items())]


def summarize(spans: Sequence[Span]) -> Summary:
    compute = [span for span in spans if span.is_compute]
    if not compute:
        raise ValueError("the trace is empty; run a forward or a step in its block")
    steps = [[span for span in spans if span.step == n] for n in sorted({s.step for s in compute})]
    total_s = sum(max(s.end_s for s in step) - min(s.start_s for s in step) for step in steps)
    ran = programs(steps[0])
    num_stages = max(ran) + 1
    num_micro_batches = len({span.micro_batch for span in steps[0]})
    recomputed = {s.micro_batch for s in steps[0] if s.op is Op.RECOMPUTE}
    stages = tuple(_stage([s for s in spans if s.stage == j], total_s) for j in ran)
    return Summary(
        _recognize(ran, num_micro_batches, recomputed),
        num_stages, num_micro_batches, len(recomputed), len(steps),
        step_s=total_s / len(steps),
        bubble=1.0 - sum(stage.busy_fraction for stage in stages) / len(stages),
        formula_bubble=(num_stages - 1) / (num_micro_batches + num_stages - 1),
        stages=stages,
        links=_links(spans, len(steps)),
    )  # fmt: skip


def _recognize(ran: dict[int, StageProgram], num_micro_batches: int, recomputed: set[int]) -> str:
    """Name the schedule whose order the measured instructions follow."""
    size = (max(ran) + 1, num_micro_batches)
    known = {name: make(*size, recomputed=recomputed) for name, make in SCHEDULES.items()}
    # Learned from the spans, because processes record them without knowing the schedule's name.
    known["forward only"] = forward_only((1,) * size[0], num_micro_batches)
    if num_updates := sum(ins.op is Op.UPDATE for ins in ran[max(ran)]):
        batch = num_micro_batches // num_updates
        known["1f1b without flushes"] = unflushed(size[0], num_updates, batch)
    for name, schedule in known.items():
        if all(
            program == tuple(ins for ins in schedule[j] if ins.op in LETTERS)
            for j, program in ran.items()
        ):
            return name
    return "another order"


def _stage(spans: Sequence[Span], total_s: float) -> StageSummary:
    compute = [span for span in spans if span.is_compute]
    return StageSummary(
        spans[0].stage,
        busy_fraction=sum(span.duration_s for span in compute) / max(total_s, 1e-12),
        peak_in_flight=max((span.num_in_flight for span in compute), default=0),
        peak_graphs=max((span.num_graphs for span in compute), default=0),
        peak_bytes=max(span.peak_bytes for span in spans),
    )


def _links(spans: Sequence[Span], num_steps: int) -> tuple[LinkSummary, ...]:
    transfers = [(span, span.peer) for span in spans if span.peer is not None]
    links = []
    for ends in sorted({(min(s.stage, peer), max(s.stage, peer)) for s, peer in transfers}):
        crossing = [s for s, peer in transfers if {s.stage, peer} == set(ends)]
        up = sum(s.payload_bytes for s in crossing if s.op is Op.SEND_ACTIVATION)
        links.append(
            LinkSummary(
                *ends,
                activation_bytes=up / num_steps,
                gradient_bytes=(sum(s.payload_bytes for s in crossing) - up) / num_steps,
                copied_bytes=sum(s.num_bytes for s in crossing) / num_steps,
            )
        )
    return tuple(links)


_NUMBER = re.compile(r"([0-9.]+( ?[A-Za-z%]+)?)?|none")


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns under the names in the first row: words to the left, numbers to the right.

    A number may have a unit; empty cells and "none" count as numbers. Rows may lack their last
    cells.
    """
    columns = [list(column) for column in zip_longest(*rows, fillvalue="")]
    for column in columns:
        width = max(map(len, column))
        is_number = all(map(_NUMBER.fullmatch, column[1:]))
        column[:] = [cell.rjust(width) if is_number else cell.ljust(width) for cell in column]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def as_bytes(count: float) -> str:
    """Write bytes with a unit that leaves one to four digits before the point."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
