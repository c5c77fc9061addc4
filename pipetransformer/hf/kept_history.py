"""Keep a run's log, for a run that goes on from its checkpoint.

file                read by                       written
trainer_state.json  other programs                as transformers writes it
log_history.json    the run that goes on          with its own SHA-256
records.jsonl       the same, for steps that      by our Trainer, at every step
                    log_history.json lacks

So a damaged `trainer_state.json` costs a run nothing.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerState

from pipetransformer.config import EVALUATION_FIELDS
from pipetransformer.durable_files import read_sealed_json, replace_file, sealed_json
from pipetransformer.report import RECORDS_FILE, latest_branch, read_records

STATE_FILE, HISTORY_FILE = "trainer_state.json", "log_history.json"

Entry = dict[str, Any]
LogsAt = Callable[[int, bool], bool]
"""Tells whether a loss is logged after so many steps, which may end an epoch."""

_NO_METRICS = {*EVALUATION_FIELDS} - {"loss"}
_LOGGER = logging.getLogger(__name__)


def keep_history(folder: Path, state: TrainerState, *, is_over: bool = False) -> None:
    """Write the log so far, and whether the run is over; if that fails, warn."""
    text = json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"
    kept = {"step": state.global_step, "history": state.log_history, "is_over": is_over}
    try:
        replace_file(folder / HISTORY_FILE, sealed_json(kept))
        replace_file(folder / STATE_FILE, text.encode())
    except OSError as error:
        _LOGGER.warning(
            "what was logged until step %d is not kept: %s; training goes on",
            state.global_step,
            error,
        )


def was_over(folder: Path) -> bool:
    """Tell whether the last run in a folder came to its end."""
    try:
        return bool(read_sealed_json(folder / HISTORY_FILE).get("is_over"))
    except (OSError, ValueError):
        return False


def forget_history(folder: Path) -> None:
    """Remove the log of a run that is replaced."""
    (folder / HISTORY_FILE).unlink(missing_ok=True)


def kept_history(
    folder: Path, step: int, *, logs_at: LogsAt, num_samples: int, batch: int
) -> list[Entry]:
    """Return the log up to a step; entries that were not kept are made from the records.

    Records lack what the script itself logged. If the kept log is damaged or missing, this warns.

    Args:
        num_samples: of an epoch.
        batch: samples of a step.
    """
    kept_step, kept = 0, list[Entry]()
    try:
        content = read_sealed_json(folder / HISTORY_FILE)
        kept_step, kept = content["step"], content["history"]
    except (OSError, ValueError) as error:
        _LOGGER.warning(
            "what was logged until step %d is taken from %s, without what the script itself "
            "logged: %s",
            step,
            RECORDS_FILE,
            error,
        )
    history = [entry for entry in kept if entry["step"] <= step]
    if kept_step < step:  # Killed between the checkpoint's completion and this file's writing.
        recorded = _recorded(folder, logs_at, num_samples, batch)
        history += [entry for entry in recorded if kept_step < entry["step"] <= step]
    return history


def _recorded(folder: Path, logs_at: LogsAt, num_samples: int, batch: int) -> Iterator[Entry]:
    """Yield the log as the records of steps and evaluations have it."""
    try:
        records = latest_branch(read_records(folder / RECORDS_FILE))
    except ValueError as error:
        _LOGGER.warning("what was logged is lost: %s", error)
        return
    per_epoch = -(-num_samples // batch)
    losses, done, epoch = list[float](), 0, 0.0
    for record in records:
        if record["kind"] == "step":
            step, losses = record["step"] + 1, [*losses, _number(record["loss"])]
            begins = record["epoch"] >= epoch  # The step before has ended an epoch.
            done = record["samples"] + (0 if begins else done)
            left = -(-(num_samples - done) // batch)
            epoch = record["epoch"] + (per_epoch - left) / per_epoch
            if logs_at(step, epoch.is_integer()):
                yield {
                    "loss": sum(losses) / len(losses),
                    "grad_norm": _number(record["gradient_norm"]),
                    "learning_rate": record["learning_rate"],
                    "epoch": epoch,
                    "step": step,
                }
                losses = []
        elif record["kind"] == "evaluation":
            found = {
                f"eval_{name.removeprefix('eval_')}": _number(value)
                for name, value in record.items()
                if name not in _NO_METRICS
            }
            yield {**found, "epoch": epoch, "step": record["step"]}


def _number(recorded: float | None) -> float:
    """Return a recorded number; records hold null for NaN and infinities."""
    return math.nan if recorded is None else recorded
