"""Draw a traced step, from the file that `Trace.save_chrome` has written into a run's folder."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from pipetransformer.report.page_figures import Figure, Section, figure_of
from pipetransformer.report.records import finite

TRACE_FILE = "trace.json"

_KIND_COLORS = {
    "forward": "#3b6fb6",
    "recompute": "#e3a63a",
    "backward": "#3f9d6b",
    "update": "#b65a7a",
    "send_activation": "#8fb3dd",
    "send_gradient": "#94cdad",
}
"""Of a trace's spans; others, which are waits, are grey."""
_WAIT_COLOR = "#d5d8dd"


def trace_section(path: Path) -> Section:
    """Draw a trace's file; where it is missing or damaged, say so."""
    title = "A step's trace"
    if not path.exists():
        how = f"trainer.trace_step().save_chrome({path.name!r}) in the run's folder"
        return Section(title, (f"The folder holds no {path.name}; {how} writes one.",))
    try:
        figure = _trace_figure(json.loads(path.read_bytes())["traceEvents"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = f"{path.name} is not as Trace.save_chrome writes it: {error!r}."
        return Section(title, (said,))
    note = "Drag over a span of time to zoom in; a double click shows all."
    return Section(title, (note,), (figure,))


def _trace_figure(events: list[dict[str, Any]]) -> Figure:
    """Draw a lane's spans in a row, by the names that the trace gives processes and threads."""
    stages = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    if not spans:
        raise ValueError("it holds no span")
    bars = []
    for kind in {span["cat"]: None for span in spans}:
        own = [span for span in spans if span["cat"] == kind]
        lanes = [f"{stages[span['pid']]}, {threads[span['tid']]}" for span in own]
        bars.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": escape(kind.replace("_", " "), quote=False),
                "y": [escape(lane, quote=False) for lane in lanes],
                "base": finite([float(span["ts"]) / 1e3 for span in own]),
                "x": finite([float(span["dur"]) / 1e3 for span in own]),
                "text": [escape(str(span["name"]), quote=False) for span in own],
                "hovertemplate": "%{text}: %{x:.3f} ms from %{base:.3f} ms",
                "marker": {"color": _KIND_COLORS.get(kind, _WAIT_COLOR)},
            }
        )
    figure = figure_of("", *bars, x="milliseconds")
    rows = [
        escape(f"{stages[pid]}, {name}", quote=False)
        for pid in stages
        for tid, name in threads.items()
        if any((span["pid"], span["tid"]) == (pid, tid) for span in spans)
    ]
    figure["layout"] |= {
        "barmode": "overlay",
        "hovermode": "closest",
        "dragmode": "zoom",
        "height": 150 + 34 * len(rows),
        "yaxis": {
            "autorange": "reversed",
            "categoryarray": rows,
            "categoryorder": "array",
            "fixedrange": True,
            "automargin": True,
        },
    }
    return figure
