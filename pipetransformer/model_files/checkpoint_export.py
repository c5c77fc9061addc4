"""Turn a checkpoint into a folder from which other programs load the model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from pipetransformer.checkpoint import CHECKPOINTS, Checkpoint, open_checkpoint, open_latest
from pipetransformer.durable_files import replace_file, replace_tensors
from pipetransformer.model_files.model_folder import CONFIG_FILE, WEIGHTS_FILE
from pipetransformer.transition import WEIGHTS, split_shard_name


def add_export_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, help="a checkpoint, or the folder= of a run: then its newest one"
    )
    parser.add_argument(
        "out",
        type=Path,
        help=f"gets {WEIGHTS_FILE}, and {CONFIG_FILE} for a model of transformers or timm's "
        "factory; new, or empty",
    )
    parser.add_argument(
        "--processing",
        metavar="NAME",
        help="a folder or the name of a transformers model whose tokenizer or image processor is "
        "to stand beside the weights",
    )
    parser.set_defaults(run=run_export)


def run_export(options: argparse.Namespace, show: Callable[[str], None]) -> None:
    """Carry out the command.

    Raises:
        ValueError: there is no checkpoint, OUT has content, or the processing class cannot be had.
        CorruptCheckpointError: the checkpoint is damaged.
    """
    out: Path = options.out
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is no empty folder; give a new one")
    checkpoint = find_checkpoint(options.source)
    tensors = read_weights(checkpoint)
    processing = None if options.processing is None else _processing_class(options.processing)
    replace_tensors(out / WEIGHTS_FILE, tensors)
    if config := checkpoint.scalars["parts"].get("model", {}).get("config"):
        replace_file(out / CONFIG_FILE, config.encode())
    if processing is not None:
        processing.save_pretrained(out)
    show(f"{checkpoint.folder}: {len(tensors)} tensors after step {checkpoint.step} -> {out}")


def find_checkpoint(source: Path) -> Checkpoint:
    """Open a checkpoint, or the newest usable one of a run."""
    if (source / "manifest.json").exists():
        return open_checkpoint(source)
    for directory in (source / CHECKPOINTS, source):
        if directory.is_dir() and (found := open_latest(directory, group=None)) is not None:
            return found
    raise ValueError(
        f"{source} holds no checkpoint; give the folder= of a run that saves, or one of the "
        f"step-* folders in its {CHECKPOINTS}"
    )


def read_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Read the weights by the model's own names, those that its `state_dict` has.

    Raises:
        CorruptCheckpointError: a file is not what was written.
    """
    held: dict[str, Tensor] = {}
    for shard in checkpoint.records:
        if split_shard_name(shard)[1] == WEIGHTS:
            held.update(checkpoint.read(shard))
    # The shards also hold buffers that are in no state_dict.
    return {name: held[name] for name in checkpoint.scalars["state_names"] if name in held}


def _processing_class(name: str) -> Any:
    """Load a transformers model's tokenizer, image processor or both in one."""
    try:
        # Optional, and slow to import.
        from transformers import AutoProcessor
    except ImportError as error:
        raise ValueError(
            "--processing needs transformers; install pipetransformer[text], or leave it out"
        ) from error
    try:
        return AutoProcessor.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r} has no tokenizer or image processor: {error}") from error
