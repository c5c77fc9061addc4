"""Feed stage 0: read samples, run the frozen prefix, and share its activations on the node.

The cache's file is created by one process of a node and opened by all. It has no name where the
platform allows for that, and loses it at once where not: whatever happens to the run, nothing is
left behind.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autocache import (
    HIDDEN,
    CacheStats,
    NamelessFilesError,
    PrefixCache,
    PrefixStamps,
    RowField,
    RowLayout,
    RowStore,
    rows_layout,
)
from autodp import broadcast_json, gather_json
from pipetransformer.data import Batch, SizedDataset, read_samples, varies_between_reads
from pipetransformer.job import Task, in_mode, modules_of
from pipetransformer.processes import World
from pipetransformer.stage.work import Rows

_LOGGER = logging.getLogger(__name__)


class FrozenPrefix:
    """Answer for the training set's samples at the current depth of the frozen prefix.

    Args:
        task, world: what is trained, and where.
        dataset: the training set.
    Raises:
        ValueError: the cache is on, and the dataset gives other values for a sample each time it
            is read.
    """

    def __init__(self, task: Task, world: World, dataset: SizedDataset) -> None:
        self._task = task
        self._world = world
        self._dataset = dataset
        model = task.model
        self._required = (model.inputs[0], *model.targets)
        self._sides = model.sides_of(0, len(model.sublayers))
        self._names = tuple(dict.fromkeys((*model.inputs, *self._sides, *model.targets)))
        self._depth = 0
        self._modules: tuple[nn.Module, ...] = ()
        self._stamped: list[tuple[int, int]] = []
        self._store: RowStore | None = None
        self._stamps = PrefixStamps("eval")
        self._prefix: PrefixCache | None = None
        self._gave_up = False

    def check_repeatable(self) -> None:
        """Refuse to cache samples that change from one read to the next."""
        if varies_between_reads(self._dataset, names=self._names, required=self._required):
            raise ValueError(
                "the training set gives other values each time a sample is read (random "
                "augmentation), so its activations cannot be cached; make it deterministic, or "
                "use cache=False"
            )

    def rows(self, epoch: int) -> Rows:
        """Return what gives stage 0 its micro-batches in an epoch."""

        def load(ids: Tensor) -> Batch:
            return self.read(self._dataset, ids, epoch)

        def fetch(ids: Tensor) -> Batch:
            self._stamp_anew_if_edited()
            return self._prefix.fetch(ids, load, depth=self._depth) if self._prefix else load(ids)

        return fetch

    def read(self, dataset: SizedDataset, ids: Tensor, epoch: int) -> Batch:
        """Read samples of any dataset that the model takes."""
        return read_samples(
            dataset,
            ids,
            names=self._names,
            required=self._required,
            seed=self._task.config.seed,
            epoch=epoch,
        )

    def run_layers(self, batch: Batch, first: int, last: int) -> Tensor:
        """Run frozen layers first..last-1, in eval mode."""
        model = self._task.model
        begin, end = model.first_active(first), model.first_active(last)
        with in_mode(model, self._modules, training=False):
            return model.run(batch, first=begin, last=end, hidden=batch[HIDDEN] if begin else None)

    def set_depth(self, num_frozen: int, *, on_stage_0: bool, use_cache: bool) -> None:
        """Serve another depth from now on; every rank of the world calls it.

        Args:
            num_frozen: frozen layers.
            on_stage_0: whether this rank holds the prefix.
            use_cache: whether reading rows is faster than computing them.
        """
        self._stamps.truncate(min(num_frozen, len(self._stamps)))
        self._depth, self._prefix = num_frozen, None
        self._modules = modules_of(
            self._task.model, range(self._task.model.first_active(num_frozen) if num_frozen else 0)
        )
        if num_frozen == 0:
            return
        use_cache = use_cache and not self._agree_to_give_up()
        if use_cache:
            self._match_store()
            if on_stage_0:
                self._stamp_layers()
        if on_stage_0:
            self._prefix = PrefixCache(
                self.run_layers,
                chunk_size=self._task.config.prefix_chunk,
                stamps=self._stamps,
                store=self._store if use_cache else None,
                device=self._world.device,
                keep=self._kept(),
            )

    def _agree_to_give_up(self) -> bool:
        """Tell whether a cache failed on any node, or was condemned there. Collective."""
        condemned = self._store is not None and self._store.is_condemned
        self._gave_up = any(gather_json(self._gave_up or condemned, group=self._world.group))
        return self._gave_up

    def _stamp_anew_if_edited(self) -> None:
        """Let no row hit that was made before the user changed the frozen layers' tensors."""
        if self._prefix is None or self._store is None:
            return
        versions = self._versions()
        if versions != self._stamped:
            _LOGGER.warning(
                "weights of frozen layers were changed between two steps: their activations are "
                "computed anew"
            )
            self._stamps.truncate(0)
            self._stamp_layers()

    def _versions(self) -> list[tuple[int, int]]:
        """Tell what the frozen layers' tensors hold apart from what they held before."""
        model = self._task.model
        indices = range(model.first_active(self._depth) if self._depth else 0)
        tensors = (t for index in indices for t in model.tensors(index).values())
        return [(t.data_ptr(), t._version) for t in tensors]

    def take_stats(self) -> CacheStats:
        """Return the cache's counts and times since the last call."""
        return self._prefix.take_stats() if self._prefix else CacheStats()

    def close(self) -> None:
        """Unmap the cache."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _kept(self) -> tuple[str, ...]:
        first = self.read(self._dataset, torch.tensor([0]), 0)
        return tuple(name for name in (*self._sides, *self._task.model.targets) if name in first)

    def _stamp_layers(self) -> None:
        model = self._task.model
        for layer in range(len(self._stamps), self._depth):
            self._stamps.extend(
                (name, tensor)
                for index in range(model.first_active(layer), model.first_active(layer + 1))
                for name, tensor in model.tensors(index).items()
            )
        self._stamped = self._versions()

    def _match_store(self) -> None:
        """Keep the store where rows of this depth look as its own do, else make another."""
        layout = self._layout()
        if self._store is not None and self._store.layout == layout:
            return
        self.close()
        limit = self._task.config.cache_limit_bytes
        num_rows = len(self._dataset)
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
        self._store = self._open_store(layout, num_rows)

    def _layout(self) -> RowLayout:
        """Find out what a row looks like on rank 0, which always holds the prefix."""
        fields: Any = None
        if self._world.is_main:
            batch = self.read(self._dataset, torch.zeros(1, dtype=torch.int64), 0)
            repeat = torch.zeros(self._task.config.prefix_chunk, dtype=torch.int64)
            chunk = {name: t[repeat].to(self._world.device) for name, t in batch.items()}
            with torch.no_grad():
                hidden = self.run_layers(chunk, 0, self._depth)
            if not torch.equal(hidden, hidden[:1].expand_as(hidden)):
                _LOGGER.info(
                    "this machine's kernels give a sample other last bits at another place of a "
                    "chunk: a cached run equals an uncached one to rounding, not bit by bit"
                )
            layout = rows_layout(batch, hidden[:1], self._kept())
            fields = [
                [f.name, list(f.shape), str(f.dtype).removeprefix("torch.")] for f in layout.fields
            ]
        fields = broadcast_json(fields, group=self._world.group)
        return RowLayout(
            tuple(
                RowField(name, tuple(shape), getattr(torch, dtype))
                for name, shape, dtype in fields
            )
        )

    def _open_store(self, layout: RowLayout, num_rows: int) -> RowStore | None:
        """Create the file in one process of the node and open it in the others.

        Where the file system is too small, training goes on without a cache, warned.
        """
        leader = self._world.rank % self._world.slots_per_node == 0
        store, path, failure = None, "", ""
        if leader:
            try:
                store = _create_store(Path(self._task.config.cache_folder), layout, num_rows)
                path = str(store.path)
            except OSError as error:
                failure = str(error)
        answers = gather_json([path, failure], group=self._world.group)
        if store is None and not any(text for _, text in answers):
            node = self._world.rank // self._world.slots_per_node
            try:
                store = RowStore.open(
                    answers[node * self._world.slots_per_node][0], layout, num_rows
                )
            except (OSError, ValueError) as error:
                failure = str(error)
        failures = [text for text in gather_json(failure, group=self._world.group) if text]
        # All have opened it, or given up.
        if leader and store is not None:
            store.unlink()
        if not failures:
            return store
        if self._world.is_main:
            _LOGGER.warning(
                "no cache: %s; the frozen prefix is computed at every step",
                failures[0],
            )
        self._gave_up = True
        if store is not None:
            store.close()
        return None


def _create_store(folder: Path, layout: RowLayout, num_rows: int) -> RowStore:
    """Create the file of a node's cache, without a name where such files can be made."""
    try:
        return RowStore.create_nameless(folder, layout, num_rows)
    except NamelessFilesError as error:
        _LOGGER.info("the cache's file has a name until all have opened it: %s", error)
        name = f"pipetransformer-{os.getpid()}-{time.time_ns()}"
        return RowStore.create(folder / name, layout, num_rows)
