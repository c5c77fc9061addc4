"""Train one recipe elastically, by freeze policies and as rivals; print tables over several seeds.

    python -m experiments.compare --script bert --recipe sst2 --seeds 0 1 2 --folder runs/sst2 \\
        --picture runs/sst2/learning.png -- --model_name_or_path MINILM --data_dir GLUE/SST-2
    python -m experiments.compare --script vit --recipe cifar10 --folder runs/policies \\
        --rows none auto quiet static "short as auto" -- --data CIFAR10.npz --weights VIT

Started again it goes on. All rows train on the same cores. `ours` trains first: rows that freeze
repeat its decisions step by step, and `short` gets the seconds that it took. A row may also be a
freeze policy, as --freeze has it, and "short as POLICY" gets that one's seconds; all policies
decide at the same steps. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from experiments.finetune.baselines import FREEZING, KEEPS
from experiments.finetune.finished_run import FinishedRun, draw_learning
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
from freeze import POLICY_HELP, named_policy

DDP, OURS, TWO, NONE = "ddp", "ours", "ours, two processes", "none"
_SHORT_AS = "short as "
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
"""What each row adds to the recipe; others are freeze policies."""

POINTS = 0.5
"""How much below the unfrozen loop's metric a run may stay and count as having reached it."""


@dataclass(frozen=True)
class ComparedRow:
    """Hold a row's runs, one for each seed.

    Args:
        name: as in ROWS, or a policy's.
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


def base_of(names: Collection[str]) -> str:
    """Name the unfrozen row that others are held against."""
    return DDP if DDP in names else NONE


def read_rows(series: Series, names: Collection[str]) -> list[ComparedRow]:
    """Return the rows whose runs are complete for all seeds."""
    base = base_of(names)
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


def table(rows: Sequence[ComparedRow]) -> str:
    """Return a markdown table: means and standard deviations over the seeds.

    What a row takes of another one's seconds is with those before the first step.
    """
    name = base_of([row.name for row in rows])
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


def depths_table(runs: Mapping[str, Sequence[FinishedRun]]) -> str:
    """Return the mean frozen layers at every tenth of the run, and further evaluation sets."""
    lines = [["row", *(f"{10 * (1 + part)} %" for part in range(10)), "further sets"]]
    for name, several in runs.items():
        depths = []
        for part in range(10):
            at = [_frozen_at(run, (part + 1) / 10) for run in several]
            depths.append(f"{sum(at) / len(at):.1f}".removesuffix(".0"))
        own = several[0].summary["metric"]
        sets = [key for key in several[0].summary["metrics"] if key.endswith(f"_{own}")]
        values = ([run.summary["metrics"][key] for run in several] for key in sets)
        further = (f"{key} {spread(one)}" for key, one in zip(sets, values, strict=True))
        lines.append([name, *depths, ", ".join(further)])
    return markdown(lines)


def _frozen_at(run: FinishedRun, share: float) -> int:
    steps = [record for record in run.records if record["kind"] == "step"]
    return int(steps[max(0, int(share * len(steps)) - 1)]["frozen"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="Compare a recipe with its rivals.")
    add_series_options(parser)
    known = ", ".join(map(repr, ROWS))
    parser.add_argument(
        "--rows",
        nargs="+",
        default=list(ROWS),
        help=f"{known}, {_SHORT_AS!r}..., or {POLICY_HELP}",
    )
    parser.add_argument("--static_layers", type=int, default=2, help="that `static` never trains")
    parser.add_argument(
        "--interval", type=float, default=0.05, help="share of the run, for policies to decide"
    )
    options = parser.parse_args(arguments)
    for row in {*options.rows} - {*ROWS}:
        policy = row.removeprefix(_SHORT_AS)
        try:
            named_policy(policy)
        except ValueError as error:  # Else it would be found where its turn comes, after hours.
            parser.error(f"--rows: {error}")
        if policy not in options.rows:
            parser.error(f"{row!r} follows from the row {policy!r}; add it")
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
        if name not in ROWS and not name.startswith(_SHORT_AS):
            return ["--freeze", name, "--freeze_interval_share", str(options.interval)]
        added = list(ROWS[name.partition(" as ")[0]])
        if name.startswith("short"):
            like = name.removeprefix(_SHORT_AS) if name != "short" else OURS
            added += ["--budget_s", str(series.run_of(like, seed).whole_s)]
        if name in (*FREEZING, TWO):
            added += ["--replay", str(series.run_of(OURS, seed).folder)]
        if name == "static":
            added += ["--static_layers", str(options.static_layers)]
        return added

    # Each row behind those that it follows from.
    in_turn = sorted(options.rows, key=lambda row: (row != OURS, row.startswith(_SHORT_AS)))
    series.run_all(in_turn, extra)
    rows = read_rows(series, options.rows)
    runs = {row.name: series.runs_of(row.name) for row in rows}
    print(f"{table(rows)}\n\n{depths_table(runs)}")
    print("\n".join(gains(rows)))
    if options.picture is not None:
        curves = {name: [run.learning for run in several] for name, several in runs.items()}
        label = runs[rows[0].name][0].summary["metric"]
        draw_learning(curves, options.picture, label=label)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    start(main)
