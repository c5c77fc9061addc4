"""Feed stage 0 a data set's samples: through the workers, the frozen prefix and the cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, final

import torch
from torch import Tensor

from autocache import DIGEST, CacheStats, PrefixCache
from pipetransformer.config import CollateFunction
from pipetransformer.feed.collation import Batch, Collation
from pipetransformer.feed.fetch_forecast import Coming, Fetch, Follower, with_later
from pipetransformer.feed.frozen_prefix import FrozenPrefix
from pipetransformer.feed.random_numbers import own_random_numbers
from pipetransformer.feed.row_block import RowBlock, hit_together
from pipetransformer.feed.row_keeper import RowKeeper
from pipetransformer.feed.samples import Samples, SizedDataset
from pipetransformer.feed.workers import ForeseenSamples, Request
from pipetransformer.model import EntryNames, Task, names_of
from pipetransformer.processes import World

# Fetches ahead that may fill a chunk of the prefix, and whose rows a disk is asked for.
_NUM_LATER = 8
_MOST_BLOCK_BYTES = {False: 4 << 20, True: 128 << 20}
"""What is read at once, in host memory and on a GPU."""


class Rows(Protocol):
    """Give samples to a stage.

    Behind a frozen prefix the entry "hidden", their activations, takes the inputs' place.
    """

    def fetch(self, ids: Tensor, /) -> Batch:
        """Return the entries of (B,) samples, (B, ...) each."""

    def look(self, ids: Tensor, /) -> Batch:
        """Read samples from the data set once more."""

    def read_ahead(self, ids: Tensor, /) -> None:
        """Prepare for the fetch that comes next."""

    def take_stats(self) -> CacheStats:
        """Return the cache's counts and times since the last call."""


@final
class EpochRows:
    """Give a feed's samples as they are in one epoch; see `SampleFeed.rows`."""

    def __init__(self, feed: SampleFeed, epoch: int, *, keeps: bool) -> None:
        self._feed, self._epoch, self._keeps = feed, epoch, keeps
        self.take_stats = feed.take_stats

    def fetch(self, ids: Tensor) -> Batch:
        return self._feed.fetch(ids, epoch=self._epoch, keeps=self._keeps)

    def look(self, ids: Tensor) -> Batch:
        return self._feed.look(ids, epoch=self._epoch)

    def read_ahead(self, ids: Tensor) -> None:
        self._feed.read_ahead(ids, epoch=self._epoch)


@final
class ComputedRows:
    """Compute a feed's rows, rounded to `cache_dtype` or not; none are read or stored."""

    def __init__(self, feed: SampleFeed, *, rounded: bool) -> None:
        self._feed, self._rounded = feed, rounded

    def fetch(self, ids: Tensor) -> Batch:
        return self._feed.computed_rows(ids, rounded=self._rounded)

    look = fetch

    def read_ahead(self, ids: Tensor) -> None:
        """Do nothing: what is computed is not read."""

    def take_stats(self) -> CacheStats:
        return CacheStats()


class SampleFeed:
    """Give a data set's samples at the current depth of the frozen prefix.

    Args:
        to_come: what fetches will ask for; workers read it ahead.
        keeps: how many views of each sample a cache has rows for; 0 where each is asked for once.
        keeps_places: says whether replicas read the same samples in every epoch.

    Attributes:
        copies: whether a batch stays what it is; else the fetch after the next may change it.
        keeper: of the rows.
        is_undisturbed: whether nothing of the user's runs between two fetches, so that samples
            need not be compared right before their step.
    """

    def __init__(
        self,
        prefix: FrozenPrefix,
        world: World,
        samples: Samples,
        *,
        to_come: Coming = tuple,
        keeps: int = 1,
        keeps_places: Callable[[], bool] = lambda: False,
    ) -> None:
        self.prefix, self.copies, self.is_undisturbed = prefix, False, False
        self.dataset = samples.dataset
        self.samples, self._task, self._world = samples, prefix.task, world
        self._to_come = to_come
        self._coming: Follower[Fetch] = Follower(lambda: with_later(to_come()))
        config = prefix.task.config
        self._foreseen = ForeseenSamples(
            self.samples,
            self._requests,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor,
            pin_memory=config.pin_memory and world.device.type == "cuda",
            timeout_s=config.setup_timeout_s,
        )
        self.keeper = RowKeeper(prefix, world, samples, num_views=keeps, keeps_places=keeps_places)
        self._generation = self._epoch = -1  # No prefix is followed, and no epoch compared, yet.
        self._cache: PrefixCache | None = None
        self._block: RowBlock | None = None
        self._may_all_hit, self._stats = True, CacheStats()

    def unused_columns(self) -> tuple[str, ...]:
        """Name the entries of the first sample that the model does not take."""
        return self.samples.collation.unused(self.dataset[0])

    def read(self, ids: Tensor) -> Batch:
        """Read samples to look at; ids may exceed their number."""
        return self.samples.probe((ids % len(self.dataset)).tolist())

    def read_apart(self, ids: Tensor) -> Batch:
        """Read samples from all over the data set, which may be sorted by length."""
        return self.read(ids * max(1, len(self.dataset) // self._task.config.global_batch_size))

    def look(self, ids: Tensor, *, epoch: int) -> Batch:
        return self.samples.probe(ids.tolist(), view=self.keeper.view(epoch))

    def rows(self, epoch: int, *, is_last: bool = False) -> Rows:
        """Return the samples as they are in an epoch.

        Args:
            is_last: whether no sample is asked for again in the view that it has now.
        """
        keeps = self._task.config.cache_keep or not is_last
        return EpochRows(self, epoch, keeps=keeps)

    def computed_rows(self, ids: Tensor, *, rounded: bool) -> Batch:
        """Compute rows of samples, rounded to `cache_dtype` or not; none are read or stored."""
        content = self.keeper.format.unstored_content()
        cache = self.keeper.cache_over(None, content if rounded else replace(content, dtype=None))
        return cache.fetch(
            ids, lambda wanted: self.samples.probe(wanted.tolist()), depth=self.prefix.depth
        )

    def follow_prefix(self) -> None:
        """Serve the prefix's depth from now on. Collective."""
        prefix = self.prefix
        # After a transition other ranks may train these samples.
        self._foreseen.forget()
        self._coming.forget()
        self._block = None
        if self._generation == prefix.generation:
            return
        self._generation = prefix.generation
        self._close_cache()
        keeper = self.keeper
        use_cache = prefix.uses_cache and not keeper.agree_to_give_up()
        if use_cache:
            keeper.match_store()
        if prefix.depth and prefix.on_stage_0:
            store = keeper.store if use_cache else None
            content = keeper.format.unstored_content() if store is None else keeper.format.content
            known = None if store is None else keeper.known
            self._cache = keeper.cache_over(store, content, known)

    def take_stats(self) -> CacheStats:
        """Return the cache's counts and times since the last call."""
        stats, self._stats = self._stats, CacheStats()
        return stats + self._cache.take_stats() if self._cache else stats

    def num_lacking(self) -> int:
        """Return how many samples, in all views, have no row."""
        ids, num_views = torch.arange(len(self.dataset)), self._task.config.cache_views or 1
        store = self.keeper.store
        if self._cache is None or store is None or store.is_condemned():
            return num_views * len(ids)
        rows = torch.cat([self.keeper.row_ids(ids, view) for view in range(num_views)])
        return int((~self._cache.hits(rows, depth=self.prefix.depth)).sum())

    def close(self) -> None:
        """Unmap the cache, and end the workers."""
        self._foreseen.close()
        self._close_cache()
        self.keeper.drop()

    def end_workers(self) -> None:
        """End the workers; the next that read see the data set as it is then."""
        self._foreseen.close()

    def compare_weights(self) -> None:
        """Have the next fetch compare values of frozen weights, as an epoch's first one does."""
        self._epoch = -1

    def fetch(self, ids: Tensor, *, epoch: int, keeps: bool) -> Batch:
        """See `Rows.fetch`."""
        if self._cache is None:
            return self._load(ids, epoch)
        if self.keeper.uses_store:
            # Once an epoch values are compared, too, which reads all weights of the prefix.
            self.prefix.stamp_anew_if_edited(compares_values=epoch != self._epoch)
            self._may_all_hit |= epoch != self._epoch
            self._epoch = epoch
        batch = self._take_block(ids, epoch)
        if batch is not None:
            return batch
        coming = self._coming.next_one(lambda f: f.epoch == epoch and torch.equal(f.ids, ids))
        coming = coming or Fetch(epoch, ids)
        if (block := self._read_block(coming)) is not None:
            batch, stats = block.take()
            if self._is_current(self._cache, ids, epoch, batch):
                return self._handed_over(block, batch, stats)
        return self._fetch_one(self._cache, coming, keeps=keeps)

    def take_read(self, ids: Tensor, *, epoch: int) -> Batch | None:
        """Return what an earlier fetch has read for this one; None for nothing of use."""
        if self._block is None:
            return None
        self.prefix.stamp_anew_if_edited()
        if not self.keeper.format.content.checks_every:
            return self._take_block(ids, epoch)
        with own_random_numbers(self._world.device):  # Samples are read, to be compared.
            return self._take_block(ids, epoch)

    def _take_block(self, ids: Tensor, epoch: int) -> Batch | None:
        block, self._block, cache = self._block, None, self._cache
        if block is None or cache is None or not block.fits(ids, epoch, self.prefix.stamps):
            return None
        if self.keeper.store is None or self.keeper.store.is_condemned():
            return None
        batch, stats = block.take()
        changed = None if self.is_undisturbed else self.keeper.format.content.changed
        if changed is not None and bool(changed(ids, batch).any()):
            return None  # A label was corrected since the read.
        if not self._is_current(cache, ids, epoch, batch):
            return None
        return self._handed_over(block, batch, stats)

    def _is_current(self, cache: PrefixCache, ids: Tensor, epoch: int, batch: Batch) -> bool:
        """Take digests out of a step's rows, and compare its samples, where all are compared."""
        digests = batch.pop(DIGEST, None)
        return digests is None or cache.holds(ids, digests, partial(self._load, epoch=epoch))

    def _handed_over(self, block: RowBlock, batch: Batch, stats: CacheStats) -> Batch:
        """Count what was taken of a block, and hold what is left of it."""
        self._block = block if block.has_more else None
        self._stats += stats
        return batch

    def _read_block(self, coming: Fetch) -> RowBlock | None:
        """Read the rows of several fetches at once where that is of use, and they are there."""
        store, cache, epoch = self.keeper.store, self._cache, coming.epoch
        if store is None or cache is None or not self.keeper.uses_store or not self._may_all_hit:
            return None
        on_gpu = self._world.device.type == "cuda"
        if (on_gpu or not self.copies) and self.keeper.reads_ahead(store, coming.ids):
            return None
        content = self.keeper.format.content
        if content.checks_every and self.keeper.known is not None:
            return None  # Rows of other runs are compared before they are used.
        steps = hit_together(
            (coming.ids, *coming.later),
            lambda ids: cache.hits(self.keeper.row_ids(ids, epoch), depth=self.prefix.depth),
            most_rows=_MOST_BLOCK_BYTES[on_gpu] // store.layout.row_bytes,
        )
        if len(steps) < 2:
            return None
        ids, depth = torch.cat(steps), self.prefix.depth
        load = partial(self._load_by_steps, steps=steps, epoch=epoch)
        expected = coming.later_ids(len(coming.later))[len(ids) - len(coming.ids) :]
        rows = self._begin_fetch(cache, ids, epoch, expected)
        if content.checks_every:
            # Each step reads its own samples, to compare: those of many steps are many bytes.
            hits = cache.read_hits(ids, rows, depth=depth)
        else:
            hits = cache.fetch(ids, load, depth=depth, row_ids=rows)
        if hits is None:
            return None
        batch, stats = self._end_fetch(cache, hits, expected)
        self._coming.skip(len(steps) - 1)
        stamps = tuple(self.prefix.stamps)
        return RowBlock(epoch, stamps, steps, batch, stats, positions=content.positions)

    def _fetch_one(self, cache: PrefixCache, coming: Fetch, *, keeps: bool) -> Batch:
        """Fetch one step's samples; those to come may be computed with them."""
        ids, epoch, later = coming.ids, coming.epoch, coming.later_ids(_NUM_LATER)
        rows = self._begin_fetch(cache, ids, epoch, later)
        batch = cache.fetch(
            ids,
            partial(self._load, epoch=epoch),
            depth=self.prefix.depth,
            row_ids=rows,
            keeps=keeps,
            later=self._later(later, epoch),
        )
        batch, stats = self._end_fetch(cache, batch, later)
        self._stats += stats
        self._may_all_hit = stats.hits == len(ids)
        beside_gpu = self._world.device.type == "cuda"
        # A Trainer says itself what comes next, a loop does not. On CPUs its step needs the cores.
        if self.copies and beside_gpu and self._may_all_hit and coming.later:
            self.read_ahead(coming.later[0], epoch=epoch)
        return batch

    def _begin_fetch(
        self, cache: PrefixCache, ids: Tensor, epoch: int, expected: Tensor
    ) -> Tensor:
        """Return samples' rows; `expected` are samples of later fetches in the epoch."""
        if self.keeper.uses_store:
            self.keeper.prove_others(ids, epoch)
            self.keeper.expect(expected, epoch)
        self._stats += cache.take_stats()
        return self.keeper.row_ids(ids, epoch)

    def _end_fetch(
        self, cache: PrefixCache, batch: Batch, expected: Tensor
    ) -> tuple[Batch, CacheStats]:
        """Return a batch that stays what it is where that is asked for, and what it came to."""
        if self.copies:
            batch = {name: entry.clone() for name, entry in batch.items()}
        if self.keeper.store is not None and self._world.size > 1 and not len(expected):
            # In the next epoch other processes of the node may be given these samples.
            self.keeper.store.settle()
        return batch, cache.take_stats()

    def _load(self, ids: Tensor, epoch: int) -> Batch:
        batch = self._foreseen.read(ids.tolist(), view=self.keeper.view(epoch))
        if self.keeper.uses_store:
            self.keeper.format.refuse_others(batch)
            self.keeper.format.targets.compare(ids, batch)
        return batch

    def _load_by_steps(self, ids: Tensor, *, steps: Sequence[Tensor], epoch: int) -> Batch:
        """Load samples of a block; workers have read those of each step together."""
        if not self._task.config.num_workers:
            return self._load(ids, epoch)
        parts, left = [], ids
        for step in steps:
            of_step = torch.isin(left, step)
            if bool(of_step.any()):
                parts.append(self._load(left[of_step], epoch))
                left = left[~of_step]
        positions = self.keeper.format.content.positions
        if positions is not None:
            most = max(part[positions.mask].shape[1] for part in parts)
            parts = [positions.resize(part, most) for part in parts]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def read_ahead(self, ids: Tensor, *, epoch: int) -> None:
        if self._cache is None or self.keeper.store is None or not self.keeper.uses_store:
            return
        if self.keeper.reads_ahead(self.keeper.store, ids):
            self._cache.read_ahead(self.keeper.row_ids(ids, epoch), depth=self.prefix.depth)

    def _later(self, ids: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return later samples that may be collated together with others, and their rows."""
        # Of a collate_fn it is known only with `positions` how a sample depends on its batch.
        collation = self.samples.collation
        knows_padding = self.keeper.format.content.positions is not None
        is_apart = len(collation.padded_together(len(self.dataset))) > 1
        if is_apart or (collation.function is not None and not knows_padding):
            ids = ids[:0]
        return ids, self.keeper.row_ids(ids, epoch)

    def _requests(self) -> Iterator[Request]:
        """Yield what the dataset will be asked for, fetch by fetch."""
        coming = iter(self._to_come())
        if self._cache is None:
            for epoch, ids in coming:
                if len(ids):
                    yield tuple(ids.tolist()), self.keeper.view(epoch)
            return
        fetches, behind = itertools.tee(with_later(coming))
        samples = (
            (
                (f.ids, self.keeper.row_ids(f.ids, f.epoch)),
                self._later(f.later_ids(_NUM_LATER), f.epoch),
            )
            for f in fetches
        )
        foreseen = self._cache.foresee(samples, depth=self.prefix.depth)
        writing = -1
        for fetch, (wanted, writes) in zip(behind, foreseen, strict=True):
            epoch = fetch.epoch
            if writing not in (-1, epoch):
                return  # What the next epoch will lack depends on what this one writes.
            writing = epoch if writes else writing
            if len(wanted):
                yield tuple(wanted.tolist()), self.keeper.view(epoch)

    def _close_cache(self) -> None:
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def first_samples(
    dataset: SizedDataset,
    names: EntryNames,
    *,
    collate_fn: CollateFunction | None,
    drops_unknown: bool,
    seed: int,
) -> Batch:
    """Read two samples, by which a model is described that is known by no adapter.

    Args:
        names: what its forward takes, if the data set has it.
    """
    collation = Collation(
        tuple(dict.fromkeys((*names.inputs, *names.targets, "labels"))),
        inputs=names.inputs[:1],
        targets=names.targets,
        needs_targets=False,
        function=collate_fn,
        drops_unknown=drops_unknown,
    )
    with own_random_numbers(torch.device("cpu")):  # Reading a sample seeds all generators.
        return Samples(dataset, collation, seed).probe([0, len(dataset) // 2])


def samples_of(
    task: Task, dataset: SizedDataset, *, needs_targets: bool = True, evaluates: bool = False
) -> Samples:
    """Return what reads a data set as a task's model takes it.

    Args:
        evaluates: whether `eval_collate_fn` makes the batches, where it is set.
    """
    model, config = task.model, task.config
    names = (*model.inputs, *model.sides_of(0, len(model.sublayers)), *model.targets)
    takes = names_of(model.model).inputs if model.is_recorded else ()
    collation = Collation(
        tuple(dict.fromkeys(names)),
        inputs=model.inputs[:1],
        targets=model.targets,
        needs_targets=needs_targets,
        function=(evaluates and config.eval_collate_fn) or config.collate_fn,
        drops_unknown=config.remove_unused_columns,
        unseen=tuple(name for name in takes if name not in names),
    )
    return Samples(dataset, collation, config.seed)
