"""Give all figures of experiments one look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # matplotlib is loaded where something is drawn: runs need none of it.
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Make a figure of 110 pixels an inch; not pyplot's, which would be the caller's current."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    return Figure(figsize=(width_inches, height_inches), dpi=110, layout=layout)


def open_frame(axes: Axes, **settings: Any) -> None:
    """Hide the top and right sides of a panel's frame, and rule it; settings are matplotlib's."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e6ea")
    axes.set(**settings)
