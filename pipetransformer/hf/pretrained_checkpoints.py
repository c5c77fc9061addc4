"""Write checkpoints as folders that `from_pretrained` reads, named as transformers names them.

output_dir/
  checkpoints/step-00000012    a run goes on from it
  checkpoint-12                weights, configuration and tokenizer of the same step
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

from pipetransformer.checkpoint import open_checkpoint, read_weights, write_model_folder
from pipetransformer.errors import CorruptCheckpointError

_FOLDER = re.compile(r"checkpoint-(\d+)")
_MARK = "pipetransformer_checkpoint"
"""A file that marks our folders; others are never removed."""
_LOGGER = logging.getLogger(__name__)


def step_of(folder: Path) -> int | None:
    """Return the step in a folder's name, or None for another name."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def write_pretrained(
    checkpoint: Path, output_dir: Path, model: Any, processing_class: Any, *, keep: int
) -> None:
    """Write the weights of a checkpoint; if that fails, warn and let training go on.

    Args:
        output_dir: gets the folder.
        model: has the configuration.
        processing_class: a tokenizer or a processor to be saved beside it, or None.
        keep: how many of these folders stay.
    """
    made = output_dir / f"tmp-{checkpoint.name}"
    try:
        saved = open_checkpoint(checkpoint)
        shutil.rmtree(made, ignore_errors=True)
        write_model_folder(model, read_weights(saved), made, processing_class)
        (made / _MARK).write_text(f"{checkpoint.name}\n")
        folder = output_dir / f"checkpoint-{saved.step}"
        if _is_own(folder):
            shutil.rmtree(folder)
        made.rename(folder)
    except (OSError, CorruptCheckpointError) as error:
        _LOGGER.warning("no checkpoint-* of %s: %s; training goes on", checkpoint.name, error)
        shutil.rmtree(made, ignore_errors=True)
        return
    folders = pretrained(output_dir)
    # Folders of later steps are of a run that has since gone back to an earlier checkpoint.
    until = [folder for folder in folders if (step_of(folder) or 0) <= saved.step]
    for old in folders:
        if old not in until[-keep:]:
            shutil.rmtree(old, ignore_errors=True)


def pretrained(output_dir: Path) -> list[Path]:
    """List the folders written here, the oldest step first."""
    folders = [folder for folder in output_dir.glob("checkpoint-*") if _is_own(folder)]
    return sorted(folders, key=lambda folder: step_of(folder) or 0)


def clear_pretrained(output_dir: Path) -> None:
    """Remove the folders of a run that is replaced."""
    for old in pretrained(output_dir):
        shutil.rmtree(old, ignore_errors=True)


def _is_own(folder: Path) -> bool:
    return step_of(folder) is not None and not folder.is_symlink() and (folder / _MARK).exists()
