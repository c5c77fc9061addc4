"""Train with frozen blocks as a careful user writes it: their outputs lie in one tensor.

unfrozen  the model's own forward, over a DataLoader
filling   frozen blocks run without gradients, and their outputs are stored by sample
warm      stored outputs are gathered, and run through the blocks above; nothing is read
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipetransformer.model import OptimizerFactory


@dataclass(frozen=True)
class Case:
    """Describe a model and its samples.

    Args:
        labels: of all samples.
        num_frozen: two thirds of the blocks.
        blocks: of the model, bottom first.
        below: runs what lies below the blocks, and so many blocks.
        above: the loss from what so many blocks return, and the labels.
        loss: of a batch, by the model's own forward.
        settings: of the Trainer that this model needs.
    """

    build: Callable[[], nn.Module]
    items: Any
    labels: Tensor
    batch_size: int
    num_frozen: int
    blocks: Callable[[Any], Any]
    below: Callable[[Any, Any, int], Tensor]
    above: Callable[[Any, Tensor, Tensor, int], Tensor]
    loss: Callable[[Any, Any], Tensor]
    settings: dict[str, Any] = field(default_factory=dict)


class ByHand:
    """Train a case as a careful user would write it, epoch by epoch.

    Args:
        optimizer: builds one over named parameters.
        order: the samples of an epoch, by its number.
    Attributes:
        losses: of all steps.
    """

    def __init__(
        self, case: Case, optimizer: OptimizerFactory, order: Callable[[int], Tensor]
    ) -> None:
        self._case, self._order = case, order
        self._model = case.build().train()
        self._optimizer = optimizer(list(self._model.named_parameters()))
        self._batches: list[list[int]] = []
        self._loader: DataLoader[Any] = DataLoader(case.items, batch_sampler=self._batches)
        self._rows: Tensor | None = None
        self._epoch = 0
        self.losses: list[Tensor] = []

    def epoch(self, num_frozen: int) -> None:
        """Train an epoch; the first one with frozen blocks stores their outputs."""
        case, parts = self._case, self._order(self._epoch).split(self._case.batch_size)
        self._epoch += 1
        self._batches[:] = [ids.tolist() for ids in parts]
        if not num_frozen:
            for batch in self._loader:
                self._step(case.loss(self._model, batch))
        elif self._rows is None:
            self._freeze(num_frozen)
            for ids, batch in zip(parts, self._loader, strict=True):
                with torch.no_grad():
                    hidden = case.below(self._model, batch, num_frozen)
                if self._rows is None:
                    self._rows = hidden.new_empty(len(case.labels), *hidden.shape[1:])
                self._rows[ids] = hidden
                self._step(case.above(self._model, hidden, case.labels[ids], num_frozen))
        else:
            for ids in parts:
                hidden = self._rows[ids]
                self._step(case.above(self._model, hidden, case.labels[ids], num_frozen))

    def _freeze(self, num_frozen: int) -> None:
        """Freeze all parameters that come before the first block that trains."""
        first = next(self._case.blocks(self._model)[num_frozen].parameters())
        for parameter in self._model.parameters():
            if parameter is first:
                break
            parameter.requires_grad_(False)
        for group in self._optimizer.param_groups:
            group["params"] = [one for one in group["params"] if one.requires_grad]

    def _step(self, loss: Tensor) -> None:
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.detach())
