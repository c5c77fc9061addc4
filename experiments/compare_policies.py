"""Train one recipe under every freeze policy, over several seeds, and print one table.

    python -m experiments.compare_policies --script vit --recipe cifar10 --seeds 0 1 2 \\
        --folder runs/policies --picture runs/policies.png -- --data CIFAR10.npz --weights VIT

Started again it goes on. All policies train elastically on the same cores, and decide at the same
steps; beside them stand the recipe unfrozen, static freezing, LoRA, and for each policy of
`--short` the unfrozen plain loop with its schedule shortened to that policy's time. The last line
is JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from experiments.compare import ROWS, end, read_rows, table
from experiments.finetune.finished_run import FinishedRun
from experiments.finetune.series import Series, add_series_options, markdown, series_of, spread
from experiments.finetune.usage import as_usage, start
from freeze import POLICY_HELP, named_policy

NONE = "none"
POLICIES = ("paper:1/3", "alpha:1/3", "linear", "auto", "plasticity", "cka", "quiet")

OTHERS = ("static", "lora")
"""Plain loops beside the policies."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="Compare freeze policies on a recipe.")
    add_series_options(parser)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help=POLICY_HELP)
    parser.add_argument("--interval", type=float, default=0.05, help="share of the run, to decide")
    parser.add_argument("--others", nargs="*", choices=OTHERS, default=list(OTHERS))
    parser.add_argument("--static_layers", type=int, default=2, help="that `static` never trains")
    parser.add_argument(
        "--short",
        nargs="*",
        metavar="POLICY",
        help="those given a shortened rival; else those that look at signals",
    )
    options = parser.parse_args(arguments)
    try:
        policies = {name: named_policy(name) for name in options.policies}
    except ValueError as error:  # Else it would be found where its turn comes, after hours.
        parser.error(f"--policies: {error}")
    if options.short is None:
        options.short = [name for name, policy in policies.items() if policy.signals]
    if unknown := sorted(set(options.short) - set(options.policies)):
        parser.error(f"--short names {unknown}, which are not among --policies")
    return options


def rows_of(options: argparse.Namespace) -> list[str]:
    """Name the rows, each behind those that it follows from."""
    shortened = [f"short as {name}" for name in options.short]
    return [NONE, *options.policies, *options.others, *shortened]


def run_rows(options: argparse.Namespace, series: Series) -> None:
    """Run what is not complete."""
    deciding = ("--freeze_interval_share", str(options.interval))

    def extra(name: str, seed: int) -> list[str]:
        if name in OTHERS:
            layers = ("--static_layers", str(options.static_layers))
            return [*ROWS[name], *(layers if name == "static" else ())]
        policy = name.removeprefix("short as ")
        if policy == name:
            return ["--freeze", name, *deciding]
        return [*ROWS["short"], "--budget_s", str(series.run_of(policy, seed).whole_s)]

    series.run_all(rows_of(options), extra)


def depths_table(runs: dict[str, list[FinishedRun]]) -> str:
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and print the tables."""
    options = parse(arguments)
    with as_usage():
        series = series_of(options)
    run_rows(options, series)
    names = rows_of(options)
    rows = read_rows(series, names, base=NONE)
    runs = {name: series.runs_of(name) for name in names}
    print(table(rows, NONE))
    print(depths_table(runs))
    end(series, rows, options.picture)


if __name__ == "__main__":
    start(main)
