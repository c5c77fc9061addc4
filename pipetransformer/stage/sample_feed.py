"""Feed stage 0 a data set's samples, through the frozen prefix and the cache where there are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from autocache import CacheStats, PrefixCache, RowContent, RowField, RowLayout, RowStore
from autodp import broadcast_json, gather_json
from autopipe.profile import Profile
from pipetransformer.data import Batch, SizedDataset, read_samples, varies_between_reads
from pipetransformer.job import Task
from pipetransformer.processes import World
from pipetransformer.stage.frozen_prefix import FrozenPrefix
from pipetransformer.stage.node_store import share_store

_LOGGER = logging.getLogger(__name__)

_AHEAD_BYTES = 1 << 20
"""Rows of a step that are read ahead where they are no fewer: less is read faster than handed
from thread to thread."""


class Rows(Protocol):
    """Give stage 0 the entries of a step's samples, or, as "hidden", their activations behind the
    frozen prefix.
    """

    def fetch(self, ids: Tensor) -> Batch:
        """Return the entries of (B,) samples, (B, ...) each."""

    def read_ahead(self, ids: Tensor) -> None:
        """Prepare for the fetch that comes next."""


class SampleFeed:
    """Answer for a data set's samples at the current depth of the frozen prefix.

    Args:
        task, world: what is trained, and where.
        dataset: whose samples.
        prefix: the frozen layers.
        once: whether each sample is asked for once, so that none needs to be kept.
        targets: those that its samples have; the model's, where any are.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        dataset: SizedDataset,
        prefix: FrozenPrefix,
        *,
        once: bool = False,
        targets: tuple[str, ...] | None = None,
    ) -> None:
        self.prefix = prefix
        self.dataset = dataset
        self._task = task
        self._world = world
        model = task.model
        targets = model.targets if targets is None else targets
        self._required = (model.inputs[0], *targets)
        self._sides = model.sides_of(0, len(model.sublayers))
        self._names = tuple(dict.fromkeys((*model.inputs, *self._sides, *targets)))
        self._chunk_size = task.config.prefix_chunk_of(world.size)
        self._num_views = task.config.cache_views or 1
        self._generation = -1
        self._content = RowContent(())
        self._store: RowStore | None = None
        self._cache: PrefixCache | None = None
        self._gave_up = once

    def check_repeatable(self) -> None:
        """Refuse to cache samples that change from one read to the next."""
        views = self._task.config.cache_views is not None
        if varies_between_reads(
            self.dataset, names=self._names, required=self._required, same_seed=views
        ):
            raise ValueError(
                "the training set gives other values each time a sample is read, whatever the "
                "seed, so its activations cannot be cached; draw random numbers from torch, numpy "
                "or random, or use cache=False"
                if views
                else "the training set gives other values each time a sample is read (random "
                "augmentation), so its activations cannot be cached; make it deterministic, cache "
                "a few fixed views of each sample with cache_views=, or use cache=False"
            )

    def most_bytes(self, profile: Profile) -> int:
        """Return about how much a node's cache will take at most, whatever freezes."""
        model, config = self._task.model, self._task.config
        row_bytes = max(profile.prefix_bytes(num + 1) for num in range(model.num_layers))
        if config.cache_dtype is not None:
            computed = next(model.model.parameters()).dtype.itemsize
            row_bytes *= getattr(torch, config.cache_dtype).itemsize / computed
        needed = int(row_bytes * self._num_views * len(self.dataset))
        return min(needed, config.cache_limit_bytes or needed)

    def read(self, ids: Tensor, *, view: int = 0) -> Batch:
        """Read samples as they are in an epoch, or in a view; ids may exceed their number."""
        return read_samples(
            self.dataset,
            ids % len(self.dataset),
            names=self._names,
            required=self._required,
            seed=self._task.config.seed,
            epoch=view,
        )

    def rows(self, epoch: int, *, is_last: bool = False) -> Rows:
        """Return what gives stage 0 its samples in an epoch.

        Args:
            epoch: of the run.
            is_last: whether no sample is asked for again in the view that it has now.
        """
        views = self._task.config.cache_views
        view = epoch if views is None else epoch % views
        first_row = 0 if views is None else view * len(self.dataset)
        return _EpochRows(self, view, first_row, keeps=not is_last)

    def follow_prefix(self) -> None:
        """Serve the prefix's depth from now on, if it has changed. Collective."""
        prefix = self.prefix
        if self._generation == prefix.generation:
            return
        self._generation = prefix.generation
        self._close_cache()
        use_cache = prefix.uses_cache and not self._agree_to_give_up()
        if use_cache:
            self._match_store()
        if prefix.depth and prefix.on_stage_0:
            if self._store is None or not use_cache:
                self._content = RowContent(self._kept_of(self._first_sample()), checked=False)
            self._cache = PrefixCache(
                prefix.run_layers,
                chunk_size=self._chunk_size,
                stamps=prefix.stamps,
                store=self._store if use_cache else None,
                device=self._world.device,
                content=self._content,
            )

    def take_stats(self) -> CacheStats:
        """Return the cache's counts and times since the last call."""
        return self._cache.take_stats() if self._cache else CacheStats()

    def close(self) -> None:
        """Unmap the cache."""
        self._close_cache()
        if self._store is not None:
            self._store.close()
            self._store = None

    def fetch(self, ids: Tensor, *, view: int, row_ids: Tensor, keeps: bool) -> Batch:
        """Return samples' entries, with "hidden" in place of the inputs behind a frozen prefix."""
        if self._cache is None:
            return self.read(ids, view=view)
        if self._uses_store:
            self.prefix.stamp_anew_if_edited()
        depth, load = self.prefix.depth, self._loader(view)
        self.prefix.expect_fetch(len(ids), num_all=len(self.dataset))
        return self._cache.fetch(ids, load, depth=depth, row_ids=row_ids, keeps=keeps)

    def read_ahead(self, row_ids: Tensor) -> None:
        """Have rows read while this step computes, where that is worth a thread."""
        if self._cache is None or self._store is None or not self._uses_store:
            return
        num_bytes = len(row_ids) * self._store.layout.row_bytes
        if num_bytes >= _AHEAD_BYTES or self._world.device.type == "cuda":
            self._cache.read_ahead(row_ids, depth=self.prefix.depth)

    def row_ids(self, ids: Tensor, first_row: int) -> Tensor:
        """Return samples' rows: where not all fit, every so manyth has one, spread evenly."""
        num_rows = self._store.num_rows if self._store is not None else 0
        num_all = self._num_views * len(self.dataset)
        wanted = ids + first_row
        if num_rows in (0, num_all):
            return wanted
        slots = wanted * num_rows // num_all
        return slots.where((wanted + 1) * num_rows // num_all > slots, num_rows)

    @property
    def _uses_store(self) -> bool:
        return self._store is not None and self.prefix.uses_cache and not self._gave_up

    def _loader(self, view: int) -> Callable[[Tensor], Batch]:
        return lambda ids: self.read(ids, view=view)

    def _close_cache(self) -> None:
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _agree_to_give_up(self) -> bool:
        """Tell whether a cache failed on any node, or was condemned there. Collective."""
        condemned = self._store is not None and self._store.is_condemned
        self._gave_up = any(gather_json(self._gave_up or condemned, group=self._world.group))
        return self._gave_up

    def _match_store(self) -> None:
        """Keep the store where rows of this depth look as its own do, else make another."""
        layout = self._agree_on_layout()
        if self._store is not None and self._store.layout == layout:
            return
        self.close()
        limit = self._task.config.cache_limit_bytes
        num_rows = self._num_views * len(self.dataset)
        if limit is not None:
            num_rows = min(num_rows, limit // layout.row_bytes)
        if num_rows == 0:
            if self._world.is_main:
                _LOGGER.warning(
                    "cache_limit_bytes=%d holds no row of %d bytes: the frozen prefix is computed "
                    "at every step",
                    limit,
                    layout.row_bytes,
                )
            return
        self._store = share_store(self._world, self._task.config.cache_folder, layout, num_rows)
        self._gave_up = self._store is None

    def _agree_on_layout(self) -> RowLayout:
        """Find out what a row looks like on rank 0, which always holds the prefix. Collective."""
        found: Any = None
        if self._world.is_main:
            content, layout = self._probe_row()
            fields = [[f.name, list(f.shape), _spell(f.dtype), f.varies] for f in layout.fields]
            found = [list(content.keep), _spell(content.computed_dtype), fields]
        keep, computed, fields = broadcast_json(found, group=self._world.group)
        self._content = self._describe(tuple(keep), getattr(torch, computed))
        return RowLayout(
            tuple(
                RowField(name, tuple(shape), getattr(torch, dtype), varies)
                for name, shape, dtype, varies in fields
            )
        )

    def _probe_row(self) -> tuple[RowContent, RowLayout]:
        """Run one sample through the prefix."""
        batch = self._first_sample()
        repeat = torch.zeros(self._chunk_size, dtype=torch.int64)
        chunk = {name: t[repeat].to(self._world.device) for name, t in batch.items()}
        with torch.no_grad():
            hidden = self.prefix.run_layers(chunk, 0, self.prefix.depth)
        if not torch.equal(hidden, hidden[:1].expand_as(hidden)):
            _LOGGER.info(
                "this machine's kernels give a sample other last bits at another place of a "
                "chunk: a cached run equals an uncached one to rounding, not bit by bit"
            )
        content = self._describe(self._kept_of(batch), hidden.dtype)
        return content, content.layout(batch, hidden[:1])

    def _first_sample(self) -> Batch:
        return self.read(torch.zeros(1, dtype=torch.int64))

    def _kept_of(self, batch: Batch) -> tuple[str, ...]:
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
        )


@dataclass(frozen=True)
class _EpochRows:
    """Serve a feed's samples as they are in one epoch."""

    feed: SampleFeed
    view: int
    first_row: int
    keeps: bool

    def fetch(self, ids: Tensor) -> Batch:
        row_ids = self.feed.row_ids(ids, self.first_row)
        return self.feed.fetch(ids, view=self.view, row_ids=row_ids, keeps=self.keeps)

    def read_ahead(self, ids: Tensor) -> None:
        self.feed.read_ahead(self.feed.row_ids(ids, self.first_row))


def _spell(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
