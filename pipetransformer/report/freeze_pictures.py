"""Draw a policy's signals and decisions, and each layer's similarity to its final state."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from autopipe.trace import text_table
from freeze.signals import svcca
from pipetransformer.elastic import PROBE_FOLDER, read_looks
from pipetransformer.report.pictures import new_figure, open_frame, set_title, with_gaps
from pipetransformer.report.records import RecordedDecision, read_decisions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIGNAL_TITLES = {
    "gradient_norm": "Gradient norm",
    "gradient_l1": "Gradient, L1",
    "accumulated_gradient": "Accumulated gradient, L1",
    "relative_update": "Relative update a step",
    "probe_cka": "CKA with the start",
    "probe_change": "Similarity-preserving loss",
}

_SHADOWED = re.compile(r"would have \d+ frozen( and \[.*?\] resting)?")
_NUMBERS = re.compile(r"\d[\d.e+-]*")


def decision_table(decisions: Sequence[RecordedDecision]) -> str:
    """Write a line for every decision, and one line for several in a row that are alike.

    Such decisions change no layer, nor would the policy that a `Shadow` wraps, and their reasons
    differ in numbers alone. The line has the first reason. "rested" are the layers that rested
    until then. Below them stands the time of looks at the probe batch.
    """
    rows = [["steps", "epoch", "frozen", "rested", "loss", "reason"]]
    for _, equal in groupby(decisions, _said):
        first, *others = equal
        seen = first.context
        steps = str(seen.step) + (f" to {others[-1].context.step}" if others else "")
        loss = "" if seen.loss is None else f"{seen.loss:.4g}"
        frozen = f"{seen.num_frozen} -> {first.num_frozen}"
        rested = ", ".join(map(str, seen.resting))
        rows.append([steps, str(seen.epoch), frozen, rested, loss, first.reason])
    looks_s = [one.look_s for one in decisions if one.look_s]
    looks = f"{len(looks_s)} looks at the probe batch took {sum(looks_s):.3g} s"
    return "\n".join([text_table(rows), *([looks] if looks_s else [])])


def _said(decision: RecordedDecision) -> tuple[object, ...]:
    """Return what decisions of one line have in common."""
    seen, reason = decision.context, what_a_reason_says(decision.reason)
    return seen.num_frozen, decision.num_frozen, seen.resting, reason


def what_a_reason_says(reason: str) -> tuple[str, str]:
    """Return a reason's words without numbers, but for what a wrapped policy would freeze."""
    shadowed = _SHADOWED.search(reason)
    return shadowed[0] if shadowed else "", _NUMBERS.sub("", reason)


def draw_freezing(folder: Path) -> str:
    """Draw a run's signals and decisions as `freezing.png` into its folder; return a table.

    If the run looked at its layers' outputs, a panel has each layer's SVCCA with the last look.

    Raises:
        ValueError: the folder holds no decisions.
    """
    decisions = read_decisions(folder)
    signals = [name for name in SIGNAL_TITLES if any(name in one.signals for one in decisions)]
    looks = read_looks(folder / PROBE_FOLDER)
    num_panels = 1 + len(signals) + (len(looks) > 1)
    num_rows = math.ceil(num_panels / 2)
    figure = new_figure(12, 3.2 * num_rows)
    panels = [figure.add_subplot(num_rows, 2, 1 + index) for index in range(num_panels)]
    _draw_frozen(panels[0], decisions)
    for axes, name in zip(panels[1:], signals, strict=False):
        values = {
            one.context.step: [getattr(layer, name) for layer in one.context.layers]
            for one in decisions
        }
        _draw_layers(axes, values, SIGNAL_TITLES[name])
        if name != "probe_cka":
            axes.set_yscale("log")
    if len(looks) > 1:
        _draw_layers(panels[-1], similarities(looks), "SVCCA with the end")
    open_frame(*panels)
    for axes in panels:
        axes.set_xlabel("step")
    path = folder / "freezing.png"
    figure.savefig(path)
    return f"{decision_table(decisions)}\n\n{path}"


def _draw_frozen(axes: Axes, decisions: Sequence[RecordedDecision]) -> None:
    from matplotlib.ticker import MaxNLocator

    # The last decision holds until the end.
    steps = [one.context.step for one in decisions] + [decisions[-1].context.max_steps]
    frozen = [one.num_frozen for one in decisions] + [decisions[-1].num_frozen]
    axes.plot(steps, frozen, drawstyle="steps-post", linewidth=2.0)
    axes.set_ylim(-0.3, decisions[0].context.num_layers + 0.3)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    set_title(axes, "Frozen layers")


def _draw_layers(axes: Axes, values: dict[int, list[float | None]], title: str) -> None:
    """Draw a line for each layer over the steps; None is a gap."""
    from matplotlib import colormaps

    num_layers = max(map(len, values.values()))
    colors = colormaps["viridis"]
    for layer in range(num_layers):
        line = with_gaps(layers[layer] for layers in values.values())
        label = f"layer {layer}" if layer in (0, num_layers - 1) else None
        color = colors(layer / max(1, num_layers - 1))
        axes.plot(list(values), line, color=color, marker=".", markersize=3, label=label)
    set_title(axes, title)
    axes.legend(frameon=False, fontsize="small")


def similarities(looks: dict[int, dict[int, Tensor]]) -> dict[int, list[float | None]]:
    """Return each layer's SVCCA between every look and the last one."""
    *_, last = looks.values()
    # A file's layers are sorted as text, "10" before "2", and lack those that were always frozen.
    layers = range(max(last) + 1)
    return {
        step: [svcca(grams[i], last[i]) if i in grams and i in last else None for i in layers]
        for step, grams in looks.items()
    }
