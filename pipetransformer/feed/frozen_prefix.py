"""Run the frozen layers, and know by their stamps which activations are theirs."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from autocache import HIDDEN, chain_hash
from pipetransformer.data import Batch
from pipetransformer.job import Task, in_mode, modes_of, set_modes

_LOGGER = logging.getLogger(__name__)
_HOST = torch.device("cpu")
_SAMPLED_VALUES = 16


class FrozenPrefix:
    """Hold how deep the frozen prefix is; whatever feeds stage 0 runs samples through it.

    Where no sample has needed it for long, as all are cached, its weights leave a GPU's memory for
    the host's, until one does.

    Attributes:
        task: what is trained.
        depth: frozen layers.
        stamps: of activations after each of them, in order; on stage 0, where a cache is used.
        uses_cache: whether reading rows is faster than computing them.
        on_stage_0: whether this rank holds the prefix.
        generation: grows whenever any of them changes.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self._device = task, device
        self._is_away, self._num_unneeded = False, 0
        self.depth, self.generation = 0, 0
        self.uses_cache = self.on_stage_0 = False
        self.stamps: list[int] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self._stamped: list[tuple[int, int]] = []
        self._sampled, self._looks_closely = b"", False

    def set_depth(self, num_frozen: int, *, on_stage_0: bool, use_cache: bool) -> None:
        """Freeze or thaw; every rank of the world calls it.

        Args:
            num_frozen: frozen layers.
            on_stage_0: whether this rank holds the prefix.
            use_cache: whether reading rows is faster than computing them.
        """
        self.come_back()
        # Edited since, or come anew to this rank: the stamps here may be those of other weights.
        if self._versions() != self._stamped:
            self.stamps.clear()
        del self.stamps[num_frozen:]
        self.depth, self.generation = num_frozen, self.generation + 1
        self.on_stage_0 = on_stage_0
        self.uses_cache = use_cache and num_frozen > 0
        self._modes = modes_of(self.task.model, self._sublayers(), training=False)
        set_modes(self._modes)  # As they are found between two steps, too.
        if self.uses_cache and on_stage_0:
            self._stamp_layers()

    def run_layers(self, batch: Batch, first: int, last: int) -> Tensor:
        """Run frozen layers first..last-1, in eval mode."""
        self.come_back()
        model = self.task.model
        begin, end = model.first_active(first), model.first_active(last)
        with in_mode(self._modes):
            hidden = self.task.call(begin, batch[HIDDEN] if begin else batch, sides=batch)
            for index in range(begin + 1, end):
                hidden = self.task.call(index, hidden, sides=batch)
        return hidden

    def expect_fetch(self, num_samples: int, *, num_all: int) -> None:
        """Note that samples come; where a whole set's have needed no layer, let these leave."""
        if self._num_unneeded >= num_all and not self._is_away and self._device != _HOST:
            self._move(_HOST)
            self._is_away = True
        self._num_unneeded += num_samples

    def come_back(self) -> None:
        """Have the weights where they are used; before they are moved or measured, too."""
        self._num_unneeded = 0
        if self._is_away:
            self._move(self._device)
            self._is_away = False

    def _move(self, device: torch.device) -> None:
        """Move the weights in place: whoever holds one of the tensors still holds it."""
        is_edited = self._versions() != self._stamped
        for index in self._sublayers():
            for tensor in self.task.model.tensors(index).values():
                tensor.data = tensor.data.to(device)
        self._stamped = [] if is_edited else self._versions()

    def stamp_anew_if_edited(self) -> None:
        """Let no row hit that was made before the user changed the frozen layers' tensors."""
        is_edited = self._versions() != self._stamped
        if self._looks_closely:
            is_edited, self._looks_closely = is_edited or self._sample() != self._sampled, False
        if is_edited:
            _LOGGER.warning(
                "weights of frozen layers were changed between two steps: their activations are "
                "computed anew"
            )
            self.stamps.clear()
            self._stamp_layers()

    def look_closely(self) -> None:
        """Look at values, too, at the next fetch: what is written through `.data`, as averages of
        weights are for an evaluation, leaves no trace in versions.
        """
        self._looks_closely = True

    def _sample(self) -> bytes:
        """Return some values of each tensor."""
        model = self.task.model
        tensors = (t for index in self._sublayers() for t in model.tensors(index).values())
        parts = [
            t.detach().reshape(-1)[:: max(1, t.numel() // _SAMPLED_VALUES)].double().cpu()
            for t in tensors
        ]
        return torch.cat(parts).numpy().tobytes() if parts else b""

    def _sublayers(self) -> range:
        return range(self.task.model.first_active(self.depth) if self.depth else 0)

    def _versions(self) -> list[tuple[int, int]]:
        """Tell what the frozen layers' tensors hold apart from what they held before."""
        model = self.task.model
        tensors = (t for index in self._sublayers() for t in model.tensors(index).values())
        return [(t.data_ptr(), t._version) for t in tensors]

    def _stamp_layers(self) -> None:
        model, dtype = self.task.model, self.task.computes_in
        mode = "eval, as the weights are" if dtype is None else f"eval, autocast to {dtype}"
        for layer in range(len(self.stamps), self.depth):
            tensors = (
                named
                for index in range(model.first_active(layer), model.first_active(layer + 1))
                for named in model.tensors(index).items()
            )
            below = self.stamps[-1] if self.stamps else 0
            self.stamps.append(chain_hash(below, tensors, mode=mode))
        self._stamped, self._sampled = self._versions(), self._sample()
