"""Draw one picture, and a table, of a run's learning, its pipelines and its time.

The helpers below give all figures one look.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from autopipe.trace import text_table
from pipetransformer.config import EVALUATION_FIELDS
from pipetransformer.extras import require
from pipetransformer.report.records import RECORDS_FILE, Record, latest_branch, read_records

if TYPE_CHECKING:  # matplotlib is loaded where something is drawn: training needs none of it.
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OWN_COLOR, OTHER_COLORS = "#0b6fb8", ("#8a8f98", "#59a14f")
SECOND_COLOR, MARK_COLOR = "#e6842a", "#c44e52"
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
Runs: TypeAlias = Mapping[str, list[Record]]
"""Records of runs by name; the last is reported, and up to two stand beside it."""


def draw_report(runs: Runs, path: Path) -> None:
    """Draw runs as a PNG of 1320 x 880 pixels.

    Raises:
        ValueError: the last run has no epoch.
    """
    *_, reported = runs.values()
    metric = _metric(reported)
    if not epochs_of(reported):
        raise ValueError(
            f"the {len(reported)} records given hold no epoch; train at least one whole epoch "
            "before drawing the report"
        )
    figure = new_figure(12, 8)
    panels = figure.subplot_mosaic(
        [["loss", "speed"], ["accuracy", "speed"], ["frozen", "parts"], ["shape", "parts"]]
    )
    open_frame(*panels.values())
    for axes in panels.values():
        axes.grid(axis="y", color="#e4e6ea")
        axes.set_axisbelow(True)
    _draw_learning(panels["loss"], panels["accuracy"], runs, metric)
    _draw_topology(panels["frozen"], panels["shape"], reported)
    _draw_throughput(panels["speed"], runs)
    _draw_breakdown(panels["parts"], runs)
    figure.savefig(path)


def total_breakdown(records: list[Record]) -> dict[str, float]:
    """Sum the seconds of each category over a run."""
    parts = [epoch["breakdown"] for epoch in epochs_of(records)]
    return {name: sum(part.get(name, 0.0) for part in parts) for name in CATEGORY_COLORS}


def breakdown_table(runs: Runs) -> str:
    """Write the seconds of runs by category as plain text, with their sums."""
    columns = [total_breakdown(records) for records in runs.values()]
    rows = [["seconds", *runs]]
    for name in CATEGORY_COLORS:
        rows.append([name.replace("_", "-"), *(f"{column[name]:.1f}" for column in columns)])
    rows.append(["sum", *(f"{sum(column.values()):.1f}" for column in columns)])
    return text_table(rows)


def draw_folder(folder: Path) -> str:
    """Draw a run's records as `report.png` into its folder; return a table of where its time went.

    Before the first epoch is over, return a sentence that says so, and draw nothing.

    Raises:
        ValueError: the folder holds no records.
    """
    runs = {"elastic": latest_branch(read_records(folder / RECORDS_FILE))}
    if not epochs_of(runs["elastic"]):
        return "no epoch is over yet, so that there is no report.png"
    draw_report(runs, folder / "report.png")
    return f"{breakdown_table(runs)}\n\n{folder / 'report.png'}"


def _draw_learning(loss: Axes, judged: Axes, runs: Runs, metric: str) -> None:
    from matplotlib.ticker import FuncFormatter

    highest = 0.0
    for name, records, color in _colored(runs):
        _line(loss, of_kind(records, "step"), "loss", color=color, alpha=0.25, linewidth=0.8)
        _line(loss, epochs_of(records), "loss", color=color, label=name)
        evaluations = of_kind(records, "evaluation")
        _line(judged, evaluations, metric, color=color, marker=".")
        highest = max([highest, *(one.get(metric) or 0.0 for one in evaluations)])
    set_title(loss, "Learning")
    loss.set(ylabel="training loss", ylim=(0, None))
    loss.legend(frameon=False)
    judged.set_ylabel(f"test {metric.replace('_', ' ')}")
    if metric == "accuracy" and highest <= 1:
        # As many digits as a tick has: 24.5 % is neither 24 % nor 24.50 %.
        judged.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.6g}%"))
    _share_time(loss, judged)


def _metric(records: list[Record]) -> str:
    """Return the metric to draw: the accuracy, or the first other one, or the loss."""
    evaluations = of_kind(records, "evaluation")
    first = evaluations[0] if evaluations else {}
    named = [name for name in first if name not in EVALUATION_FIELDS]
    numbers = [name for name in named if isinstance(first[name], (int, float))]
    return "accuracy" if "accuracy" in numbers or not evaluations else (numbers or ["loss"])[0]


def _draw_topology(frozen: Axes, shape: Axes, records: list[Record]) -> None:
    """Draw frozen layers above K and R, with a mark at every transition."""
    from matplotlib.ticker import MaxNLocator

    steps = of_kind(records, "step")
    steady: Any = {"drawstyle": "steps-post", "linewidth": 2.0}
    _line(frozen, steps, "frozen", color=OWN_COLOR, **steady)
    _line(shape, steps, "length", color=OWN_COLOR, label="stages (K)", **steady)
    _line(shape, steps, "replicas", color=SECOND_COLOR, label="replicas (R)", ls="--", **steady)
    for axes in (frozen, shape):
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0, top=max(1.0, axes.get_ylim()[1]))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        for index, event in enumerate(of_kind(records, "transition")):
            label = "transition" if index == 0 else None
            axes.axvline(event["elapsed_s"], color=MARK_COLOR, ls=":", lw=1.2, label=label)
    set_title(frozen, "Freezing and topology")
    frozen.set_ylabel("frozen layers")
    shape.set_ylabel("K and R")
    shape.legend(ncols=3, loc="lower left", edgecolor="none", framealpha=0.9)
    _share_time(frozen, shape)


def _draw_throughput(axes: Axes, runs: Runs) -> None:
    for name, records, color in _colored(runs):
        _line(axes, epochs_of(records), "samples_per_s", color=color, label=name, marker=".")
    set_title(axes, "Throughput")
    axes.set_ylabel("samples per second, mean of each epoch")
    axes.set(xlabel="seconds since the start", xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False)


def _draw_breakdown(axes: Axes, runs: Runs) -> None:
    """Stack the seconds of each epoch by category; other runs' mean epochs stand beside."""
    *others, (_, reported) = runs.items()
    epochs = epochs_of(reported)
    places = [float(epoch["epoch"]) for epoch in epochs]
    bars = [epoch["breakdown"] for epoch in epochs]
    width = max(1.0, len(epochs) / 8)  # Wide enough for their names.
    for name, records in others:
        if num_epochs := len(epochs_of(records)):
            mean = {part: total / num_epochs for part, total in total_breakdown(records).items()}
            places.append(places[-1] + 1.0 + width)
            bars.append(mean)
            label = f"mean\n{name}".replace(" ", "\n")
            top = sum(mean.values())
            axes.text(places[-1], top, label, ha="center", va="bottom", fontsize="small")
    bottoms = [0.0] * len(bars)
    for name, color in CATEGORY_COLORS.items():
        heights = [bar.get(name, 0.0) for bar in bars]
        axes.bar(places, heights, 0.8, bottoms, color=color, label=name.replace("_", "-"))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    set_title(axes, "Where each epoch's time went")
    # Headroom for the notes above the other runs' bars.
    axes.margins(y=0.2)
    axes.set(ylabel="seconds", xlabel="epoch")
    axes.set_xticks(places[: len(epochs) : max(1, len(epochs) // 8)])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=5, frameon=False)


def _colored(runs: Runs) -> Iterator[tuple[str, list[Record], str]]:
    colors = (*OTHER_COLORS[: len(runs) - 1], OWN_COLOR)
    for (name, records), color in zip(runs.items(), colors, strict=True):
        yield name, records, color


def of_kind(records: list[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def epochs_of(records: list[Record]) -> list[Record]:
    """Select the epochs; of one that is partial, and gone on with, the whole."""
    return list({record["epoch"]: record for record in of_kind(records, "epoch")}.values())


def _line(axes: Axes, records: list[Record], field: str, **style: Any) -> None:
    """Plot a field over the seconds since the start; null or missing is a gap."""
    seconds = [record["elapsed_s"] for record in records]
    axes.plot(seconds, with_gaps(record.get(field) for record in records), **style)


def _share_time(upper: Axes, lower: Axes) -> None:
    """Put two panels on one time axis, labelled below the lower."""
    upper.sharex(lower)
    upper.tick_params(labelbottom=False)
    lower.set(xlabel="seconds since the start", xlim=(0, None))


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Make a figure of 110 pixels an inch.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require("matplotlib", purpose="drawing")
    # Not pyplot, whose current figure is the caller's.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    return Figure(figsize=(width_inches, height_inches), dpi=110, layout=layout)


def open_frame(*panels: Axes) -> None:
    """Hide the top and right sides of panels' frames."""
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)


def set_title(axes: Axes, title: str) -> None:
    """Write a panel's title above its left edge."""
    axes.set_title(title, loc="left", fontweight="bold")


def with_gaps(values: Iterable[float | None]) -> list[float]:
    """Replace None by NaN, which matplotlib draws as a gap."""
    return [math.nan if value is None else value for value in values]
