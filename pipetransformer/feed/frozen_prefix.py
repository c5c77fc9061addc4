"""Run the frozen layers, and know by their stamps which activations are theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter, contains, getitem

from torch import Tensor, nn

from autocache import HIDDEN, chain_hash, fingerprint
from pipetransformer.feed.collation import Batch
from pipetransformer.feed.row_origin import settings_of
from pipetransformer.model import (
    Task,
    in_mode,
    is_opaque,
    marks_of,
    modes_of,
    opaque_kept,
    plain_tensors,
    set_modes,
)

_LOGGER = logging.getLogger(__name__)

_VERSION = attrgetter("_version")


class FrozenPrefix:
    """Hold how deep the frozen prefix is, and run it.

    Args:
        run: runs layers first .. last - 1 in another way; None runs the task's sublayers.
        watch: says whether tensors were edited, where the model holds parts of them; whoever
            watches calls `stamp_anew`, with the whole ones in the model.

    Attributes:
        depth: number of frozen layers.
        stamps: hashes of the prefix up to each frozen layer; on stage 0, where a cache is used.
        uses_cache: whether reading rows is faster than computing them.
        on_stage_0: whether this rank holds the prefix.
        generation: grows whenever any of these changes.
    """

    def __init__(
        self,
        task: Task,
        run: Callable[[Batch, int, int], Tensor] | None = None,
        watch: Callable[[], bool] | None = None,
    ) -> None:
        self.task, self._run, self._watch = task, run, watch
        self._edition = 0
        self.depth, self.generation = 0, 0
        self.uses_cache = self.on_stage_0 = False
        self.stamps: list[int] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        # Where the model holds the stamped tensors, and what these were when they were stamped.
        self._tables: list[Mapping[str, Tensor | None]] = []
        self._names: list[str] = []
        self._stamped_versions: list[int] = []
        self._stamped_values, self._compares_values = 0, False
        self._has_opaque = False

    def set_depth(self, num_frozen: int, *, on_stage_0: bool, use_cache: bool) -> None:
        """Freeze or thaw; every rank of the world calls it."""
        # The user may have edited a layer, or a transition brought it here: stamps may be stale.
        if self.stamps and self._are_edited(compares_values=True):
            self.stamps.clear()
        del self.stamps[num_frozen:]
        self.depth, self.generation = num_frozen, self.generation + 1
        self.on_stage_0 = on_stage_0
        self.uses_cache = use_cache and num_frozen > 0
        self._modes = modes_of(self.task.model, self._sublayers(), training=False)
        set_modes(self._modes)  # The user finds them in this mode between two steps, too.
        if self.uses_cache and on_stage_0:
            self._stamp_layers()

    def run_layers(self, batch: Batch, first: int, last: int) -> Tensor:
        """Run frozen layers first..last-1, in eval mode."""
        with opaque_kept(self._tensors() if self._has_opaque else ()):
            return self._computed(batch, first, last)

    def _computed(self, batch: Batch, first: int, last: int) -> Tensor:
        if self._run is not None:
            return self._run(batch, first, last)
        model = self.task.model
        begin, end = model.first_active(first), model.first_active(last)
        with in_mode(self._modes):
            hidden = self.task.call(begin, batch[HIDDEN] if begin else batch, sides=batch)
            for index in range(begin + 1, end):
                hidden = self.task.call(index, hidden, sides=batch)
        return hidden

    def stamp_anew_if_edited(self, *, compares_values: bool = False) -> None:
        """Let no row hit that was made before the user changed the frozen layers' tensors.

        Args:
            compares_values: whether to read all values, too. Writes through `.data`, such as
                weights averaged for an evaluation, leave no trace in tensors' versions.
        """
        compares_values |= self._compares_values
        self._compares_values = False
        if self._watch is None and self._are_edited(compares_values=compares_values):
            _LOGGER.warning(
                "weights of frozen layers were changed between two steps: their activations are "
                "computed anew"
            )
            self.stamp_anew()

    def stamp_anew(self) -> None:
        """Let no row hit that was made of other tensors."""
        self.stamps.clear()
        self._stamp_layers()

    @property
    def stamp(self) -> int:
        """Return the hash of the whole prefix; 0 where it has none."""
        return self.stamps[-1] if self.stamps else 0

    def begin_edition(self) -> None:
        """Let no row hit that was made until now: something else than tensors has changed."""
        self._edition += 1
        if self.stamps and self._watch is not None:
            # In place, as the cache has this list. Its tensors are not whole here.
            how = f"edition {self._edition}"
            self.stamps[:] = [chain_hash(stamp, [], mode=how) for stamp in self.stamps]
        elif self.stamps:
            self.stamp_anew()

    def is_whole(self) -> bool:
        """Return whether its tensors are where they were, if other ones."""
        return all(map(contains, self._tables, self._names))

    def is_edited(self) -> bool:
        """Return whether its tensors were changed since they were stamped, but not by `.data`."""
        return bool(self.stamps) and self._are_edited(compares_values=False)

    def compare_values_next(self) -> None:
        """Have the next `stamp_anew_if_edited` compare values."""
        self._compares_values = True

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Have tensors stay known that get other memory within the block, of the same values."""
        was_edited = self._versions() != self._stamped_versions
        try:
            yield
        finally:
            if not was_edited:
                self._stamped_versions = self._versions()

    def _are_edited(self, *, compares_values: bool) -> bool:
        if self._watch is not None:
            return self._watch()
        if self._versions() != self._stamped_versions:
            return True
        return compares_values and self._values() != self._stamped_values

    def _sublayers(self) -> range:
        return range(self.task.model.first_active(self.depth) if self.depth else 0)

    def _versions(self) -> list[int]:
        tensors = self._tensors()
        if self._has_opaque:
            return [number for tensor in tensors for mark in marks_of(tensor) for number in mark]
        return [*map(Tensor.data_ptr, tensors), *map(_VERSION, tensors)]

    def _values(self) -> int:
        return fingerprint(plain for tensor in self._tensors() for plain in plain_tensors(tensor))

    def _tensors(self) -> list[Tensor]:
        # Read from the modules' tables at each fetch: nn.Module.__getattr__ is slow.
        held = map(getitem, self._tables, self._names)
        return [tensor for tensor in held if tensor is not None]

    def _stamp_layers(self) -> None:
        model, dtype = self.task.model, self.task.computes_in
        mode = "eval, as the weights are" if dtype is None else f"eval, autocast to {dtype}"
        mode += f", edition {self._edition}" if self._edition else ""
        # Within a run settings stay; a row of another run must have the same ones.
        settings = settings_of(model) if self.task.config.cache_keep else [""] * self.depth
        for layer in range(len(self.stamps), self.depth):
            sublayers = range(model.first_active(layer), model.first_active(layer + 1))
            named = [
                (name, plain)
                for index in sublayers
                for name, tensor in model.tensors(index).items()
                for plain in plain_tensors(tensor)
            ]
            below, how = self.stamps[-1] if self.stamps else 0, mode + settings[layer]
            if not self.task.config.cache_keep:
                # Within a run the sum by which edits are noticed tells prefixes apart, too. It is
                # taken where the weights are: to hash a GPU's takes a second for each gigabyte.
                tensors_text = (
                    f"{[name for name, _ in named]} {fingerprint(tensor for _, tensor in named)}"
                )
                how, named = f"{how} {tensors_text}", []
            self.stamps.append(chain_hash(below, named, mode=how))
        holders = (model.holder(name) for i in self._sublayers() for name in model.tensors(i))
        held = [
            (module._parameters if name in module._parameters else module._buffers, name)
            for module, name in holders
        ]
        self._tables, self._names = [table for table, _ in held], [name for _, name in held]
        self._has_opaque = any(map(is_opaque, self._tensors()))
        self._stamped_versions = self._versions()
        self._stamped_values = self._values()
