"""Train the rows of an ablation, or of a sweep, by one of the fine-tuning scripts."""

from __future__ import annotations

from experiments.ablation.parts import (
    ABLATION,
    ALL,
    FREEZE_ONLY,
    NOTHING_FROZEN,
    Parts,
    PartsRow,
)
from experiments.finetune.series import Series

ALPHAS = ("1/5", "1/4", "1/3", "2/5", "1/2")
"""Those of the published sweep."""


def train_parts(series: Series, *, processes: int) -> list[PartsRow]:
    """Train without some parts, each time freezing what "freeze only" froze.

    Args:
        series: script, recipe and seeds.
        processes: of each run; a pipeline over all of them is where it starts without AutoPipe.
    """

    def extra(name: str, seed: int) -> list[str]:
        options = options_of(ABLATION[name], processes)
        if ABLATION[name].freeze and name != FREEZE_ONLY:
            repeated = series.run_of(FREEZE_ONLY, seed).folder
            options += ["--replay", str(repeated)]
        return options

    series.run_all([*ABLATION], extra)
    return [row_of(series, name) for name in ABLATION]


def sweep_alpha(series: Series, *, processes: int) -> list[PartsRow]:
    """Train with nothing frozen, and by the published rule with each alpha and all parts on."""
    fixed, whole = (options_of(ABLATION[name], processes) for name in (NOTHING_FROZEN, ALL))
    rows = {NOTHING_FROZEN: fixed}
    rows |= {f"alpha = {alpha}": [*whole, "--freeze", f"paper:{alpha}"] for alpha in ALPHAS}
    series.run_all(list(rows), lambda name, seed: rows[name])
    return [row_of(series, name) for name in rows]


def options_of(parts: Parts, processes: int) -> list[str]:
    """Return the script's options that leave the other parts out."""
    options = ["--processes", str(processes), "--cache", str(parts.auto_cache)]
    if not parts.freeze:
        options += ["--freeze", "none"]
    if not parts.auto_pipe:
        options += ["--pipeline_length", str(processes)]
    if not parts.auto_dp:
        options += ["--max_replicas", "1"]
    return options


def row_of(series: Series, name: str) -> PartsRow:
    """Read a row's runs, which are complete."""
    runs = series.runs_of(name)
    return PartsRow(
        name,
        tuple(run.train_s for run in runs),
        (),
        tuple(run.metric for run in runs),
        tuple(f"{one['length']}x{one['replicas']}" for one in runs[0].by_epoch("step")),
        tuple(one["samples_per_s"] for one in runs[0].by_epoch("epoch")),
    )
