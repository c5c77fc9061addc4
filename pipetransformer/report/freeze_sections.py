"""Show what a freeze policy saw of each layer, and what it decided."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from freeze.signals import svcca
from pipetransformer.elastic import PROBE_FOLDER, read_looks
from pipetransformer.report.page_figures import (
    Figure,
    Section,
    figure_of,
    number_of,
    text_of,
)
from pipetransformer.report.records import Record, finite, of_kind

_SIGNAL_TITLES = {
    "gradient_norm": "Gradient norm",
    "accumulated_gradient": "Accumulated gradient, L1",
    "relative_update": "Relative update a step",
    "probe_cka": "CKA with the start",
    "probe_change": "Similarity-preserving loss",
}

_NUMBERS = re.compile(r"\d[\d.e+-]*")


def decisions_section(records: list[Record]) -> Section:
    """Write a row for each decision, and one for several in a row that are alike."""
    title, decisions = "Decisions", of_kind(records, "decision")
    if not decisions:
        return Section(title, ("No decision is recorded.",))
    rows = [("step", "epochs done", "frozen layers", "rested", "loss", "reason")]
    for _, alike in groupby(decisions, _what_is_decided):
        first, *others = alike
        rows.append(
            (
                str(first["step"]) + (f" to {others[-1]['step']}" if others else ""),
                text_of(first, "epoch"),
                f"{text_of(first, 'frozen_before')} → {text_of(first, 'frozen')}",
                ", ".join(map(str, first.get("resting_before", ()))),
                number_of(first, "loss"),
                text_of(first, "reason"),
            )
        )
    notes = ["Several in a row that say the same are one row, with the first one's numbers."]
    if looks_s := [seconds for one in decisions if (seconds := one.get("look_seconds"))]:
        notes.append(f"{len(looks_s)} looks at the probe batch took {sum(looks_s):.3g} s.")
    return Section(title, tuple(notes), table=tuple(rows))


def _what_is_decided(decision: Record) -> tuple[object, ...]:
    """Return what alike decisions share: what changes, and the reason's words without numbers."""
    fields = ("frozen_before", "frozen", "resting_before")
    said = _NUMBERS.sub("", str(decision.get("reason")))
    return *(decision.get(field) for field in fields), said


def signals_section(records: list[Record], folder: Path) -> Section:
    """Draw each signal by layer, and the similarity of layers' outputs to their last look."""
    title, decisions = "What the policy saw of each layer", of_kind(records, "decision")
    figures = []
    for name in {name: None for one in decisions for name in one.get("signals", {})}:
        seen = {one["step"]: v for one in decisions if (v := one.get("signals", {}).get(name))}
        figures.append(_by_layer(_SIGNAL_TITLES.get(name, name), seen))
        if name != "probe_cka":
            figures[-1]["layout"]["yaxis"] |= {"type": "log", "exponentformat": "power"}
    looks = read_looks(folder / PROBE_FOLDER)
    if len(looks) > 1:
        figures.append(_by_layer("SVCCA with the last look", similarities(looks)))
    if not figures:
        none = "No signal is recorded: the policy asks for none, or saw none yet."
        return Section(title, (none,))
    return Section(title, ("A click in a legend hides a layer.",), tuple(figures))


def _by_layer(title: str, seen: Mapping[int, Sequence[Any]]) -> Figure:
    """Draw a line for each layer over the steps; None is a gap, as is a layer that is missing."""
    num_layers = max(map(len, seen.values()))
    lines = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"layer {layer}",
            "x": list(seen),
            "y": finite([v[layer] if layer < len(v) else None for v in seen.values()]),
            "marker": {"size": 4},
            "line": {"color": f"hsl({260 - 200 * layer // max(1, num_layers - 1)},60%,45%)"},
        }
        for layer in range(num_layers)
    ]
    return figure_of(title, *lines)


def similarities(looks: Mapping[int, Mapping[int, Tensor]]) -> dict[int, list[float | None]]:
    """Return each layer's SVCCA between every look and the last one; None where one lacks it."""
    *_, last = looks.values()
    # A file's layers are sorted as text, "10" before "2", and lack those that were always frozen.
    layers = range(max(last) + 1)
    return {
        step: [svcca(grams[i], last[i]) if i in grams and i in last else None for i in layers]
        for step, grams in looks.items()
    }
