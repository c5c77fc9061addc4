"""Find out what a row of the cache looks like, and agree on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autocache import HIDDEN, Positions, RowContent, RowField, RowLayout
from autodp import broadcast_json
from pipetransformer.data import Batch, Samples, read_lengths
from pipetransformer.feed.frozen_prefix import FrozenPrefix
from pipetransformer.processes import World

_LOGGER = logging.getLogger(__name__)

_MOST_COMPARED = 16
"""Samples whose shapes are compared, to find out whether their lengths differ."""

_IGNORED_TARGET = -100
"""What transformers' collate functions, and torch's losses, take for a target that is none."""


class RowMaker:
    """Describe the rows that hold a data set's samples behind the frozen prefix.

    Attributes:
        content: of rows in a store, from `agree_on_layout` on.
    """

    def __init__(
        self, prefix: FrozenPrefix, world: World, samples: Samples, *, chunk_size: int
    ) -> None:
        self._prefix, self._world, self._samples = prefix, world, samples
        self._task, self._chunk_size = prefix.task, chunk_size
        model = prefix.task.model
        self._sides = model.sides_of(0, len(model.sublayers))
        self.content = RowContent(())
        self._positions: Positions | None = None
        self._was_compared, self._trouble = False, ""

    def unstored_content(self) -> RowContent:
        """Return what is kept of samples where no store holds them."""
        return RowContent(self._kept_of(self._first_sample()), checked=False)

    def agree_on_layout(self) -> RowLayout | None:
        """Find out what a row looks like on rank 0, which always holds the prefix. Collective.

        None where samples have unequal shapes, and it is not known what of them is padding.
        """
        found: Any = None
        if self._world.is_main:
            self._compare_samples()
            if self._trouble:
                _LOGGER.warning(
                    "no cache: %s; the frozen prefix is computed at every step", self._trouble
                )
            else:
                found = self._find()
        found = broadcast_json(found, group=self._world.group)
        if found is None:
            return None
        keep, computed, fields, positions = found
        self._positions = None if positions is None else Positions(*positions)
        self.content = self._describe(tuple(keep), getattr(torch, computed))
        return RowLayout(
            tuple(
                RowField(name, tuple(shape), getattr(torch, dtype), varies)
                for name, shape, dtype, varies in fields
            )
        )

    def share_of_measured(self) -> float:
        """Return the bytes of the longest sample's rows over those of the first samples."""
        if self._world.is_main:
            self._compare_samples()
        positions = self._positions
        if positions is None:
            return 1.0
        return positions.most / self._first_sample()[positions.mask].shape[1]

    def _find(self) -> list[Any]:
        """Run one sample through the prefix; return plain values that describe its row."""
        batch, positions = self._first_sample(), self._positions
        if positions is not None:
            batch = positions.bring(batch, positions.most)
        repeat = torch.zeros(self._chunk_size, dtype=torch.int64)
        chunk = {name: t[repeat].to(self._world.device) for name, t in batch.items()}
        with torch.no_grad():
            hidden = self._prefix.run_layers(chunk, 0, self._prefix.depth)
        if not torch.equal(hidden, hidden[:1].expand_as(hidden)):
            _LOGGER.info(
                "this machine's kernels give a sample other last bits at another place of a "
                "chunk: a cached run equals an uncached one to rounding, not bit by bit"
            )
        content = self._describe(self._kept_of(batch), hidden.dtype)
        layout = content.layout(batch, hidden[:1])
        fields = [[f.name, list(f.shape), _spell(f.dtype), f.varies] for f in layout.fields]
        spread = None
        if positions is not None:
            spread = [positions.mask, positions.names, positions.most, dict(positions.padding)]
        return [list(content.keep), _spell(content.computed_dtype), fields, spread]

    def _compare_samples(self) -> None:
        """Find out, once, whether samples have unequal lengths, and which entries have them."""
        if self._was_compared or self._samples.collation.function is None:
            return
        self._was_compared = True
        mask = self._task.model.padding_mask
        chosen = self._samples.spread(_MOST_COMPARED) if mask is None else self._extremes()
        batches = [self._samples.read([index], view=0) for index in chosen]
        names = [n for n in batches[0] if len({one[n].shape for one in batches}) > 1]
        if not names:
            return
        lengths = {tuple(one[name].shape[1] for one in batches) for name in names}
        if mask is None:
            self._trouble = (
                f"samples have unequal shapes of {names}, and the model names no padding_mask "
                "that says what of them is padding"
            )
        elif mask not in names or len(lengths) > 1:
            self._trouble = f"samples have unequal shapes of {names}, not all as long as {mask!r}"
        else:
            targets = {name: _IGNORED_TARGET for name in self._task.model.targets if name in names}
            most = batches[-1][mask].shape[1]
            self._positions = Positions(mask, (HIDDEN, *names), most, targets)

    def _extremes(self) -> list[int]:
        """Return the shortest sample and the longest."""
        samples, mask = self._samples, self._task.model.padding_mask
        try:
            lengths = read_lengths(samples.dataset, samples.collation.inputs[0])
        except ValueError:  # Made by collate_fn.
            every = range(len(samples.dataset))
            read = (samples.read([index], view=0).get(mask or "") for index in every)
            lengths = torch.tensor([0 if one is None else one.shape[1] for one in read])
        return [int(lengths.argmin()), int(lengths.argmax())]

    def _first_sample(self) -> Batch:
        return self._samples.read([0], view=0)

    def _kept_of(self, batch: Mapping[str, Tensor]) -> tuple[str, ...]:
        names = (*self._sides, *self._task.model.targets)
        return tuple(name for name in names if name in batch)

    def _describe(self, keep: tuple[str, ...], computed_dtype: torch.dtype) -> RowContent:
        dtype = self._task.config.cache_dtype
        mask = self._task.model.padding_mask
        return RowContent(
            keep,
            dtype=None if dtype is None else getattr(torch, dtype),
            computed_dtype=computed_dtype,
            padding_mask=mask if mask in keep else None,
            positions=self._positions,
        )


def _spell(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
