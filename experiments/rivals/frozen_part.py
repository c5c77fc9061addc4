"""Freeze bottom layers of a plain loop's model, and keep their activations as a user might."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.model import LayeredModel, adapt

Forward = Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Kept:
    """Hold a sample's activations behind so many layers, and what else the layers above need."""

    depth: int
    row: Tensor
    rest: dict[str, Tensor]


class FrozenPart:
    """Hold how many layers are frozen, and where asked to each sample's activations behind them.

    A dict in this process's host memory, by sample; where the frozen part grows, what was kept
    goes through the new layers alone, from as deep as each sample was kept. A sample whose padding
    no layer above reads is kept without it, and read again for its mask; of others all that is
    needed is kept, and they are not read.
    """

    def __init__(self, model: nn.Module, *, keeps: bool) -> None:
        self._model, self.keeps = model, keeps
        self.depth = 0
        self._kept: dict[int, _Kept] = {}

    @cached_property
    def layered(self) -> LayeredModel:
        """Return the model's sublayers."""
        return adapt(self._model)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of all activations that are kept."""
        return sum(kept.row.nbytes for kept in self._kept.values())

    def freeze(self, num_frozen: int) -> None:
        """Freeze the bottom layers; those above train, and what was kept behind them is dropped.

        Raises:
            ValueError: there are not so many.
        """
        if num_frozen == self.depth:
            return
        if num_frozen > self.layered.num_layers:
            raise ValueError(
                f"{num_frozen} layers are to freeze, but {self.layered.num_layers} can"
            )
        self.depth = num_frozen
        self._kept = {one: kept for one, kept in self._kept.items() if kept.depth <= num_frozen}
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

    def holds(self, ids: Sequence[int]) -> bool:
        """Return whether samples need not be read."""
        if not self.keeps or not self.depth or self.layered.padding_mask is not None:
            return False
        return all(one in self._kept for one in ids)

    def held(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return a batch of samples, without the input that was not kept."""
        rests = [self._kept[one].rest for one in ids]
        return {name: torch.stack([rest[name] for rest in rests]) for name in rests[0]}

    def forward(
        self,
        forward: Forward,
        model: nn.Module,
        batch: Mapping[str, Tensor],
        ids: Sequence[int],
        *,
        stores: bool,
    ) -> Tensor:
        """Return the loss, through what is kept where that is asked for.

        Args:
            forward, model: without anything kept.
            batch: of the samples `ids`.
            stores: whether what is computed will be asked for again.
        """
        if not self.keeps or not self.depth:
            return forward(model, batch)[0]
        layered = self.layered
        first = layered.first_active(self.depth)
        hidden = self._hidden(first, batch, ids, stores=stores)
        output = layered.run(batch, first=first, hidden=hidden)
        assert layered.loss_fn is not None
        loss: Any = layered.loss_fn(output, layered.targets_of(batch))
        joined: Tensor = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        return joined

    def _hidden(
        self, first: int, batch: Mapping[str, Tensor], ids: Sequence[int], *, stores: bool
    ) -> Tensor:
        """Return (N, S, D) activations of a batch: kept, brought deeper, or computed."""
        depths = [self._kept[one].depth if one in self._kept else 0 for one in ids]
        if set(depths) == {self.depth}:
            return self._padded(batch, ids)
        places: list[int] = []
        parts: list[Tensor] = []
        for known in sorted(set(depths)):
            at = [place for place, depth in enumerate(depths) if depth == known]
            part, own = {name: entry[at] for name, entry in batch.items()}, [ids[n] for n in at]
            hidden = self._padded(part, own) if known else None
            if known < self.depth:
                begin = self.layered.first_active(known) if known else 0
                with torch.no_grad():
                    hidden = self.layered.run(part, first=begin, last=first, hidden=hidden)
                if stores:
                    self._keep(hidden.cpu(), part, own)
            assert hidden is not None
            parts.append(hidden)
            places += at
        return torch.cat(parts)[torch.tensor(places).argsort()]

    def _keep(self, hidden: Tensor, batch: Mapping[str, Tensor], ids: Sequence[int]) -> None:
        mask = self.layered.padding_mask
        if mask is not None:
            lengths = batch[mask].sum(dim=1).tolist()
            for one, row, length in zip(ids, hidden, lengths, strict=True):
                self._kept[one] = _Kept(self.depth, row[:length].clone(), {})
            return
        first = self.layered.inputs[0]
        rest = {name: entry.cpu() for name, entry in batch.items() if name != first}
        for index, one in enumerate(ids):
            own = {name: entry[index] for name, entry in rest.items()}
            self._kept[one] = _Kept(self.depth, hidden[index], own)

    def _padded(self, batch: Mapping[str, Tensor], ids: Sequence[int]) -> Tensor:
        kept = [self._kept[one].row for one in ids]
        device = next(iter(batch.values())).device
        mask = self.layered.padding_mask
        if mask is None:
            return torch.stack(kept).to(device, non_blocking=True)
        rows = nn.utils.rnn.pad_sequence(kept, batch_first=True)
        missing = batch[mask].shape[1] - rows.shape[1]
        return nn.functional.pad(rows, (0, 0, 0, missing)).to(device, non_blocking=True)
