"""Let a killed run go on only as it was asked for, and nothing else into its folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.finetune.options import RunOptions
from experiments.tasks.workload import Workload
from freeze import JOURNAL_FILE
from pipetransformer import CorruptCheckpointError
from pipetransformer.checkpoint import CHECKPOINTS, published
from pipetransformer.durable_files import hash_json

_OPTIONS_FILE = "options.json"
"""What a run of ours was asked for, in its folder from the start on."""
_NUM_SAMPLES = 64
_MAY_CHANGE = {
    "output_dir", "recipe", "processes", "pipeline_length", "max_replicas", "micro_batches",
    "memory_limit_bytes", "dataloader_num_workers", "checkpoint_every_epochs", "plan", "schedule",
    "stage_workers", "activation_checkpointing", "cache_keep", "cache_folder",
}  # fmt: skip
"""Options with which a killed run may go on: where it trains, and how often it saves."""


def has_saved(folder: Path) -> bool:
    """Return whether a killed run has saved what it can go on from."""
    try:
        return (folder / CHECKPOINTS).exists() and bool(published(folder / CHECKPOINTS))
    except CorruptCheckpointError:
        return True  # Something was, and is not to be thrown away.


def refuse_ours(folder: Path) -> None:
    """Raise a ValueError where a folder in which a rival is to train holds a run of ours."""
    if (folder / _OPTIONS_FILE).exists():
        raise ValueError(f"{folder} holds records of ours; give a new --output_dir")


def asked_for(options: RunOptions, workload: Workload) -> dict[str, Any]:
    """Return what decides what a run learns, as JSON gives it back."""
    given = {**asdict(options), **workload.options}
    asked = {name: value for name, value in given.items() if name not in _MAY_CHANGE}
    num = asked["number of training samples"] = len(workload.train_dataset)
    if not workload.num_views:  # Else an image is another in each view.
        chosen = sorted({n * (num - 1) // (_NUM_SAMPLES - 1) for n in range(_NUM_SAMPLES)})
        asked["training samples"] = hash_json([repr(workload.train_dataset[i]) for i in chosen])
    plain: dict[str, Any] = json.loads(json.dumps(asked))
    return plain


def note_or_refuse(options: RunOptions, workload: Workload) -> None:
    """Refuse to go on with a killed run of ours that was asked for otherwise; else note what this
    one is asked for.

    Raises:
        ValueError: options, or some of the training samples, are others.
    """
    folder, asked = Path(options.output_dir), asked_for(options, workload)
    path, is_first = folder / _OPTIONS_FILE, os.environ.get("RANK", "0") == "0"
    # What was decided is repeated even where nothing was saved.
    if path.exists() and (has_saved(folder) or (folder / JOURNAL_FILE).exists()):
        had = json.loads(path.read_text())
        if other := sorted(name for name in {**had, **asked} if had.get(name) != asked.get(name)):
            raise ValueError(
                f"{folder} holds a killed run with another {', '.join(other)}; give the same, or "
                "a new --output_dir"
            )
        if is_first:
            print(f"{folder}: goes on with the run that was killed")
    elif is_first:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asked, indent=2) + "\n")
