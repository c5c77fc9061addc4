"""Draw a trace as text, one row a stage.

By instruction, each one tick long and as early as the order that was measured allows; a trace of
the schedule "gpipe" then gives the very grid of `autopipe.schedule.draw`:

    stage 0  F0 F1 F2 .. .. .. .. B2 R1 B1 R0 B0
    stage 1  .. F0 F1 F2 .. .. B2 R1 B1 R0 B0 ..
    stage 2  .. .. F0 F1 F2 B2 R1 B1 R0 B0 .. ..

By time, each column as long as the others; `=` goes on with what began, `.` is idle:

    stage 0  F0====F1===.......B1======.B0====
    stage 1  ......F0===F1====B1=====B0=====..
             0 ms                      12.4 ms
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.schedule import Op
from autopipe.trace.span import Span


def instruction_grid(steps: Sequence[Sequence[Span]]) -> str:
    """Draw the instructions that compute, a mini-batch after the other.

    Args:
        steps: the spans of each mini-batch.
    """
    stages = sorted({span.stage for step in steps for span in step})
    rows: dict[int, list[str]] = {stage: [] for stage in stages}
    for number, step in enumerate(steps):
        cells = _placed(step)
        length = max((tick + 1 for _, tick in cells), default=0)
        for stage in stages:
            rows[stage] += ["|"] * (number > 0)
            rows[stage] += [cells.get((stage, tick), "..") for tick in range(length)]
    width = max((len(cell) for row in rows.values() for cell in row if cell != "|"), default=0)
    return _lines(
        {
            stage: " ".join(cell if cell == "|" else cell.ljust(width) for cell in row)
            for stage, row in rows.items()
        }
    )


def _placed(spans: Sequence[Span]) -> dict[tuple[int, int], str]:
    """Give each computing span the tick after its predecessor's and its input's."""
    cells: dict[tuple[int, int], str] = {}
    free: dict[int, int] = {}
    done: dict[tuple[Op, int, int], int] = {}
    # By their ends: what a span needs has ended before, even on another device's clock.
    for span in sorted((s for s in spans if s.is_compute), key=lambda s: s.end_s):
        source = {Op.FORWARD: span.stage - 1, Op.BACKWARD: span.stage + 1}.get(span.op)
        needed = -1 if source is None else done.get((span.op, source, span.micro_batch), -1)
        tick = max(free.get(span.stage, 0), needed + 1)
        cells[span.stage, tick] = span.label
        free[span.stage] = tick + 1
        done[span.op, span.stage, span.micro_batch] = tick
    return cells


def time_grid(spans: Sequence[Span], width: int) -> str:
    """Draw the spans that compute over time, with a scale below.

    Args:
        spans: of any stages.
        width: columns that the whole time takes.
    Raises:
        ValueError: there are no columns.
    """
    if width < 1:
        raise ValueError(f"a grid of {width} columns cannot be drawn; give at least 1")
    if not spans:
        return ""
    start_s = min(span.start_s for span in spans)
    total_s = max(max(span.end_s for span in spans) - start_s, 1e-12)
    rows: dict[int, list[str]] = {span.stage: ["."] * width for span in spans}
    for span in sorted((s for s in spans if s.is_compute), key=lambda s: s.start_s):
        first = min(width - 1, round((span.start_s - start_s) / total_s * width))
        last = min(width, max(first + 1, round((span.end_s - start_s) / total_s * width)))
        rows[span.stage][first:last] = span.label.ljust(last - first, "=")[: last - first]
    scale = f"{total_s * 1e3:.1f} ms".rjust(max(0, width - 4))
    margin = " " * (len(_name(max(rows))) + 2)
    return _lines({stage: "".join(row) for stage, row in sorted(rows.items())}) + (
        f"\n{margin}0 ms{scale}"
    )


def _name(stage: int) -> str:
    return f"stage {stage}"


def _lines(rows: dict[int, str]) -> str:
    width = max((len(_name(stage)) for stage in rows), default=0)
    return "\n".join(f"{_name(stage).ljust(width)}  {row}".rstrip() for stage, row in rows.items())
