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
_GROWN = ", growing batch"


def train_parts(series: Series, *, processes: int, scale_batch: bool) -> list[PartsRow]:
    """Train without some parts, each time freezing what "freeze only" froze.

    Args:
        series: script, recipe and seeds.
        processes: of each run; a pipeline over all of them is where it starts without AutoPipe.
        scale_batch: train the rows with AutoDP also with a batch that grows.
    """
    grown = [name + _GROWN for name, parts in ABLATION.items() if parts.auto_dp and scale_batch]

    def extra(name: str, seed: int) -> list[str]:
        plain = name.removesuffix(_GROWN)
        options = options_of(ABLATION[plain], processes)
        if name != plain:
            # Steps are others, so what froze cannot be repeated step by step.
            return [*options, "--scale_batch"]
        if ABLATION[plain].freeze and plain != FREEZE_ONLY:
            repeated = series.run_of(FREEZE_ONLY, seed).folder
            options += ["--replay", str(repeated)]
        return options

    series.run_all([*ABLATION, *grown], extra)
    return [row_of(series, name, name + _GROWN if scale_batch else None) for name in ABLATION]


def sweep(series: Series, what: str, *, processes: int) -> list[PartsRow]:
    """Train a first row, and others with one thing varied.

    Args:
        series: script, recipe and seeds.
        what: "alpha", of the published rule with all parts on, beside nothing frozen; or
            "micro_batches", M from K to 6 K without freezing in a pipeline over all processes.
        processes: of each run.
    """
    fixed, whole = (options_of(ABLATION[name], processes) for name in (NOTHING_FROZEN, ALL))
    if what == "alpha":
        rows = {NOTHING_FROZEN: fixed}
        rows |= {f"alpha = {alpha}": [*whole, "--freeze", f"paper:{alpha}"] for alpha in ALPHAS}
    else:
        rows = {
            f"M = {count}": [*fixed, "--micro_batches", str(count)]
            for count in range(processes, 6 * processes + 1, processes)
        }
    series.run_all(list(rows), lambda name, seed: rows[name])
    return [row_of(series, name, None) for name in rows]


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


def row_of(series: Series, name: str, grown: str | None) -> PartsRow:
    """Read a row's runs, which are complete."""
    runs = series.runs_of(name)
    return PartsRow(
        name,
        tuple(run.train_s for run in runs),
        tuple(run.train_s for run in series.runs_of(grown)) if grown else (),
        tuple(run.metric for run in runs),
        tuple(f"{one['length']}x{one['replicas']}" for one in runs[0].by_epoch("step")),
        tuple(one["samples_per_s"] for one in runs[0].by_epoch("epoch")),
    )
