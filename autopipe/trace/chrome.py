"""Write a trace for ui.perfetto.dev or chrome://tracing.

A stage has lanes: one for what it computes, one for its waits, one for each link that it sends
over. Nothing overlaps in a lane: transfers under way at the same time get several lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopipe.trace.span import Span

Lanes = dict[str, list[Span]]
"""Spans by the name of their lane, ordered by start."""


def lanes(spans: Sequence[Span], stage: int) -> Lanes:
    """Sort a stage's spans into lanes: "compute", "wait", and "to stage k" for its transfers."""
    by_name: Lanes = {"compute": [], "wait": []}
    for span in sorted((s for s in spans if s.stage == stage), key=lambda s: s.start_s):
        if span.peer is None:
            by_name["compute" if span.is_compute else "wait"].append(span)
            continue
        name, number = f"to stage {span.peer}", 1
        while name in by_name and by_name[name][-1].end_s > span.start_s:
            number += 1
            name = f"to stage {span.peer} ({number})"
        by_name.setdefault(name, []).append(span)
    return by_name


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
        instructions = (span for span in spans if span.stage == stage and span.peer is None)
        events += [
            {
                "name": "kept activations",
                "ph": "C",
                "ts": (span.end_s - origin_s) * 1e6,
                "pid": pid,
                "args": {"bytes": span.kept_bytes},
            }
            for span in sorted(instructions, key=lambda span: span.end_s)
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
