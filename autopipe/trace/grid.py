"""Draw a trace as text, one row a stage.

By instruction, each one tick long and as early as the order that was measured allows; a trace of
the schedule "gpipe" then gives the very grid of `autopipe.schedule.draw`.

By time, each column as long as the others; `=` goes on with what began, `.` is idle:

    stage 0  F0====F1===.......B1======.B0====
    stage 1  ......F0===F1====B1=====B0=====..
             0 ms                      12.4 ms
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.schedule import draw, named_rows
from autopipe.trace.span import Span, programs


def instruction_grid(steps: Sequence[Sequence[Span]]) -> str:
    """Draw the instructions that compute, a mini-batch after the other."""
    ran = [programs(step) for step in steps]
    num_stages = 1 + max((max(step) for step in ran), default=-1)
    return draw(*(tuple(step.get(j, ()) for j in range(num_stages)) for step in ran))


def time_grid(spans: Sequence[Span], width: int) -> str:
    """Draw the spans that compute over time, on so many columns, with a scale below."""
    if width < 1:
        raise ValueError(f"a grid of {width} columns cannot be drawn; give at least 1")
    if not spans:
        return ""
    start_s = min(span.start_s for span in spans)
    total_s = max(max(span.end_s for span in spans) - start_s, 1e-12)
    rows: dict[int, list[str]] = {stage: ["."] * width for stage in programs(spans)}
    for span in sorted((s for s in spans if s.is_compute), key=lambda s: s.start_s):
        first = min(width - 1, round((span.start_s - start_s) / total_s * width))
        last = min(width, max(first + 1, round((span.end_s - start_s) / total_s * width)))
        rows[span.stage][first:last] = span.label.ljust(last - first, "=")[: last - first]
    scale = f"{total_s * 1e3:.1f} ms".rjust(max(0, width - 4))
    margin = " " * len(f"stage {max(rows)}  ")
    grid = named_rows({f"stage {stage}": "".join(row) for stage, row in rows.items()})
    return f"{grid}\n{margin}0 ms{scale}"
