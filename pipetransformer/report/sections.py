"""Turn a run's records into the sections of a page: figures, tables and sentences.

    learning ─ pipelines ─ time ─ cache ─ decisions ─ signals

A figure is plotly's, as a dict of lists and numbers. Records of older versions lack fields, and a
young run lacks kinds of records: a section draws what there is, and says what is missing. Plotly
reads a little HTML in texts, so that names which users give are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from autopipe.trace import as_bytes
from freeze.signals import svcca
from pipetransformer.config import EVALUATION_FIELDS
from pipetransformer.elastic import PROBE_FOLDER, read_looks
from pipetransformer.report.picture import moving_picture
from pipetransformer.report.records import Record, epochs_of, finite, of_kind

Figure = dict[str, Any]
Rows = tuple[tuple[str, ...], ...]

_MOST_POINTS = 4000


@dataclass(frozen=True)
class Section:
    """Hold a part of the page.

    Args:
        notes: sentences above its figures; they say what is missing.
        table: rows below them, the header first.
        picture: SVG of ours above the figures, which holds no text of users.
    """

    title: str
    notes: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    table: Rows = ()
    picture: str = ""


def sections_of(records: list[Record], folder: Path) -> list[Section]:
    """Return the sections of a run's latest branch; its folder may hold looks at the layers."""
    return [
        _learning(records),
        _pipelines(records),
        _time(records),
        _cache(records),
        _decisions(records),
        _signals(records, folder),
    ]


def _learning(records: list[Record]) -> Section:
    title, steps, epochs = "Learning", of_kind(records, "step"), epochs_of(records)
    evaluations = of_kind(records, "evaluation")
    if not (steps or epochs):
        return Section(title, ("No step is recorded yet.",))
    size = math.ceil(len(steps) / _MOST_POINTS * 2) if len(steps) > _MOST_POINTS else 1
    losses = _figure(
        "Loss",
        _line(_extremes(steps, "loss", size), "loss", "each step"),
        _line(epochs, "loss", "training, mean of an epoch"),
        _line(evaluations, "loss", "evaluation"),
    )
    metrics = {
        name
        for one in evaluations
        for name, value in one.items()
        if isinstance(value, int | float)
    }
    figures = [
        _figure(name, _line(evaluations, name, name))
        for name in sorted(metrics - set(EVALUATION_FIELDS))
    ]
    for field, name in (("learning_rate", "Learning rate"), ("gradient_norm", "Gradient norm")):
        if any(step.get(field) is not None for step in steps):
            figures.append(_figure(name, _line(_extremes(steps, field, size), field, name)))
    thin = f"Of every {size} steps the lowest and the highest are drawn." if size > 1 else ""
    missing = "" if evaluations else "No evaluation is recorded."
    return Section(title, tuple(filter(None, (thin, missing))), (losses, *figures))


def _extremes(steps: list[Record], field: str, size: int) -> list[Record]:
    """Keep the lowest and the highest of every `size` steps, and one that is not finite.

    Means would hide the peaks that one looks for.
    """
    extremes = []
    for start in range(0, len(steps), size):
        group = steps[start : start + size]
        known = [step for step in group if step.get(field) is not None]
        ends = [pick(known, key=lambda step: step[field]) for pick in (min, max) if known]
        unknown = [step for step in group if step.get(field) is None][:1]
        chosen = {id(step) for step in (*ends, *unknown)}
        extremes += [step for step in group if id(step) in chosen]
    return extremes


def _pipelines(records: list[Record]) -> Section:
    steps, has_pipeline = of_kind(records, "step"), is_pipeline(records)
    title = "Frozen layers and pipelines" if has_pipeline else "Frozen layers"
    pipelines = {"length": "K", "replicas": "R", "micro_batches": "micro-batches"}
    shown = {"step": "step", "frozen": "frozen layers", **(pipelines if has_pipeline else {})}
    measured = {record.get("changed_step"): record for record in of_kind(records, "outcome")}
    rows = [
        (
            *(_text(record.get(name)) for name in (*shown, "seconds", "predicted_step_s")),
            _text(measured.get(record["step"], {}).get("measured_step_s")),
        )
        for record in of_kind(records, "transition")
    ]
    times = ("transition, s", "a step predicted, s", "a step measured, s")
    header = (*shown.values(), *times)
    table = (header, *rows) if rows else ()
    if not steps:
        return Section(title, ("No step is recorded yet.",), table=table)
    names = {"frozen": "frozen layers"}
    if has_pipeline:
        names |= {"length": "stages (K)", "replicas": "replicas (R)"}
    lines = [
        _line(_changes(steps, field), field, name, x="elapsed_s")
        | {"mode": "lines", "line": {"shape": "hv"}}
        for field, name in names.items()
    ]
    figure = _figure("", *lines, x="seconds since the start")
    return Section(title, (), (figure,), table, moving_picture(records) if has_pipeline else "")


def is_pipeline(records: list[Record]) -> bool:
    """Return whether a run had several stages or replicas at any time."""
    shapes = [*of_kind(records, "step"), *of_kind(records, "transition")]
    return any((record.get("length", 1), record.get("replicas", 1)) != (1, 1) for record in shapes)


def _changes(steps: list[Record], field: str) -> list[Record]:
    """Keep the steps at which a field changes, and the last one."""
    before = [None, *(step.get(field) for step in steps)]
    changed = [step for step, was in zip(steps, before, strict=False) if step.get(field) != was]
    return [*changed, steps[-1]]


def _time(records: list[Record]) -> Section:
    title, epochs = "Where the time went", epochs_of(records)
    if not epochs:
        return Section(title, ("No epoch is over yet; its parts are recorded at its end.",))
    parts = [dict(epoch.get("breakdown", {})) for epoch in epochs]
    for part in parts if not is_pipeline(records) else ():
        # One process waits for nobody: what is booked there are microseconds of its own.
        alone_s = part.pop("bubble", 0.0) + part.pop("all_reduce", 0.0)
        if "other" in part:
            part["other"] += alone_s
    names = {name: None for part in parts for name in part}
    x = [epoch["epoch"] for epoch in epochs]
    bars = [
        _bar(x, [part.get(name, 0.0) for part in parts], name.replace("_", "-")) for name in names
    ]
    rate = _line(epochs, "samples_per_s", "samples per second", x="epoch")
    beside = {
        kind: sum(record.get("seconds") or 0.0 for record in of_kind(records, kind))
        for kind in ("evaluation", "checkpoint")
    }
    notes = [f"{name}, beside that: {seconds:.3f} s." for name, seconds in beside.items()]
    if epochs[-1].get("partial"):
        notes.append("The last epoch is partial.")
    figures = (
        _figure("", *bars, x="epoch", y="seconds, mean of all processes"),
        _figure("Throughput", rate, x="epoch"),
    )
    return Section(title, tuple(notes), figures)


def _cache(records: list[Record]) -> Section:
    counts: dict[int, list[int]] = {}
    for step in of_kind(records, "step"):
        hits, misses, upgrades = (
            step.get(f"cache_{name}") or 0 for name in ("hits", "misses", "upgrades")
        )
        row = counts.setdefault(step.get("epoch", 0) + 1, [0, 0, 0])
        for index, more in enumerate((hits, upgrades, misses - upgrades)):
            row[index] += more
    if not any(map(sum, counts.values())):
        none = "Nothing was looked up: no layer is frozen yet, or cache=False."
        return Section("Cache", (none,))
    names = ("read", "read, newly frozen layers run", "computed")
    bars = [
        _bar(list(counts), [row[index] for row in counts.values()], name)
        for index, name in enumerate(names)
    ]
    sizes = [size for one in epochs_of(records) if (size := one.get("cache_bytes")) is not None]
    taken = "No epoch records the bytes that the cache took."
    if sizes:
        taken = f"It took at most {as_bytes(sizes[-1])} on the first node."
    figure = _figure("Samples behind frozen layers", *bars, x="epoch", y="samples")
    return Section("Cache", (taken,), (figure,))


def _decisions(records: list[Record]) -> Section:
    title, decisions = "Decisions", of_kind(records, "decision")
    if not decisions:
        return Section(title, ("No decision is recorded.",))
    rows = [
        (
            *(_text(record.get(name)) for name in ("step", "epoch", "frozen_before", "frozen")),
            ", ".join(map(str, record.get("resting_before", ()))),
            *(_text(record.get(name)) for name in ("loss", "reason")),
        )
        for record in decisions
    ]
    header = ("step", "epochs done", "frozen before", "frozen", "rested", "loss", "reason")
    looks_s = [seconds for record in decisions if (seconds := record.get("look_seconds"))]
    note = f"{len(looks_s)} looks at the probe batch took {sum(looks_s):.3g} s."
    return Section(title, (note,) if looks_s else (), table=(header, *rows))


def _signals(records: list[Record], folder: Path) -> Section:
    """Draw each signal by layer, and the similarity of layers' outputs to their last look."""
    title, decisions = "What the policy saw of each layer", of_kind(records, "decision")
    figures = []
    for name in {name: None for one in decisions for name in one.get("signals", {})}:
        seen = {one["step"]: v for one in decisions if (v := one.get("signals", {}).get(name))}
        figures.append(_by_layer(name.replace("_", " "), seen))
    looks = read_looks(folder / PROBE_FOLDER)
    if len(looks) > 1:
        figures.append(_by_layer("SVCCA with the last look", similarities(looks)))
    if not figures:
        none = "No signal is recorded: the policy asks for none, or saw none yet."
        return Section(title, (none,))
    return Section(title, ("A click in a legend hides a layer.",), tuple(figures))


def _by_layer(title: str, seen: Mapping[int, Sequence[Any]]) -> Figure:
    """Draw a line for each layer over the steps; None is a gap, as is a layer that is missing."""
    records = [{"step": step, **dict(enumerate(values))} for step, values in seen.items()]
    num_layers = max(map(len, seen.values()))
    lines = [
        _line([{layer: None, **record} for record in records], layer, f"layer {layer}")
        for layer in range(num_layers)
    ]
    return _figure(title, *lines)


def similarities(looks: Mapping[int, Mapping[int, Tensor]]) -> dict[int, list[float | None]]:
    """Return each layer's SVCCA between every look and the last one; None where one lacks it."""
    *_, last = looks.values()
    # A file's layers are sorted as text, "10" before "2", and lack those that were always frozen.
    layers = range(max(last) + 1)
    # Outputs have more numbers than the probe has samples, so that 99 % of their variance takes
    # nearly all directions there are: any two layers would agree.
    most = max(1, len(next(iter(last.values()))) // 4)
    return {
        step: [
            svcca(grams[i], last[i], most=most) if i in grams and i in last else None
            for i in layers
        ]
        for step, grams in looks.items()
    }


def _figure(title: str, *traces: Figure, x: str = "step", y: str = "") -> Figure:
    """Return a figure of traces; those without points are left out."""
    layout = {
        "title": {"text": escape(title, quote=False), "x": 0, "xref": "paper"},
        "xaxis": {"title": {"text": x}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": y}},
        "barmode": "stack",
        "hovermode": "x unified",
        "height": 300,
        "margin": {"l": 70, "r": 20, "t": 40, "b": 50},
    }
    return {"data": [trace for trace in traces if trace["y"]], "layout": layout}


def _line(records: Iterable[Mapping[Any, Any]], field: Any, name: str, x: str = "step") -> Figure:
    """Draw a field of the records that have it; null is a gap."""
    having = [record for record in records if field in record]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(having) < 50 else "lines",
        "name": escape(name, quote=False),
        "x": finite([record[x] for record in having]),
        "y": finite([record[field] for record in having]),
    }


def _bar(x: list[int], y: list[float], name: str) -> Figure:
    """Draw a part of stacked bars; null is none."""
    return {"type": "bar", "name": escape(name, quote=False), "x": x, "y": finite(y)}


def _text(value: Any) -> str:
    """Write a field: four digits of a number, and a dash where there is none."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)
