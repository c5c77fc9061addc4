"""Write what a run came to: summary.json, predictions, and the page of a run of ours."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import pipetransformer
from experiments.benchmarks.measuring.rounds import num_cores
from experiments.finetune.baselines import PLAIN
from experiments.finetune.options import RunOptions, read_recipe
from experiments.tasks.workload import Workload
from pipetransformer.processes import cpu_name
from pipetransformer.report import finite, write_page


@dataclass(frozen=True)
class Outcome:
    """Hold what a run came to.

    Args:
        metrics: of the final weights on the whole evaluation sets.
        train_s: seconds of training steps and transitions.
        total_s: with evaluations, of the whole `fit`.
        steps: taken.
        details: further plain values, among them `held_up`, see RunQueueWait.
    """

    metrics: dict[str, float]
    train_s: float
    total_s: float
    steps: int
    details: dict[str, Any]


def write_outcome(
    options: RunOptions, workload: Workload, outcome: Outcome, predictions: Mapping[str, Any]
) -> None:
    """Write the files; `summary.json` last, as it says that the run is complete.

    Args:
        options, workload: what was trained how.
        outcome: what it came to.
        predictions: for the evaluation set, by the name "", and for the further ones by theirs.
    """
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in predictions.items():
        path = folder / ("predictions" + f"_{name}" * bool(name))
        workload.write_predictions(name, found, path)
    if options.baseline not in PLAIN:
        write_page(folder)
    summary = {
        "task": workload.name,
        "metric": workload.metric,
        **asdict(outcome),
        "options": {**asdict(options), **workload.options},
        "recipe": None if options.recipe is None else read_recipe(options.recipe),
        "command": _command(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "hardware": {"machine": platform.machine(), "cpu": cpu_name(), "cores": num_cores()},
    }
    (folder / "summary.json").write_text(json.dumps(finite(summary), indent=2) + "\n")
    main = outcome.metrics.get(workload.metric)
    print(f"{workload.name}: {workload.metric} {main:.2f}, {outcome.train_s:.0f} s of training")


def versions() -> dict[str, str]:
    """Return those of what may have made a difference, as far as it is installed."""
    found = {"torch": torch.__version__, "pipetransformer": pipetransformer.__version__}
    for name in ("transformers", "timm", "datasets", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _command() -> list[str]:
    """Return what was started, as it is to be started again in the root of this tree."""
    script, arguments = Path(sys.argv[0]), sys.argv[1:]
    start = [Path(sys.executable).name]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        start = ["torchrun", f"--nproc-per-node={os.environ['LOCAL_WORLD_SIZE']}"]
    if script.parent.name != "experiments":
        return [*start, *sys.argv]
    return [*start, "-m", f"experiments.{script.stem}", *arguments]


def commit() -> str | None:
    """Return the commit of this tree, with a + where files differ from it; None without git."""
    try:
        root = Path(__file__).parents[2]
        run = ["git", "-C", str(root)]
        found = subprocess.run(
            [*run, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        state = subprocess.run([*run, "status", "--porcelain"], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() + ("+" if state.stdout.strip() else "")
