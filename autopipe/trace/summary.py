"""Sum up a trace: times, kept activations and traffic, counted and beside their formulas.

Legend: K stages, M micro-batches, j a stage from 0. The formulas:

    bubble                      (K-1) / (M+K-1)
    micro-batches in flight     M for GPipe, min(K-j, M) for 1F1B
    activations, checkpointed   in flight * input + graphs * (graph - input)
    activations, otherwise      in flight * graph
    sent over a link            2 * batch * width values: activations up, gradients down

Source: GPipe (Huang et al. 2019); PipeDream-flush (Narayanan et al. 2021); Boehm,
"Pipeline-Parallelism: Distributed Training via Model Partitioning" (2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.schedule import Op, StageProgram, peak_in_flight
from autopipe.trace.formulas import memory_of_one, peak_graphs, programs, recognize
from autopipe.trace.span import Span

KIB = 1024


@dataclass(frozen=True)
class StageSummary:
    """Sum up one stage.

    Args:
        stage: its number.
        busy_fraction: part of the steps' time in which it computed.
        peak_in_flight, peak_graphs: most micro-batches of which it kept anything, or a graph.
        formula_in_flight, formula_graphs: what the schedule says.
        peak_bytes: most activations kept at once.
        formula_bytes: by formula, from the largest input and graph of one micro-batch.
        formula_bytes_never, formula_bytes_always: likewise, had no micro-batch or had each been
            checkpointed.
    """

    stage: int
    busy_fraction: float
    peak_in_flight: int
    formula_in_flight: int
    peak_graphs: int
    formula_graphs: int
    peak_bytes: int
    formula_bytes: int
    formula_bytes_never: int
    formula_bytes_always: int


@dataclass(frozen=True)
class LinkSummary:
    """Sum up what crossed between two stages in a step, on average.

    Args:
        below, above: the stages; not neighbours where skips go straight.
        activation_bytes, gradient_bytes: sent up and down.
        copied_bytes: of both; what is not copied was handed over in shared memory.
        formula_bytes: of both, if all that went up has a gradient.
    """

    below: int
    above: int
    activation_bytes: float
    gradient_bytes: float
    copied_bytes: float
    formula_bytes: float


@dataclass(frozen=True)
class Summary:
    """Sum up a trace; `str` gives tables.

    Args:
        schedule: a name of `SCHEDULES`, "forward only", or "another order".
        num_stages, num_micro_batches, num_checkpointed: of a step.
        num_steps: that were traced.
        step_s: mean time from a step's first span to its last; between a forward and a backward
            of its own the caller's work counts.
        bubble: part of the stages' time in which they did not compute.
        formula_bubble: the same if all forwards took one time, and all backwards.
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
        """Return what ran, in one line."""
        checkpointed = f" ({self.num_checkpointed} checkpointed)" if self.num_checkpointed else ""
        steps = "" if self.num_steps == 1 else f", mean of {self.num_steps} steps"
        return (
            f"{self.schedule}: {_number(self.num_stages, 'stage')}, "
            f"{_number(self.num_micro_batches, 'micro-batch', 'micro-batches')}"
            f"{checkpointed}{steps}"
        )

    @property
    def times(self) -> str:
        """Return step time and bubble, in one line."""
        return (
            f"step {self.step_s * 1e3:.2f} ms, bubble {self.bubble:.1%} measured, "
            f"{self.formula_bubble:.1%} by (K-1)/(M+K-1)"
        )

    def __str__(self) -> str:
        """Return the tables; each `formula` belongs to the column before it."""
        stages = [
            (
                stage.stage,
                f"{stage.busy_fraction:.1%}",
                *(stage.peak_in_flight, stage.formula_in_flight),
                *(stage.peak_graphs, stage.formula_graphs),
                *(as_bytes(stage.peak_bytes), as_bytes(stage.formula_bytes)),
                *(as_bytes(stage.formula_bytes_never), as_bytes(stage.formula_bytes_always)),
            )
            for stage in self.stages
        ]
        tables = [f"{self.title}\n{self.times}", _table(_STAGE_COLUMNS, stages)]
        if self.links:
            tables.append(_table(_LINK_COLUMNS, self._link_rows()))
        return "\n\n".join(tables)

    def _link_rows(self) -> list[tuple[object, ...]]:
        rows = [
            (
                f"{link.below}-{link.above}",
                link.activation_bytes,
                link.gradient_bytes,
                link.activation_bytes + link.gradient_bytes,
                link.formula_bytes,
                link.copied_bytes,
            )
            for link in self.links
        ]
        columns = list(zip(*(row[1:] for row in rows), strict=True))
        rows.append(("all", *(sum(column) for column in columns)))
        return [(row[0], *(as_bytes(value) for value in row[1:])) for row in rows]


_STAGE_COLUMNS = (
    *("stage", "busy", "in flight", "formula", "graphs", "formula"),
    *("activations", "formula", "if never", "if always checkpointed"),
)
_LINK_COLUMNS = ("link", "activations", "gradients", "sent a step", "formula", "copied")


def summarize(spans: Sequence[Span]) -> Summary:
    """Sum up spans.

    Raises:
        ValueError: nothing was computed.
    """
    compute = [span for span in spans if span.is_compute]
    if not compute:
        raise ValueError("the trace is empty; run a forward or a step in its block")
    steps = [[span for span in spans if span.step == n] for n in sorted({s.step for s in compute})]
    total_s = sum(max(s.end_s for s in step) - min(s.start_s for s in step) for step in steps)
    ran = programs(spans, step=steps[0][0].step)
    num_stages = max(ran) + 1
    num_micro_batches = len({span.micro_batch for span in steps[0]})
    recomputed = {s.micro_batch for s in steps[0] if s.op is Op.RECOMPUTE}
    name = recognize(ran, num_micro_batches, recomputed)
    stages = tuple(
        _stage([s for s in spans if s.stage == j], program, total_s, name == "forward only")
        for j, program in ran.items()
    )
    return Summary(
        name, num_stages, num_micro_batches, len(recomputed), len(steps),
        step_s=total_s / len(steps),
        bubble=1.0 - sum(stage.busy_fraction for stage in stages) / len(stages),
        formula_bubble=(num_stages - 1) / (num_micro_batches + num_stages - 1),
        stages=stages,
        links=_links(spans, len(steps)),
    )  # fmt: skip


def _stage(
    spans: Sequence[Span], program: StageProgram, total_s: float, no_backward: bool
) -> StageSummary:
    """Sum up the spans of one stage, all of whose steps ran the program."""
    compute = [span for span in spans if span.is_compute]
    in_flight = 0 if no_backward else peak_in_flight(program)
    checkpointed = {ins.micro_batch for ins in program if ins.op is Op.RECOMPUTE}
    graphs = 0 if no_backward else peak_graphs(program, checkpointed)
    memory = memory_of_one(compute, checkpointed)
    always = in_flight * memory.input_bytes + min(1, in_flight) * memory.rest_bytes
    never = in_flight * memory.graph_bytes
    mixed = in_flight * memory.input_bytes + graphs * memory.rest_bytes
    return StageSummary(
        spans[0].stage,
        busy_fraction=sum(span.duration_s for span in compute) / max(total_s, 1e-12),
        peak_in_flight=max((span.num_in_flight for span in compute), default=0),
        formula_in_flight=in_flight,
        peak_graphs=max((span.num_graphs for span in compute), default=0),
        formula_graphs=graphs,
        peak_bytes=max(span.peak_bytes for span in spans),
        formula_bytes=mixed if checkpointed else never,
        formula_bytes_never=never,
        formula_bytes_always=always,
    )


def _links(spans: Sequence[Span], num_steps: int) -> tuple[LinkSummary, ...]:
    transfers = [(span, span.peer) for span in spans if span.peer is not None]
    factor = 2 if any(span.op is Op.BACKWARD for span in spans) else 1
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
                formula_bytes=factor * up / num_steps,
            )
        )
    return tuple(links)


def as_bytes(count: float) -> str:
    """Write bytes with the unit that leaves one to four digits before the point."""
    for unit in ("B", "KiB", "MiB"):
        if count < KIB:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= KIB
    return f"{count:.1f} GiB"


def _number(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Align columns to the right, under their names."""
    cells = [list(columns), *([str(value) for value in row] for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )
