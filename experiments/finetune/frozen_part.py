"""Freeze bottom layers of a plain loop's model, and keep their activations as a user might."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.adapters import LayeredModel, adapt

Forward = Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, Tensor]]


class FrozenPart:
    """Hold how many layers are frozen, and where asked to each sample's activations behind them.

    A dict in this process's host memory, by sample; where the frozen part grows, what was kept
    goes through the new layers alone.
    """

    def __init__(self, model: nn.Module, *, keeps: bool) -> None:
        self._model, self._keeps = model, keeps
        self.depth = 0
        self._kept: dict[int, tuple[int, Tensor]] = {}

    @cached_property
    def layered(self) -> LayeredModel:
        """Return the model's sublayers."""
        return adapt(self._model)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of all activations that are kept."""
        return sum(tensor.nbytes for _, tensor in self._kept.values())

    def freeze(self, num_frozen: int) -> None:
        """Freeze the bottom layers; those above train."""
        if num_frozen == self.depth:
            return
        self.depth = num_frozen
        for sublayer in self.layered.sublayers:
            sublayer.module.requires_grad_(sublayer.layer >= num_frozen)
        for parameter in self._model.parameters():
            parameter.grad = None

    def set_modes(self) -> None:
        """Keep frozen layers in eval mode."""
        if self.depth:
            for sublayer in self.layered.sublayers:
                if sublayer.layer < self.depth:
                    sublayer.module.eval()

    def forward(
        self, forward: Forward, model: nn.Module, batch: Mapping[str, Tensor], ids: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Return loss and outputs, through what is kept where that is asked for."""
        if not self._keeps or not self.depth:
            return forward(model, batch)
        layered = self.layered
        first = layered.first_active(self.depth)
        hidden = self._hidden(layered, first, batch, ids)
        output = layered.run(batch, first=first, hidden=hidden)
        assert layered.loss_fn is not None
        loss: Any = layered.loss_fn(output, layered.targets_of(batch))
        return (loss[0] / loss[1] if isinstance(loss, tuple) else loss), output

    def _hidden(
        self, layered: LayeredModel, first: int, batch: Mapping[str, Tensor], ids: list[int]
    ) -> Tensor:
        """Return (N, S, D) activations of a batch: kept, brought deeper, or computed."""
        depths = {self._kept[one][0] if one in self._kept else 0 for one in ids}
        if depths != {self.depth}:
            known = depths.pop() if len(depths) == 1 else 0
            hidden = self._padded(batch, ids) if known else None
            begin = layered.first_active(known) if known else 0
            with torch.no_grad():
                fresh = layered.run(batch, first=begin, last=first, hidden=hidden)
            for index, one in enumerate(ids):
                row = fresh[index, : self._length(batch, index)]
                self._kept[one] = (self.depth, row.cpu() if row.is_cuda else row.clone())
            return fresh
        return self._padded(batch, ids)

    def _padded(self, batch: Mapping[str, Tensor], ids: list[int]) -> Tensor:
        kept = [self._kept[one][1] for one in ids]
        rows = nn.utils.rnn.pad_sequence(kept, batch_first=True)
        rows = rows.to(next(iter(batch.values())).device)
        mask = batch.get("attention_mask")
        missing = 0 if mask is None else mask.shape[1] - rows.shape[1]
        return nn.functional.pad(rows, (0, 0, 0, missing))

    def _length(self, batch: Mapping[str, Tensor], index: int) -> int | None:
        mask = batch.get("attention_mask")
        return None if mask is None else int(mask[index].sum())
