"""Turn a run's records into the sections of a page: figures, tables and sentences.

    learning ─ pipelines ─ time ─ cache ─ decisions ─ signals

A figure is plotly's, as a dict of lists and numbers. Records of older versions lack fields, and a
young run lacks kinds of records: a section draws what there is, and says what is missing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from autopipe.trace import as_bytes
from pipetransformer.config import EVALUATION_FIELDS
from pipetransformer.report.freeze_sections import decisions_section, signals_section
from pipetransformer.report.page_figures import (
    CATEGORY_COLORS,
    MARK_COLOR,
    OWN_COLOR,
    SECOND_COLOR,
    Rows,
    Section,
    bar_of,
    figure_of,
    line_of,
    number_of,
    text_of,
)
from pipetransformer.report.records import Record, epochs_of, of_kind

_MOST_POINTS = 4000


def sections_of(records: list[Record], folder: Path) -> list[Section]:
    """Return the sections of a run's latest branch; its folder may hold looks."""
    return [
        _learning(records),
        _pipelines(records),
        _time(records),
        _cache(records),
        decisions_section(records),
        signals_section(records, folder),
    ]


def _learning(records: list[Record]) -> Section:
    title, steps, epochs = "Learning", of_kind(records, "step"), epochs_of(records)
    evaluations = of_kind(records, "evaluation")
    if not (steps or epochs):
        return Section(title, ("No step is recorded yet.",))
    size = math.ceil(len(steps) / _MOST_POINTS * 2) if len(steps) > _MOST_POINTS else 1
    thin = f"Of every {size} steps the lowest and the highest are drawn." if size > 1 else ""
    losses = figure_of(
        "Loss",
        line_of(_extremes(steps, "loss", size), "loss", "each step", color="#9ecae1", width=1),
        line_of(epochs, "loss", "training, mean of an epoch", color=OWN_COLOR),
        line_of(evaluations, "loss", "evaluation", color=SECOND_COLOR),
    )
    judged = [figure_of(name, line_of(evaluations, name, name)) for name in _metrics(evaluations)]
    others = []
    for field, name in (("learning_rate", "Learning rate"), ("gradient_norm", "Gradient norm")):
        if any(step.get(field) is not None for step in steps):
            others.append(figure_of(name, line_of(_extremes(steps, field, size), field, name)))
            others[-1]["layout"]["yaxis"]["rangemode"] = "tozero"
    missing = "" if evaluations else "No evaluation is recorded."
    figures = (losses, *judged, *others)
    return Section(title, _said(thin, missing), figures, in_columns=True)


def _metrics(evaluations: list[Record]) -> list[str]:
    """Name the numbers of evaluations, without the loss."""
    names = {
        name
        for one in evaluations
        for name, value in one.items()
        if name not in EVALUATION_FIELDS and isinstance(value, (int, float))
    }
    return sorted(names)


def _extremes(steps: list[Record], field: str, size: int) -> list[Record]:
    """Keep the lowest and the highest of every `size` steps, and one that is not finite.

    Means would hide the peaks that one looks for.
    """
    kept = []
    for start in range(0, len(steps), size):
        group = steps[start : start + size]
        known = [step for step in group if step.get(field) is not None]
        ends = [pick(known, key=lambda step: step[field]) for pick in (min, max) if known]
        unknown = [step for step in group if step.get(field) is None][:1]
        chosen = {id(step) for step in (*ends, *unknown)}
        kept += [step for step in group if id(step) in chosen]
    return kept


def _pipelines(records: list[Record]) -> Section:
    title, transitions = "Frozen layers and pipelines", of_kind(records, "transition")
    changes = _changes(of_kind(records, "step"), ("frozen", "length", "replicas"))
    if not changes:
        return Section(title, ("No step is recorded yet.",), table=_transition_rows(records))
    shown = [
        ("frozen", "frozen layers", "y", OWN_COLOR, "solid"),
        ("length", "stages (K)", "y2", OWN_COLOR, "solid"),
        ("replicas", "replicas (R)", "y2", SECOND_COLOR, "dash"),
    ]
    lines = [
        line_of(changes, field, name, x="elapsed_s")
        | {"yaxis": axis, "mode": "lines", "line": {"color": color, "dash": dash, "shape": "hv"}}
        for field, name, axis, color, dash in shown
    ]
    marks = [
        {
            "type": "line",
            "yref": "paper",
            **{"x0": one["elapsed_s"], "x1": one["elapsed_s"], "y0": 0, "y1": 1},
            "line": {"color": MARK_COLOR, "dash": "dot", "width": 1},
        }
        for one in transitions
    ]
    figure = figure_of("", *lines, x="seconds since the start")
    # One axis of time for both: it belongs to the lower one.
    figure["layout"]["xaxis"] |= {"anchor": "y2"}
    figure["layout"] |= {
        "shapes": marks,
        "yaxis": {"title": {"text": "frozen layers"}, "domain": [0.55, 1], "rangemode": "tozero"},
        "yaxis2": {"title": {"text": "K and R"}, "domain": [0, 0.45], "rangemode": "tozero"},
        "height": 420,
    }
    for axis, fields in (("yaxis", ["frozen"]), ("yaxis2", ["length", "replicas"])):
        highest = max(one.get(field) or 0 for one in changes for field in fields)
        figure["layout"][axis]["dtick"] = max(1, math.ceil(highest / 5))
    note = "A dotted line is a transition: layers froze, or moved to other processes."
    return Section(title, (note,), (figure,), _transition_rows(records))


def _changes(records: list[Record], fields: Sequence[str]) -> list[Record]:
    """Keep the records at which one of the fields changes, and the last one."""
    kept = [next(group) for _, group in groupby(records, lambda r: [r.get(f) for f in fields])]
    return kept if not kept or kept[-1] is records[-1] else [*kept, records[-1]]


def _transition_rows(records: list[Record]) -> Rows:
    """Write a row for each transition, with the step that was predicted, and the measured one."""
    measured = {one.get("changed_step"): one for one in of_kind(records, "outcome")}
    rows = [
        (
            str(one["step"]),
            text_of(one, "frozen"),
            f"{text_of(one, 'length')} x {text_of(one, 'replicas')}",
            text_of(one, "micro_batches"),
            number_of(one, "seconds"),
            number_of(one, "predicted_step_s"),
            number_of(measured.get(one["step"], {}), "measured_step_s"),
        )
        for one in of_kind(records, "transition")
    ]
    header = (
        "step", "frozen layers", "K x R", "micro-batches",
        "transition, s", "a step predicted, s", "a step measured, s",
    )  # fmt: skip
    return (header, *rows) if rows else ()


def _time(records: list[Record]) -> Section:
    title, epochs = "Where the time went", epochs_of(records)
    if not epochs:
        return Section(title, ("No epoch is over yet; its parts are recorded at its end.",))
    found = {name: None for epoch in epochs for name in epoch.get("breakdown", {})}
    # Known ones first: they lie upon each other in this order.
    names = [
        *(n for n in CATEGORY_COLORS if n in found),
        *(n for n in found if n not in CATEGORY_COLORS),
    ]
    bars = [
        bar_of(
            [epoch["epoch"] for epoch in epochs],
            [epoch.get("breakdown", {}).get(name, 0.0) for epoch in epochs],
            name.replace("_", "-"),
            CATEGORY_COLORS.get(name, CATEGORY_COLORS["other"]),
        )
        for name in names
    ]
    rate = line_of(epochs, "samples_per_s", "samples per second", x="epoch")
    figures = (
        figure_of("", *bars, x="epoch", y="seconds, mean of all processes"),
        figure_of("Throughput", rate, x="epoch", y="samples per second"),
    )
    totals = {
        name.replace("_", "-"): sum(e.get("breakdown", {}).get(name) or 0.0 for e in epochs)
        for name in names
    }
    beside = {
        "evaluation, beside training": "evaluation",
        "checkpoints, beside training": "checkpoint",
    }
    totals |= {
        name: sum(one.get("seconds") or 0.0 for one in of_kind(records, kind))
        for name, kind in beside.items()
    }
    rows = tuple((name, f"{seconds:.3f}") for name, seconds in totals.items())
    partial = "The last epoch is partial." if epochs[-1].get("partial") else ""
    return Section(title, _said(partial), figures, (("part", "seconds"), *rows))


def _cache(records: list[Record]) -> Section:
    title, steps = "Cache", of_kind(records, "step")
    counts: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for step in steps:
        hits, misses, upgrades = (
            step.get(f"cache_{name}") or 0 for name in ("hits", "misses", "upgrades")
        )
        for index, more in enumerate((hits, upgrades, misses - upgrades)):
            counts[step.get("epoch", 0) + 1][index] += more
    hits, upgrades, computed = (
        map(sum, zip(*counts.values(), strict=True)) if counts else (0, 0, 0)
    )
    if not hits + upgrades + computed:
        return Section(title, ("Nothing was looked up: no layer is frozen yet, or cache=False.",))
    names = ("read", "read, newly frozen layers run", "computed")
    colors = (CATEGORY_COLORS["data"], CATEGORY_COLORS["cache"], CATEGORY_COLORS["other"])
    bars = [
        bar_of(list(counts), [one[index] for one in counts.values()], names[index], colors[index])
        for index in range(3)
    ]
    figures = [figure_of("Samples behind frozen layers", *bars, x="epoch", y="samples")]
    sized = [one for one in epochs_of(records) if one.get("cache_bytes") is not None]
    taken = "No epoch records the bytes that the cache took."
    if sized:
        taken = f"It took at most {as_bytes(sized[-1]['cache_bytes'])} on the first node."
        line = line_of(sized, "cache_bytes", "bytes", x="epoch")
        figures.append(figure_of("The most it took", line, x="epoch", y="bytes"))
    said = (
        f"{hits:,} samples were read, {upgrades:,} read and run "
        f"through newly frozen layers, {computed:,} computed."
    )
    return Section(title, (said, taken), tuple(figures))


def _said(*sentences: str) -> tuple[str, ...]:
    return tuple(filter(None, sentences))
