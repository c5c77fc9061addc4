"""Build a section of the page, and its figures: plotly's, as dicts of lists and numbers.

Plotly reads a little HTML in texts, so that names which users give are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from pipetransformer.report.records import Record, finite

OWN_COLOR, SECOND_COLOR, MARK_COLOR = "#0b6fb8", "#e6842a", "#c44e52"
CATEGORY_COLORS = {
    "compute": "#0b6fb8",
    "bubble": "#9ecae1",
    "transfer": "#e6842a",
    "all_reduce": "#f5c77e",
    "data": "#59a14f",
    "cache": "#a9d18e",
    "deciding": "#e8a5a7",
    "transition": "#c44e52",
    "other": "#c7cbd1",
}

Figure = dict[str, Any]
Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """Hold a part of the page.

    Args:
        notes: sentences above its figures; they say what is missing.
        table: rows below them, the header first.
        in_columns: whether its figures stand in two columns, below the first one.
    """

    title: str
    notes: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    table: Rows = ()
    in_columns: bool = False


def figure_of(title: str, *traces: Figure, x: str = "step", y: str = "") -> Figure:
    """Return a figure of traces; those without points are left out."""
    layout = {
        "title": {"text": escape(title, quote=False), "x": 0, "xref": "paper"},
        "xaxis": {"title": {"text": x}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": y}},
        "barmode": "stack",
        "hovermode": "x unified",
        "height": 300,
        "margin": {"l": 70, "r": 20, "t": 40, "b": 50},
        "legend": {"itemsizing": "constant"},
    }
    return {"data": [trace for trace in traces if trace["y"]], "layout": layout}


def line_of(
    records: Iterable[Record],
    field: str,
    name: str,
    *,
    x: str = "step",
    color: str = OWN_COLOR,
    width: float = 2.0,
) -> Figure:
    """Draw a field of the records that have it; null is a gap."""
    having = [record for record in records if field in record]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(having) < 50 else "lines",
        "name": escape(name, quote=False),
        "x": finite([record[x] for record in having]),
        "y": finite([record[field] for record in having]),
        "line": {"color": color, "width": width},
        "marker": {"size": 5},
    }


def bar_of(x: list[int], y: list[float], name: str, color: str) -> Figure:
    """Draw a part of stacked bars; null is none."""
    shown = escape(name, quote=False)
    return {"type": "bar", "name": shown, "x": x, "y": finite(y), "marker": {"color": color}}


def text_of(record: Record, field: str) -> str:
    """Write a field; a dash where there is none."""
    value = record.get(field)
    return "–" if value is None else str(value)


def number_of(record: Record, field: str) -> str:
    """Write four digits; a dash where there is no number."""
    value = record.get(field)
    return f"{value:.4g}" if isinstance(value, (int, float)) else "–"
