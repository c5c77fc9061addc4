"""Make figures and panels that look alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipetransformer.extras import require

if TYPE_CHECKING:  # matplotlib is loaded where something is drawn: training needs none of it.
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Make a figure of 110 pixels an inch; without pyplot, it leaves the caller's alone.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require("matplotlib", purpose="drawing")
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    return Figure(figsize=(width_inches, height_inches), dpi=110, layout=layout)


def open_frame(*panels: Axes) -> None:
    """Leave the frame's left and bottom alone."""
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)


def set_title(axes: Axes, title: str) -> None:
    """Write a panel's title above its left edge."""
    axes.set_title(title, loc="left", fontweight="bold")


def with_gaps(values: Iterable[float | None]) -> list[float]:
    """Return what is drawn as a line with a gap at each None."""
    return [math.nan if value is None else value for value in values]
