"""Serve what a training is evaluated on, each data set from rows of its own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import DataLoader

from pipetransformer.feed import own_random_numbers
from pipetransformer.loop.batch_form import BatchForm
from pipetransformer.loop.loaders import base_of
from pipetransformer.loop.randomness import generators_kept
from pipetransformer.loop.row_service import RowService
from pipetransformer.loop.settings import PARTS

_CPU = torch.device("cpu")
_MOST_EVALUATIONS = 4
"""Data sets whose rows stay."""


@final
class EvaluationRows:
    """Keep services of data sets that a model is evaluated on; one of them serves it at a time.

    Args:
        model, settings: see `RowService`.
    Attributes:
        now: what serves the evaluation that is under way.
    """

    def __init__(self, model: nn.Module, settings: Mapping[str, Any]) -> None:
        self._model, self._settings = model, settings
        self._services = list[RowService]()
        self.now: RowService | None = None
        self._training: RowService | None = None

    def begin(self, loader: DataLoader[Any], training: RowService) -> RowService:
        """Return what serves a loader until `end`; the training's rows rest. Collective.

        Raises:
            TypeError, ValueError: see `RowService`.
        """
        training.forward.pause()
        self._training = training
        try:
            self.now = rows = self._of(loader, training)
            rows.epoch += 1
            with torch.inference_mode(False):
                rows.forward.resume()
                rows.set_depth(training.num_frozen)
        except BaseException:
            self.end()
            raise
        rows.forget_stats()
        return rows

    def end(self) -> None:
        """Have the training's rows serve again, if an evaluation is under way."""
        if self.now is not None:
            self.now.forward.pause()
        if self._training is not None:
            self._training.forward.resume()
        self.now = self._training = None

    def close(self) -> None:
        """Free the rows; the training's are closed by their owner."""
        self.now = self._training = None
        for rows in self._services:
            rows.close()

    def _of(self, loader: DataLoader[Any], training: RowService) -> RowService:
        for rows in self._services:
            if rows.serves(loader):
                rows.refuse_another(loader)
                return rows
        if len(self._services) == _MOST_EVALUATIONS:
            self._services.pop(0).close()
        call, base = training.call, base_of(loader)
        with generators_kept(base.collate_fn, base.dataset), torch.inference_mode(False):
            with own_random_numbers(_CPU):
                form = BatchForm.of(base, has_bundles=PARTS in self._settings)
            rows = RowService(
                self._model,
                loader,
                self._settings,
                call=call if {*call.parameters} <= {*form.names} else None,
                beside=training,
            )
        weakref.finalize(self, rows.close)
        self._services.append(rows)
        return rows
