"""Offer `pipetransformer demo`: fine-tune a ViT on real scans, in loops and elastically."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing import forkserver
from pathlib import Path

from pipetransformer.checkpoint import LOCK_FILE, lock_folder
from pipetransformer.demo.loops import train_in_loops
from pipetransformer.demo.results import LOOPS, TITLES, Result, table
from pipetransformer.demo.runs import (
    NUM_SLOTS,
    DemoSettings,
    train_by_hand,
    train_donor,
    train_here,
)
from pipetransformer.extras import require
from pipetransformer.processes import launch
from pipetransformer.report import PAGE_FILE, write_page

_SPINS = "3000"
"""How often a thread of OpenMP looks for work before it sleeps.

Where another program has a core, the loop's two threads share the other one. With torch's default
they spin there, and take fifty times as long. On idle cores this costs the loop 2 %.
"""
_IMPORTED = (
    "pipetransformer", "torch._dynamo", "sklearn.datasets", "sklearn.model_selection",
    "timm.models.vision_transformer",
)  # fmt: skip
_PACKAGES = {"timm": "its model", "sklearn": "its scans", "plotly": "its page"}


def add_demo_parser(parser: argparse.ArgumentParser) -> None:
    default = DemoSettings()
    parser.add_argument(
        "--folder", default=default.folder, help="where results go; an earlier demo's are replaced"
    )
    parser.add_argument("--epochs", type=int, default=default.epochs, help="of fine-tuning")
    parser.add_argument("--seed", type=int, default=default.seed, help="of weights and order")
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace, say: Callable[[str], object]) -> None:
    run_demo(DemoSettings(options.folder, options.epochs, options.seed), say)


def run_demo(settings: DemoSettings, say: Callable[[str], object]) -> None:
    """Train the donor if it is not there, then all runs; show and keep what they came to.

    Args:
        settings: from the command line.
        say: shows a line to the person watching.
    Raises:
        ImportError: a package of the extra `demo` is missing.
        ValueError: a run trains in the folder.
        WorkerFailedError: a run failed.
    """
    for package, purpose in _PACKAGES.items():
        require(package, purpose=f"the demo, for {purpose},", extra="demo")
    clear_folder(Path(settings.folder))
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # Read once, when a process loads OpenMP.
    # Every process is forked from this server, which has imported what all of them need.
    forkserver.set_forkserver_preload([*_IMPORTED])
    forkserver.ensure_running()
    if not settings.donor.exists():
        say(f"donor: a ViT learns the digits 0-4, kept in {settings.donor}")
        launch(train_donor, (settings,), num_slots=NUM_SLOTS, start_method="forkserver")
    say("\nloops: 6 of 8 blocks frozen, without rows, with two lines more, and from kept rows")
    _launch_alone(train_in_loops, (settings,))
    for name, (title, _) in TITLES.items():
        say(f"\n{name}: {title}, digits 0-9, {settings.epochs} epochs")
        if name == "plain":
            _launch_alone(train_by_hand, (settings, name))
        else:
            launch(train_here, (settings, name), num_slots=NUM_SLOTS, start_method="forkserver")
    say(f"\n{write_results(settings)}")


def _launch_alone(train: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """Run in one process, which takes all cores."""
    cores = len(os.sched_getaffinity(0))
    launch(train, arguments, num_slots=1, cores_per_slot=cores, start_method="forkserver")


def write_results(settings: DemoSettings) -> str:
    """Write summary.json and two runs' pages into the folder; return what they say."""
    folder = Path(settings.folder)
    results = {name: Result.read(settings.folder_of(name)) for name in (*LOOPS, *TITLES)}
    summary = {name: asdict(result) for name, result in results.items()}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    pages = [settings.folder_of(name) for name in ("elastic", "unfrozen")]
    for run in pages:
        write_page(run)
    written = [str((run / PAGE_FILE).relative_to(folder)) for run in pages]
    files = ", ".join([*written, "summary.json", "model.safetensors"])
    return f"{table(results)}\n\n{folder}: {files}"


def clear_folder(folder: Path) -> None:
    """Delete what a folder holds; a ValueError if a run trains in it or in one just below."""
    with ExitStack() as locks:
        for locked in (folder, *(path.parent for path in folder.glob(f"*/{LOCK_FILE}"))):
            locks.enter_context(lock_folder(locked))
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK_FILE:
                path.unlink()
