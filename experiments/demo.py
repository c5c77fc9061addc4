"""Run the main job: fine-tune a ViT on real scans, elastically and without, and compare.

donor      12 blocks trained on the digits 0-4 (made once, kept)
elastic    fine-tuned on 0-9: freezes, repacks K = 2 -> 1, grows R = 1 -> 2, caches the prefix
baseline   the same seeds and global batches, nothing frozen, K = 2 throughout
published  with --published: as elastic, but pipelines are planned by the published rules

A slot's memory is capped, so that the whole model does not fit one. What a plain loop without the
cap takes on all cores (on one GPU where the slots are GPUs), with the same freezing, is measured
over some steps at each depth.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from autopipe.profile import Profile
from autopipe.trace import text_table
from experiments.benchmarks.measuring.timed_loop import BATCH_SIZE, plain_seconds
from experiments.digits import build_model, load_digits_split
from experiments.ideal import ideal_seconds
from freeze import FreezeSchedule
from pipetransformer.checkpoint import LOCK_FILE, lock_folder
from pipetransformer.checks import check_world
from pipetransformer.config import cosine_with_warmup, make_config, polynomial_with_warmup
from pipetransformer.model import adamw
from pipetransformer.processes import launch
from pipetransformer.report import RECORDS_FILE, Record, breakdown_table, draw_report, read_records
from pipetransformer.trainer import Trainer

NUM_SLOTS = 2
MAX_GRAD_NORM = 1.0
LEARNING_RATE = 4e-4
DONOR_LEARNING_RATE = 6e-4
DONOR_EPOCHS = 16
DONOR_FILE = "demo-donor.safetensors"
FROZEN_BY_EPOCH = (0, 0, 0, 0, 0, 4, 8)
"""Frozen layers by epoch; the last entry holds on, with a third of the blocks active."""
LABELS = {"baseline": "without freezing", "published": "published rules", "elastic": "elastic"}
"""What the report calls the runs, in its order."""
MEMORY_LIMIT_BYTES = 106_000_000
"""Modelled bytes a slot may use: the whole model with AdamW does not fit, half of it does."""


@dataclass(frozen=True)
class DemoSettings:
    """Hold what the command line sets.

    Args:
        folder: where results go; an earlier demo's are replaced.
        epochs: of fine-tuning.
        seed: of weights, order and dropout.
        published: whether to run the published rules, too.
    """

    folder: str = "runs/demo"
    epochs: int = 18
    seed: int = 0
    published: bool = False

    @property
    def runs(self) -> tuple[str, ...]:
        """Name the runs, in their order."""
        return ("elastic", *(("published",) if self.published else ()), "baseline")


def run_demo(settings: DemoSettings, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the donor and the runs, write the report, and return the summary.

    Args:
        settings: from the command line.
        say: shows a line to the person watching.
    """
    for run in settings.runs:
        check_world(make_config(run_settings(settings, run)), NUM_SLOTS, NUM_SLOTS)
    folder = Path(settings.folder)
    donor = folder.parent / DONOR_FILE
    if not donor.exists():
        say(f"donor: training 12 blocks on the digits 0-4, kept in {donor}")
        make_donor(donor)
    clear_folder(folder)
    for run in settings.runs:
        say(
            f"\n{run}: fine-tuning on the digits 0-9, {settings.epochs} epochs, "
            f"{NUM_SLOTS} device slots"
        )
        launch(fine_tune, (settings, str(donor), run), num_slots=NUM_SLOTS)
    return write_report(settings, say)


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


def write_report(settings: DemoSettings, say: Callable[[str], None]) -> dict[str, Any]:
    """Compare the finished runs: write and draw it into the folder, say it, and return it."""
    folder, summary = Path(settings.folder), summarize(settings)
    records = {LABELS[run]: _records(settings, run) for run in reversed(settings.runs)}
    draw_report(records, folder / "report.png")
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    say(
        f"\n{breakdown_table(records)}\n\n{summary_table(summary['runs'])}\n"
        "a plain loop with the same freezing, on all cores without the memory's cap, extrapolated "
        f"from 20 steps at each depth: {summary['plain_loop_seconds']:.1f} s\n\n"
        f"{folder}: summary.json, records.jsonl, report.png, model.safetensors, tensorboard/"
    )
    return summary


def make_donor(path: Path) -> None:
    """Train the donor on all slots and keep its weights at a path."""
    launch(train_donor, (str(path),), num_slots=NUM_SLOTS)


def train_donor(path: str) -> None:
    """Train the donor on the digits 0-4 and write its weights, without the head."""
    train, test = load_digits_split(range(5))
    with Trainer(
        build_model(5, seed=0),
        train,
        eval_dataset=test,
        optimizer=adamw(DONOR_LEARNING_RATE),
        epochs=DONOR_EPOCHS,
        global_batch_size=BATCH_SIZE,
        evaluate_every_epochs=DONOR_EPOCHS,
        learning_rate_schedule=cosine_with_warmup(),
        max_grad_norm=MAX_GRAD_NORM,
        label="donor",
    ) as trainer:
        trainer.fit()
        state = {
            name: t.clone()
            for name, t in trainer.state_dict().items()
            if not name.startswith("head.")
        }
        if trainer.world.is_main:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            safetensors.torch.save_file(state, path)


def run_folder(settings: DemoSettings, run: str) -> Path:
    """Return where a run's results go."""
    return Path(settings.folder) / ("" if run == "elastic" else run)


def run_settings(settings: DemoSettings, run: str) -> dict[str, Any]:
    """Return the Trainer's settings: the same for all runs, but for how pipelines are planned."""
    return {
        "epochs": settings.epochs,
        "global_batch_size": BATCH_SIZE,
        "seed": settings.seed,
        "pipeline_length": NUM_SLOTS if run == "baseline" else None,
        "plan": "published" if run == "published" else "fastest",
        "memory_limit_bytes": MEMORY_LIMIT_BYTES,
        "learning_rate_schedule": polynomial_with_warmup(),
        "max_grad_norm": MAX_GRAD_NORM,
        "evaluate_every_epochs": 2,
        "folder": run_folder(settings, run),
        "checkpoint_every_epochs": settings.epochs,
        "keep_checkpoints": 1,
        "label": run,
    }


def fine_tune(settings: DemoSettings, donor: str, run: str) -> None:
    """Fine-tune the donor on all ten digits, and write what it took."""
    folder = run_folder(settings, run)
    train, test = load_digits_split()
    model = build_model(10, settings.seed)
    model.load_state_dict(safetensors.torch.load_file(donor), strict=False)
    with Trainer(
        model,
        train,
        eval_dataset=test,
        optimizer=adamw(LEARNING_RATE),
        freeze=None if run == "baseline" else FreezeSchedule(FROZEN_BY_EPOCH),
        **run_settings(settings, run),
    ) as trainer:
        report = trainer.fit()
        trainer.save_model(folder / "model.safetensors")
        assert trainer.measurements is not None
        if trainer.world.is_main:
            result = {
                **dataclasses.asdict(report),
                "profile": trainer.measurements.profile.to_json(),
                "cache_bytes_per_s": trainer.measurements.cache_bytes_per_s,
                "num_samples": len(train),
                "device": str(trainer.world.device),
            }
            (folder / "result.json").write_text(json.dumps(result) + "\n")


def summarize(settings: DemoSettings) -> dict[str, Any]:
    """Compare the runs; the ideals are modelled from one profile for all."""
    results = {
        run: json.loads((run_folder(settings, run) / "result.json").read_text())
        for run in reversed(settings.runs)
    }
    measured = results["elastic"]
    profile = Profile.from_json(measured["profile"])
    read_s = profile.sublayers[-2].output_bytes / measured["cache_bytes_per_s"]
    runs: dict[str, dict[str, Any]] = {}
    for run, result in results.items():
        runs[run] = {
            "seconds": result["seconds"],
            "samples_per_s": result["samples"] / result["seconds"],
            "accuracy": result["metrics"]["accuracy"],
            "ideal_seconds": ideal_seconds(
                profile,
                [r for r in _records(settings, run) if r["kind"] == "step"],
                num_samples=measured["num_samples"],
                read_s=read_s,
            ),
        }
        if run != "baseline":
            served = result["cache_hits"] + result["cache_misses"]
            runs[run] |= {
                "speedup": runs["baseline"]["seconds"] / result["seconds"],
                "ideal_speedup": runs["baseline"]["ideal_seconds"] / runs[run]["ideal_seconds"],
                "cache_hit_rate": result["cache_hits"] / max(served, 1),
                "transitions": result["transitions"],
            }
    steps = [r for r in _records(settings, "elastic") if r["kind"] == "step"]
    return {
        "runs": runs,
        "plain_loop_seconds": plain_seconds(
            [record["frozen"] for record in steps],
            device=measured["device"],
            max_grad_norm=MAX_GRAD_NORM,
        ),
        "seed": settings.seed,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": f"{NUM_SLOTS} x {measured['device']} ({platform.machine()})",
    }


def summary_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the runs' figures of `summarize` beside each other as text."""

    def row(title: str, key: str, style: str, unit: str = "") -> list[str]:
        cells = [format(run[key], style) + unit if key in run else "" for run in figures.values()]
        return [title, *cells]

    shares = [
        f"{run['speedup'] / run['ideal_speedup']:.0%}" if "speedup" in run else ""
        for run in figures.values()
    ]
    return text_table(
        [
            ["", *(LABELS[name] for name in figures)],
            row("time (s)", "seconds", ".1f"),
            row("samples/s", "samples_per_s", ".1f"),
            row("test accuracy", "accuracy", ".2%"),
            row("cache hits", "cache_hit_rate", ".1%"),
            row("speed-up", "speedup", ".2f", " x"),
            row("ideal speed-up", "ideal_speedup", ".2f", " x"),
            ["share of the ideal", *shares],
        ]
    )


def _records(settings: DemoSettings, run: str) -> list[Record]:
    return read_records(run_folder(settings, run) / RECORDS_FILE)


def main() -> int:
    """Run the demo with what the command line asks for."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="python -m experiments.demo", description=__doc__)
    parser.add_argument("--folder", default=DemoSettings.folder, help="where results go")
    parser.add_argument("--epochs", type=int, default=DemoSettings.epochs)
    parser.add_argument("--seed", type=int, default=DemoSettings.seed)
    parser.add_argument("--published", action="store_true", help="run the published rules, too")
    run_demo(DemoSettings(**vars(parser.parse_args())), print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
