"""Show a run's course in TensorBoard."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from pipetransformer.config import EVALUATION_FIELDS
from pipetransformer.extras import require
from pipetransformer.report.callbacks import Callback
from pipetransformer.report.fit_report import FitReport

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_FIELDS = {
    "loss": "loss",
    "learning_rate": "learning_rate",
    "gradient_norm": "gradient_norm",
    "frozen": "frozen_layers",
    "length": "stages",
    "replicas": "replicas",
}
"""Fields of a step's record, and their tags."""
_LOGGER = logging.getLogger(__name__)


@final
class TensorBoard(Callback):
    """Write scalars on rank 0: `train/loss`, `train/samples_per_s`, `evaluation/accuracy`, ...

    A run with `folder=` has every number of its records in `folder/tensorboard` anyhow. On a full
    disk this warns, later scalars are lost, and training goes on.

    Args:
        folder: None is torch's choice, a new folder in ./runs.
    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        require("tensorboard", purpose="TensorBoard()")
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._close: Callable[[], object] = lambda: None
        self._has_failed = False

    def on_log(self, trainer: Any, record: Mapping[str, Any]) -> None:
        """Show what a step or an evaluation found."""
        numbers = {tag: one for tag, one in _numbers(record) if one is not None}
        if not numbers or self._has_failed:
            return
        try:
            writer = self._writer or self._open()
            for tag, number in numbers.items():
                writer.add_scalar(tag, number, record["step"])
        except OSError as error:
            self._has_failed = True
            place = self._folder or "./runs"
            _LOGGER.warning("TensorBoard's events in %s end: %s; training goes on", place, error)

    def on_train_end(self, trainer: Any, report: FitReport) -> None:
        """Write what is left."""
        self._close()
        self._writer, self._has_failed = None, False

    def _open(self) -> SummaryWriter:
        # It takes a second, and only rank 0 writes.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(None if self._folder is None else str(self._folder))
        # Events are written late. A run that fails, or goes step by step, calls no on_train_end.
        self._close = weakref.finalize(self, _close, self._writer)
        return self._writer


def _close(writer: SummaryWriter) -> None:
    try:
        writer.close()
    except OSError as error:
        _LOGGER.warning("TensorBoard's last events are lost: %s", error)


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield a record's tags and numbers; None was not finite."""
    if record["kind"] == "step":
        for field, name in _FIELDS.items():
            yield f"train/{name}", record[field]
        yield "train/samples_per_s", record["samples"] / record["seconds"]
    elif record["kind"] == "evaluation":
        for name in sorted(record.keys() - set(EVALUATION_FIELDS) | {"loss"}):
            yield f"evaluation/{name}", record[name]
