"""Report: one picture and two tables of what a run did and where its time went.

+--------------------+---------------------------+
| loss               | samples per second        |
| accuracy           |                           |
+--------------------+---------------------------+
| frozen layers      | seconds of each epoch by  |
| K and R            | category, others beside   |
+--------------------+---------------------------+
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pipetransformer.report.records import (
    BREAKDOWN_CATEGORIES,
    RECORDS_FILE,
    Record,
    read_records,
)
from pipetransformer.tables import text_table

if TYPE_CHECKING:  # matplotlib is loaded where something is drawn: training needs none of it.
    from matplotlib.axes import Axes

ELASTIC = "elastic"
"""The run that is reported; the others stand beside it."""
LABELS = {"baseline": "without freezing", "published": "published rules", ELASTIC: "elastic"}
COLORS = {"baseline": "#8a8f98", "published": "#59a14f", ELASTIC: "#0b6fb8"}
SECOND_COLOR = "#e6842a"
MARK_COLOR = "#c44e52"
CATEGORY_COLORS = {
    "compute": "#0b6fb8",
    "bubble": "#9ecae1",
    "transfer": "#e6842a",
    "all_reduce": "#f5c77e",
    "data": "#59a14f",
    "cache": "#a9d18e",
    "transition": "#c44e52",
    "other": "#c7cbd1",
}
Runs: TypeAlias = Mapping[str, list[Record]]
"""Records of runs by their names in LABELS, in the order in which they are shown."""


def draw_report(runs: Runs, path: Path) -> None:
    """Draw a run as a PNG: learning, freezing and topology, throughput, time by category.

    Args:
        runs: the elastic run, and those that are drawn beside it.
        path: the picture to write, 1320 x 880 pixels.
    Raises:
        ValueError: there is no epoch in the elastic run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    elastic = runs[ELASTIC]
    if not _of_kind(elastic, "epoch"):
        raise ValueError(
            f"the {len(elastic)} records given hold no epoch; train at least one whole epoch "
            "before drawing the report"
        )
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(12, 8), dpi=110, layout=layout)
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic(
        [["loss", "speed"], ["accuracy", "speed"], ["frozen", "parts"], ["shape", "parts"]]
    )
    for axes in panels.values():
        _tidy(axes)
    _draw_learning(panels["loss"], panels["accuracy"], runs)
    _draw_topology(panels["frozen"], panels["shape"], elastic)
    _draw_throughput(panels["speed"], runs)
    _draw_breakdown(panels["parts"], runs)
    figure.savefig(path)


def total_breakdown(records: list[Record]) -> dict[str, float]:
    """Sum the seconds of each category over a run; the last record of a repeated epoch counts."""
    parts = [epoch["breakdown"] for epoch in _epochs(records)]
    return {name: sum(part.get(name, 0.0) for part in parts) for name in BREAKDOWN_CATEGORIES}


def breakdown_table(runs: Runs) -> str:
    """Write the seconds of runs by category as plain text, with their sums."""
    columns = [total_breakdown(records) for records in runs.values()]
    rows = [["seconds", *(LABELS[name] for name in runs)]]
    for name in BREAKDOWN_CATEGORIES:
        rows.append([_spoken(name), *(f"{column[name]:.1f}" for column in columns)])
    rows.append(["sum", *(f"{sum(column.values()):.1f}" for column in columns)])
    return text_table(rows)


def draw_folder(folder: Path) -> str:
    """Draw a run's records as `report.png` into its folder; return a table of where its time went.

    Raises:
        ValueError: the folder holds no records, or no epoch of them.
    """
    path = folder / RECORDS_FILE
    if not path.exists():
        raise ValueError(f"{folder} holds no {RECORDS_FILE}; give the folder= of a run")
    runs = {ELASTIC: read_records(path)}
    draw_report(runs, folder / "report.png")
    return f"{breakdown_table(runs)}\n\n{folder / 'report.png'}"


def _draw_learning(loss: Axes, accuracy: Axes, runs: Runs) -> None:
    """Draw training loss above test accuracy."""
    from matplotlib.ticker import PercentFormatter

    for name, records in runs.items():
        color = COLORS[name]
        _line(loss, _of_kind(records, "step"), "loss", color=color, alpha=0.25, linewidth=0.8)
        _line(loss, _epochs(records), "loss", color=color, label=LABELS[name])
        _line(accuracy, _of_kind(records, "evaluation"), "accuracy", color=color, marker=".")
    _title(loss, "Learning")
    loss.set_ylabel("training loss")
    loss.set_ylim(bottom=0)
    loss.legend(frameon=False)
    accuracy.set_ylabel("test accuracy")
    accuracy.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    _share_time(loss, accuracy)


def _draw_topology(frozen: Axes, shape: Axes, records: list[Record]) -> None:
    """Draw frozen layers above K and R, with a mark at every transition."""
    from matplotlib.ticker import MaxNLocator

    steps = _of_kind(records, "step")
    steady = {"drawstyle": "steps-post", "linewidth": 2.0}
    _line(frozen, steps, "frozen", color=COLORS[ELASTIC], **steady)
    _line(shape, steps, "length", color=COLORS[ELASTIC], label="stages (K)", **steady)
    dashed = {"linestyle": "--", **steady}
    _line(shape, steps, "replicas", color=SECOND_COLOR, label="replicas (R)", **dashed)
    for axes in (frozen, shape):
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0, top=max(1.0, axes.get_ylim()[1]))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        marks = [event["elapsed_s"] for event in _of_kind(records, "transition")]
        for index, mark in enumerate(marks):
            label = "transition" if index == 0 else None
            axes.axvline(mark, color=MARK_COLOR, linestyle=":", linewidth=1.2, label=label)
    _title(frozen, "Freezing and topology")
    frozen.set_ylabel("frozen layers")
    shape.set_ylabel("K and R")
    shape.legend(ncols=3, loc="lower left", edgecolor="none", framealpha=0.9)
    _share_time(frozen, shape)


def _draw_throughput(axes: Axes, runs: Runs) -> None:
    """Draw samples per second, each epoch as a point."""
    for name, records in runs.items():
        style = {"color": COLORS[name], "label": LABELS[name], "marker": "."}
        _line(axes, _epochs(records), "samples_per_s", **style)
    _title(axes, "Throughput")
    axes.set_ylabel("samples per second, mean of each epoch")
    axes.set_xlabel("seconds since the start")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _draw_breakdown(axes: Axes, runs: Runs) -> None:
    """Stack the seconds of each epoch by category; other runs' mean epochs stand beside."""
    epochs = _epochs(runs[ELASTIC])
    places = [float(epoch["epoch"]) for epoch in epochs]
    bars = [epoch["breakdown"] for epoch in epochs]
    width = max(1.0, len(epochs) / 8)  # Wide enough for their names.
    for name, records in runs.items():
        if name == ELASTIC or not (num_epochs := len(_epochs(records))):
            continue
        mean = {part: total / num_epochs for part, total in total_breakdown(records).items()}
        places.append(places[-1] + 1.0 + width)
        bars.append(mean)
        top = (places[-1], sum(mean.values()))
        label = f"mean\n{LABELS[name]}".replace(" ", "\n")
        axes.annotate(label, top, ha="center", va="bottom", fontsize="small")
    bottoms = [0.0] * len(bars)
    for name in BREAKDOWN_CATEGORIES:
        heights = [bar.get(name, 0.0) for bar in bars]
        axes.bar(places, heights, 0.8, bottoms, color=CATEGORY_COLORS[name], label=_spoken(name))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    _title(axes, "Where each epoch's time went")
    # Headroom for the notes above the other runs' bars.
    axes.margins(y=0.2)
    axes.set_ylabel("seconds")
    axes.set_xlabel("epoch")
    axes.set_xticks(places[: len(epochs) : max(1, len(epochs) // 8)])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False)


def _of_kind(records: list[Record], kind: str) -> list[Record]:
    """Select the records of one kind."""
    return [record for record in records if record["kind"] == kind]


def _epochs(records: list[Record]) -> list[Record]:
    """Select the epochs; of an epoch repeated after a resume only the last record."""
    return list({record["epoch"]: record for record in _of_kind(records, "epoch")}.values())


def _line(axes: Axes, records: list[Record], field: str, **style: Any) -> None:
    """Plot a field over the seconds since the start; a null leaves a gap."""
    seconds = [record["elapsed_s"] for record in records]
    values = [math.nan if record[field] is None else record[field] for record in records]
    axes.plot(seconds, values, **style)


def _share_time(upper: Axes, lower: Axes) -> None:
    """Put two panels on one time axis, labelled below the lower."""
    upper.sharex(lower)
    upper.tick_params(labelbottom=False)
    lower.set_xlabel("seconds since the start")
    lower.set_xlim(left=0)


def _tidy(axes: Axes) -> None:
    """Leave only what carries information: two spines and a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e6ea")
    axes.set_axisbelow(True)


def _title(axes: Axes, text: str) -> None:
    """Write a panel's title."""
    axes.set_title(text, loc="left", fontweight="bold")


def _spoken(name: str) -> str:
    """Write a category as a reader would say it."""
    return name.replace("all_reduce", "all-reduce")
