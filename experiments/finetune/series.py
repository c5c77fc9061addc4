"""Run a script's recipe in several variants over several seeds, each in a process of its own.

Runs that are complete are not repeated: started again, a series goes on, and refuses runs that
were made with other options. A run that was killed starts anew, or from its checkpoint if it saves
any. Seeds are the outer loop, so that variants which are compared ran close to each other in time.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.finetune.baselines import split_taken, without_freeze
from experiments.finetune.finished_run import FinishedRun
from experiments.finetune.killed_run import has_saved
from experiments.finetune.options import read_recipe, recipe_arguments
from experiments.finetune.usage import RunFailedError, UsageError

Extra = Callable[[str, int], Sequence[str]]
"""(variant, seed) -> what it adds to the recipe's command."""


@dataclass(frozen=True)
class Series:
    """Hold which script runs on what, and where the runs' folders are.

    Args:
        script: of `experiments`: bert or vit.
        recipe: as the script takes it.
        seeds: of the runs.
        further: options for all of them that take them.
    """

    script: str
    recipe: str
    folder: Path
    seeds: tuple[int, ...]
    further: tuple[str, ...]

    def run_all(self, variants: Sequence[str], extra: Extra) -> None:
        """Run what is not yet complete; then say which of the options some do without.

        Raises:
            RunFailedError: a run failed; the message names its log.
            UsageError: a complete run had other options, or another recipe.
        """
        without: dict[tuple[str, ...], dict[str, None]] = {}
        for seed in self.seeds:
            for name in variants:
                arguments, left = self._arguments(seed, extra(name, seed))
                if left:
                    without.setdefault(left, {})[name] = None
                if self._is_complete(name, seed):
                    self._refuse_other(self.run_of(name, seed), arguments)
                else:
                    self._run(name, seed, arguments)
        for left, names in without.items():
            print(f"{', '.join(names)}: without {' '.join(left)}")

    def runs_of(self, variant: str) -> list[FinishedRun]:
        """Return a variant's runs, one for each seed; none where some are not complete."""
        if not all(self._is_complete(variant, seed) for seed in self.seeds):
            return []
        return [self.run_of(variant, seed) for seed in self.seeds]

    def run_of(self, variant: str, seed: int) -> FinishedRun:
        """Return one run, which is complete."""
        return FinishedRun(self._folder_of(variant, seed))

    def _is_complete(self, variant: str, seed: int) -> bool:
        return (self._folder_of(variant, seed) / "summary.json").exists()

    def _folder_of(self, variant: str, seed: int) -> Path:
        return self.folder / f"{re.sub('[^A-Za-z0-9.+_]+', '-', variant)}-seed{seed}"

    def _arguments(self, seed: int, extra: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
        """Return a run's command line, and what of the options for all it does not take."""
        baseline = extra[extra.index("--baseline") + 1] if "--baseline" in extra else None
        of_recipe = split_taken(recipe_arguments(self.recipe), baseline)[1]
        further = without_freeze(self.further) if "--replay" in extra else self.further
        taken, left = split_taken(further, baseline)
        arguments = ["--recipe", self.recipe, "--seed", str(seed), *taken, *extra]
        return arguments, (*of_recipe, *left)

    def _refuse_other(self, run: FinishedRun, arguments: Sequence[str]) -> None:
        command = run.summary["command"]
        made = command[command.index("--recipe") : -2]  # From the first to --output_dir.
        if made != list(arguments) or run.summary["recipe"] != read_recipe(self.recipe):
            raise UsageError(
                f"{run.folder} holds a run of other options or another recipe; remove it, or give "
                "another --folder"
            )

    def _run(self, variant: str, seed: int, arguments: Sequence[str]) -> None:
        folder = self._folder_of(variant, seed)
        if folder.exists() and not has_saved(folder):
            shutil.rmtree(folder)
        command = [sys.executable, "-m", f"experiments.{self.script}", *arguments]
        command += ["--output_dir", str(folder)]
        print(f"seed {seed}, {variant}", flush=True)
        log = folder.parent / f"{folder.name}.log"  # A name may hold a point.
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
        if done.returncode:
            raise RunFailedError(
                f"{variant} with seed {seed} ended with status {done.returncode}; see {log}"
            )


def add_series_options(parser: argparse.ArgumentParser) -> None:
    """Add what names a series; options behind -- go to the script."""
    parser.add_argument("--script", choices=("bert", "vit"), required=True)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the runs' folders are")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--picture", type=Path, help="draw into this file")
    parser.add_argument("further", nargs="*", help="options of the script, behind --")


_OWN = ("recipe", "seed", "output_dir", "baseline", "replay", "static_layers")


def series_of(options: argparse.Namespace) -> Series:
    """Return what options name.

    Raises:
        ValueError: options for all runs say what differs between them, or seeds repeat.
    """
    if len(set(options.seeds)) < len(options.seeds):
        raise ValueError(f"--seeds {options.seeds} names one twice; a run counts once")
    names = {one: one.split("=")[0].replace("-", "_").strip("_") for one in options.further}
    if given := [one for one, name in names.items() if one.startswith("--") and name in _OWN]:
        raise ValueError(f"{given} behind -- would be those of all runs alike; leave them out")
    return Series(
        options.script,
        options.recipe,
        options.folder,
        tuple(options.seeds),
        tuple(options.further),
    )


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return a mean, and where there are several values their standard deviation."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table, its first row as head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])
