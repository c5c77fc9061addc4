"""Draw a trace: as a file for ui.perfetto.dev or chrome://tracing, and as a picture.

A stage has lanes: one for what it computes, one for its waits, one for each link that it sends
over. Nothing overlaps in a lane: transfers under way at the same time get several lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopipe.schedule import Op
from autopipe.trace.span import Span
from autopipe.trace.summary import StageSummary, as_bytes, summarize

Lanes = dict[str, list[Span]]
"""Spans by the name of their lane, ordered by start."""


def lanes(spans: Sequence[Span], stage: int) -> Lanes:
    """Sort a stage's spans into lanes: "compute", "wait", and "to stage k" for its transfers."""
    found: Lanes = {"compute": [], "wait": []}
    for span in sorted((s for s in spans if s.stage == stage), key=lambda s: s.start_s):
        if span.peer is None:
            found["compute" if span.is_compute else "wait"].append(span)
            continue
        name, number = f"to stage {span.peer}", 1
        while name in found and found[name][-1].end_s > span.start_s:
            number += 1
            name = f"to stage {span.peer} ({number})"
        found.setdefault(name, []).append(span)
    return found


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Return the trace as a JSON object; a stage is a process, times are in microseconds.

    Source: Trace Event Format (Google); "X" is a span, "C" a curve, "M" a name.
    """
    origin_s = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for stage in sorted({span.stage for span in spans}):
        # Perfetto shows process and thread 0 as idle.
        pid = stage + 1
        events.append(_about("process_name", pid, 0, name=f"stage {stage}"))
        events.append(_about("process_sort_index", pid, 0, sort_index=stage))
        for lane, (name, members) in enumerate(lanes(spans, stage).items()):
            tid = 1000 * pid + lane
            events.append(_about("thread_name", pid, tid, name=name))
            events.append(_about("thread_sort_index", pid, tid, sort_index=lane))
            events += [_event(span, pid, tid, origin_s) for span in members]
        own = (span for span in spans if span.stage == stage and span.peer is None)
        events += [
            {
                "name": "kept activations",
                "ph": "C",
                "ts": (span.end_s - origin_s) * 1e6,
                "pid": pid,
                "args": {"bytes": span.kept_bytes},
            }
            for span in sorted(own, key=lambda span: span.end_s)
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(span: Span, pid: int, tid: int, origin_s: float) -> dict[str, Any]:
    arguments: dict[str, Any] = {"step": span.step, "micro-batch": span.micro_batch}
    if span.peer is None:
        arguments["kept bytes at the end"] = span.kept_bytes
    else:
        arguments |= {"payload bytes": span.payload_bytes, "copied bytes": span.num_bytes}
    return {
        "name": span.label,
        "cat": span.op.value,
        "ph": "X",
        "ts": (span.start_s - origin_s) * 1e6,
        "dur": max(0.0, span.duration_s * 1e6),
        "pid": pid,
        "tid": tid,
        "args": arguments,
    }


def _about(kind: str, pid: int, tid: int, **about: str | int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": about}


_KINDS = {
    Op.FORWARD: ("forward", "#3b6fb6"),
    Op.RECOMPUTE: ("recomputation", "#e3a63a"),
    Op.BACKWARD: ("backward", "#3f9d6b"),
    Op.UPDATE: ("update", "#b65a7a"),
    Op.SEND_ACTIVATION: ("activation sent", "#8fb3dd"),
    Op.SEND_GRADIENT: ("gradient sent", "#94cdad"),
}
"""Name in the legend, and colour."""
_INK, _FAINT, _IDLE = "#2b2f36", "#8a919c", "#f0f1f3"
_WIDTH_INCHES, _LEFT, _RIGHT = 12.0, 0.085, 0.885
_STAGE_HEIGHT, _LANE_HEIGHT, _SPACE, _GAP = 1.0, 0.26, 0.06, 0.22
_POINTS_A_CHARACTER = 5.6


def save_picture(
    spans: Sequence[Span], path: str | Path, *, heading: tuple[str, str] | None = None
) -> None:
    """Draw the spans; the path's suffix sets the format.

    Args:
        spans: measured, or simulated.
        heading: title and subtitle; None takes the summary's, for measured spans.
    Raises:
        ValueError: nothing was computed.
    """
    summary = summarize(spans)
    # Imported here, because training needs no matplotlib. Not pyplot, which would touch the
    # caller's backend and open figures.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    placed = _place(spans)
    bottom = placed[-1].top + placed[-1].height + _SPACE
    figure = Figure(
        figsize=(_WIDTH_INCHES, 1.45 + 0.5 * (bottom + _GAP)), dpi=150, facecolor="white"
    )
    height_inches = figure.get_size_inches()[1]
    axes = figure.add_axes((_LEFT, 0.4 / height_inches, _RIGHT - _LEFT, 1 - 1.4 / height_inches))
    start_s = min(span.start_s for span in spans)
    total_ms = (max(span.end_s for span in spans) - start_s) * 1e3
    axes.set_xlim(0, total_ms)
    axes.set_ylim(bottom, -0.05)
    stages = {stage.stage: stage for stage in summary.stages}
    for lane in placed:
        axes.broken_barh(
            [(0, total_ms)], (lane.top, lane.height), color=_IDLE, linewidth=0, zorder=1
        )
        _draw_bars(axes, lane, start_s, total_ms)
        _name(axes, lane, stages[lane.stage])
    shown = {span.op for span in spans}
    handles = [
        Patch(color=color, label=kind) for op, (kind, color) in _KINDS.items() if op in shown
    ]
    _dress(figure, axes, heading or (summary.title, summary.times), handles)
    figure.savefig(path)


@dataclass(frozen=True)
class _Lane:
    """Place some spans of a stage, downward from the top."""

    stage: int
    name: str
    spans: list[Span]
    top: float
    height: float


def _place(spans: Sequence[Span]) -> list[_Lane]:
    placed, top = [], 0.0
    for stage in sorted({span.stage for span in spans}):
        for name, members in lanes(spans, stage).items():
            if name != "wait":
                height = _STAGE_HEIGHT if name == "compute" else _LANE_HEIGHT
                placed.append(_Lane(stage, name, members, top, height))
                top += height + _SPACE
        top += _GAP
    return placed


def _name(axes: Any, lane: _Lane, stage: StageSummary) -> None:
    side = {"va": "center", "clip_on": False, "transform": axes.get_yaxis_transform()}
    middle = lane.top + lane.height / 2
    if lane.name != "compute":
        axes.text(-0.008, middle, lane.name, ha="right", color=_FAINT, fontsize=7, **side)
        return
    text = f"stage {stage.stage}"
    axes.text(-0.008, middle, text, ha="right", color=_INK, fontsize=11, **side)
    text = f"{stage.busy_fraction:.0%} busy\n{as_bytes(stage.peak_bytes)} kept"
    axes.text(1.008, middle, text, ha="left", color=_INK, fontsize=9, **side)


def _draw_bars(axes: Any, lane: _Lane, start_s: float, total_ms: float) -> None:
    """Draw a lane's spans, with labels where there is room."""
    points_a_ms = _WIDTH_INCHES * (_RIGHT - _LEFT) * 72 / max(total_ms, 1e-9)
    for span in lane.spans:
        start_ms = (span.start_s - start_s) * 1e3
        # Spans too short to see get a line.
        length_ms = max(span.duration_s * 1e3, 1.2 / points_a_ms)
        axes.broken_barh(
            [(start_ms, length_ms)], (lane.top, lane.height),
            facecolor=_KINDS[span.op][1], edgecolor="white", zorder=2,
            linewidth=0.6 if length_ms * points_a_ms > 3 else 0,
        )  # fmt: skip
        room = length_ms * points_a_ms / _POINTS_A_CHARACTER
        label = span.label if len(span.label) <= room else span.label[1:]
        if lane.name == "compute" and len(label) <= room:
            axes.text(
                start_ms + length_ms / 2, lane.top + lane.height / 2, label,
                ha="center", va="center", color="white", fontsize=8.5, zorder=3, clip_on=True,
            )  # fmt: skip


def _dress(figure: Any, axes: Any, heading: tuple[str, str], legend: Sequence[Any]) -> None:
    height_inches = figure.get_size_inches()[1]
    title, subtitle = heading
    figure.text(_LEFT, 1 - 0.36 / height_inches, title, color=_INK, fontsize=13, weight="bold")
    figure.text(_LEFT, 1 - 0.62 / height_inches, subtitle, color=_INK, fontsize=10)
    axes.legend(
        handles=legend,
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=5, frameon=False,
        fontsize=9, handlelength=1.0, handleheight=1.0, columnspacing=1.4, labelcolor=_INK,
    )  # fmt: skip
    axes.set_yticks([])
    axes.annotate(
        "ms", (1, 0), (4, -8), xycoords="axes fraction", textcoords="offset points",
        color=_FAINT, fontsize=9, va="center", annotation_clip=False,
    )  # fmt: skip
    axes.tick_params(axis="x", colors=_FAINT, labelsize=9, length=3)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
