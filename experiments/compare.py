"""Train one recipe elastically and as its rivals, over several seeds, and print one table.

    python -m experiments.compare --script bert --recipe sst2 --seeds 0 1 2 --folder runs/sst2 \\
        --picture runs/sst2/learning.png -- --model_name_or_path MINILM --data_dir GLUE/SST-2

Started again it goes on. All rows train on the same cores. `ours` trains first: rows that freeze
repeat its decisions step by step, and `short` gets the seconds that it took. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.finetune.baselines import FREEZING, KEEPS
from experiments.finetune.finished_run import draw_learning
from experiments.finetune.options import RunOptions
from experiments.finetune.options import parse as parse_options
from experiments.finetune.series import (
    Series,
    add_series_options,
    markdown,
    series_of,
    spread,
)
from experiments.finetune.usage import UsageError, as_usage, start
from experiments.vit import ImageOptions

DDP, OURS, TWO = "ddp", "ours", "ours, two processes"
"""Plain loops that freeze what ours froze."""
ROWS: Mapping[str, tuple[str, ...]] = {
    DDP: ("--baseline", "ddp"),
    **{name: ("--baseline", name) for name in FREEZING},
    "ours, nothing frozen": ("--freeze", "none"),
    OURS: (),
    TWO: ("--processes", "2"),
    "early-stop": ("--baseline", "early-stop"),
    "static": ("--baseline", "static"),
    "lora": ("--baseline", "lora"),
    "small": ("--baseline", "small"),
    "short": ("--baseline", "short"),
}
"""What each row adds to the recipe."""

POINTS = 0.5
"""How much below the unfrozen loop's metric a run may stay and count as having reached it."""


@dataclass(frozen=True)
class ComparedRow:
    """Hold a row's runs, one for each seed.

    Args:
        name: as in ROWS.
        metric: final ones.
        train_s: seconds of training steps and transitions.
        before_s: of measuring, before the first step.
        reached_s: of both, until the unfrozen loop's final metric less POINTS; None where a run
            did not come there.
        kept_bytes: of activations that were kept.
        frozen: layers by epoch, of the first seed.
    """

    name: str
    metric: list[float]
    train_s: list[float]
    before_s: list[float]
    reached_s: list[float | None]
    kept_bytes: list[int]
    frozen: list[int]

    @property
    def whole_s(self) -> list[float]:
        """Return the seconds of training, with those before the first step."""
        return [a + b for a, b in zip(self.train_s, self.before_s, strict=True)]


def read_rows(series: Series, names: Iterable[str], base: str = DDP) -> list[ComparedRow]:
    """Return the rows whose runs are complete for all seeds; `base` names the unfrozen one."""
    goals = [run.metric - POINTS for run in series.runs_of(base)]
    rows = []
    for name in names:
        if runs := series.runs_of(name):
            reached = [run.reached_s(goal) for run, goal in zip(runs, goals, strict=False)]
            rows.append(
                ComparedRow(
                    name,
                    [run.metric for run in runs],
                    [run.train_s for run in runs],
                    [run.before_s for run in runs],
                    reached,
                    [run.summary["details"].get("kept_bytes", 0) for run in runs],
                    [step["frozen"] for step in runs[0].by_epoch("step")],
                )
            )
    return rows


def table(rows: Sequence[ComparedRow], name: str = DDP) -> str:
    """Return a markdown table: means and standard deviations over the seeds.

    What a row takes of another one's seconds is with those before the first step.

    Args:
        rows: in order.
        name: of the unfrozen one.
    """
    base = next((statistics.mean(row.whole_s) for row in rows if row.name == name), None)
    head = ["row", "metric", "train s", "before s", f"of {name}"]
    head.append(f"s to {name}'s metric less {POINTS}")
    lines = [[*head, "frozen", "cache MB"]]
    for row in rows:
        reached = [one for one in row.reached_s if one is not None]
        when = (
            f"{statistics.mean(reached):.0f}"
            if reached and len(reached) == len(row.reached_s)
            else f"{len(reached)} of {len(row.reached_s)} seeds" * bool(base)
        )
        kept = statistics.mean(row.kept_bytes)
        share = f"{statistics.mean(row.whole_s) / base:.2f}" if base else ""
        before = f"{statistics.mean(row.before_s):.1f}"
        lines.append(
            [row.name, spread(row.metric), spread(row.train_s, 0), before, share, when]
            + [" ".join(map(str, row.frozen)), f"{kept / 1e6:.0f}" if kept else ""]
        )
    return markdown(lines)


def gains(rows: Sequence[ComparedRow]) -> list[str]:
    """Say what freezing gives a plain loop, and what we add to the best of those.

    They are ratios of seconds, seed by seed, measuring included.
    """
    found = {row.name: row.whole_s for row in rows}
    freezing = [found[name] for name in FREEZING if name in found]
    if DDP not in found or OURS not in found or not freezing:
        return []
    best = [min(seconds) for seconds in zip(*freezing, strict=True)]
    pairs = {
        "freezing, in the faster of the plain loops": (found[DDP], best),
        "ours, over that": (best, found[OURS]),
        "ours on two processes, over that": (best, found.get(TWO, [])),
    }
    return [
        f"{what}: {spread([a / b for a, b in zip(before, after, strict=True)], 2)} x"
        for what, (before, after) in pairs.items()
        if after
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="Compare a recipe with its rivals.")
    add_series_options(parser)
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--static_layers", type=int, default=2, help="that `static` never trains")
    options = parser.parse_args(arguments)
    if OURS not in options.rows and set(options.rows) & {*FREEZING, TWO, "short"}:
        parser.error(f"rows that freeze, and short, follow from the row {OURS!r}; add it")
    return options


def _changes_images(series: Series) -> bool:
    """Return whether a series' images are augmented anew in every epoch."""
    if series.script != "vit":
        return False
    given = ["--recipe", series.recipe, *series.further, "--output_dir", ""]
    images: ImageOptions = parse_options((ImageOptions, RunOptions), given)[0]
    return images.augment and not images.cache_views


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and print the table."""
    options = parse(arguments)
    with as_usage():
        series = series_of(options)
        keeps_crops = KEEPS in options.rows and _changes_images(series)
    if keeps_crops:
        raise UsageError(f"{KEEPS} would keep crops that never come again; leave it out")

    def extra(name: str, seed: int) -> list[str]:
        added = list(ROWS[name])
        if name == "short":
            added += ["--budget_s", str(series.run_of(OURS, seed).whole_s)]
        if name in (*FREEZING, TWO):
            added += ["--replay", str(series.run_of(OURS, seed).folder)]
        if name == "static":
            added += ["--static_layers", str(options.static_layers)]
        return added

    series.run_all(sorted(options.rows, key=lambda row: row != OURS), extra)
    rows = read_rows(series, options.rows)
    print(table(rows))
    print("\n".join(gains(rows)))
    end(series, rows, options.picture)


def end(series: Series, rows: Sequence[ComparedRow], picture: Path | None) -> None:
    """Draw how the rows learned, where that is asked for, and print the JSON line."""
    if picture is not None:
        runs = {row.name: series.runs_of(row.name) for row in rows}
        curves = {name: [run.learning for run in several] for name, several in runs.items()}
        draw_learning(curves, picture, label=runs[rows[0].name][0].summary["metric"])
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    start(main)
