"""Serve what a training is evaluated on, each data set from rows of its own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn

from pipetransformer.loop.batches import base_of
from pipetransformer.loop.rows.row_service import RowService

MOST_EVALUATIONS = 4
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
        # The last one was used last; and whether its evaluation reads no more than labels do.
        self._services = dict[RowService, bool]()
        self.now: RowService | None = None
        self._training: RowService | None = None

    def may_serve(self, loader: Any, training: RowService | None) -> bool:
        """Return whether there is anything to serve a loader's batches with."""
        if training is None or not training.may_serve:
            return False
        return len(base_of(loader).dataset) > 0  # type: ignore[arg-type]

    def begin(
        self, loader: Any, training: RowService, *, keeps_to_labels: bool = False
    ) -> RowService:
        """Return what serves a loader until `end`; the training's rows rest. Collective.

        Several may begin; the last one serves the model, until `turn_to`.

        Args:
            keeps_to_labels: see `RowService`.
        Raises:
            TypeError, ValueError: see `RowService`; then all is as it was.
        """
        before, self.now, self._training = self.now, None, training
        (before or training).forward.pause()
        try:
            rows = self._of(loader, training, keeps_to_labels=keeps_to_labels)
            self.turn_to(rows)
            rows.epoch += 1
            with torch.inference_mode(False):
                rows.set_depth(training.num_frozen)
        except BaseException:
            if before is None:
                self.end()
            else:
                self.turn_to(before)
            raise
        rows.forget_stats()
        return rows

    def turn_to(self, rows: RowService) -> None:
        """Have this service serve the model from now on."""
        if self.now is rows:
            return
        if self.now is not None:
            self.now.forward.pause()
        self.now = rows
        with torch.inference_mode(False):  # What is kept serves loops in any mode.
            rows.forward.resume()

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

    def _of(self, loader: Any, training: RowService, *, keeps_to_labels: bool) -> RowService:
        for rows, keeps in self._services.items():
            if keeps == keeps_to_labels and rows.serves(loader):
                rows.refuse_another(loader)
                self._services[rows] = self._services.pop(rows)
                return rows
        if len(self._services) == MOST_EVALUATIONS:
            oldest = next(iter(self._services))
            del self._services[oldest]
            oldest.close()
        with torch.inference_mode(False):
            rows = RowService(
                self._model,
                loader,
                self._settings,
                keeps_to_labels=keeps_to_labels,
                beside=training,
            )
        weakref.finalize(self, rows.close)
        self._services[rows] = keeps_to_labels
        return rows
