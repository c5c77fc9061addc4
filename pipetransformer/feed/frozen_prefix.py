"""Run the frozen layers, and know by their stamps which activations are theirs."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor, nn

from autocache import HIDDEN, chain_hash, fingerprint
from pipetransformer.feed.collation import Batch
from pipetransformer.model import Task, in_mode, modes_of, set_modes

_LOGGER = logging.getLogger(__name__)


class FrozenPrefix:
    """Hold how deep the frozen prefix is; whatever feeds stage 0 runs samples through it.

    Attributes:
        task: what is trained.
        depth: frozen layers.
        stamps: of activations after each of them, in order; on stage 0, where a cache is used.
        uses_cache: whether reading rows is faster than computing them.
        on_stage_0: whether this rank holds the prefix.
        generation: grows whenever any of them changes.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.depth, self.generation = 0, 0
        self.uses_cache = self.on_stage_0 = False
        self.stamps: list[int] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        # Of the tensors that the stamps are of: where the model holds them, and what they were.
        self._slots: list[tuple[Mapping[str, Tensor | None], str]] = []
        self._stamped: list[tuple[int, int]] = []
        self._held, self._looks_closely = 0, False

    def set_depth(self, num_frozen: int, *, on_stage_0: bool, use_cache: bool) -> None:
        """Freeze or thaw; every rank of the world calls it.

        Args:
            num_frozen: frozen layers.
            on_stage_0: whether this rank holds the prefix.
            use_cache: whether reading rows is faster than computing them.
        """
        # Edited since, or come anew to this rank: the stamps here may be those of other weights.
        if self.stamps and self._are_edited(closely=True):
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
        model = self.task.model
        begin, end = model.first_active(first), model.first_active(last)
        with in_mode(self._modes):
            hidden = self.task.call(begin, batch[HIDDEN] if begin else batch, sides=batch)
            for index in range(begin + 1, end):
                hidden = self.task.call(index, hidden, sides=batch)
        return hidden

    def stamp_anew_if_edited(self) -> None:
        """Let no row hit that was made before the user changed the frozen layers' tensors."""
        closely, self._looks_closely = self._looks_closely, False
        if self._are_edited(closely=closely):
            _LOGGER.warning(
                "weights of frozen layers were changed between two steps: their activations are "
                "computed anew"
            )
            self.stamps.clear()
            self._stamp_layers()

    def look_closely(self) -> None:
        """Look at values, too, at the next fetch: see `_fingerprint`."""
        self._looks_closely = True

    def _are_edited(self, *, closely: bool) -> bool:
        """Tell whether the layers that the stamps are of hold something else by now."""
        changed = self._versions() != self._stamped
        return changed or (closely and self._fingerprint() != self._held)

    def _fingerprint(self) -> int:
        """Tell all that the frozen layers' tensors hold apart; what is written through `.data`, as
        averages of weights are for an evaluation, leaves no trace in versions.
        """
        return fingerprint(self._tensors())

    def _sublayers(self) -> range:
        return range(self.task.model.first_active(self.depth) if self.depth else 0)

    def _versions(self) -> list[tuple[int, int]]:
        """Tell what the frozen layers' tensors hold apart from what they held before."""
        return [(tensor.data_ptr(), tensor._version) for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        # Asked for at each fetch: a module finds its own ones slowly.
        return [tensor for table, name in self._slots if (tensor := table[name]) is not None]

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
        holders = (model.holder(name) for i in self._sublayers() for name in model.tensors(i))
        self._slots = [
            (module._parameters if name in module._parameters else module._buffers, name)
            for module, name in holders
        ]
        self._stamped, self._held = self._versions(), self._fingerprint()
