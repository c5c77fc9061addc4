"""Feed stage 0 a data set's samples: through the workers, the frozen prefix and the cache."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor

from autocache import (
    ActivationStore,
    CacheStats,
    KeptRows,
    KeptStore,
    PrefixCache,
    RowContent,
    RowLayout,
    RowSets,
)
from autodp import broadcast_json, gather_json
from autopipe.profile import Profile
from pipetransformer.config import CollateFunction
from pipetransformer.feed.collation import Batch, Collation
from pipetransformer.feed.coming_fetches import Coming, Fetch, Follower, with_later
from pipetransformer.feed.frozen_prefix import FrozenPrefix
from pipetransformer.feed.kept_origin import about_rows, data_origin, machine_origin
from pipetransformer.feed.kept_proof import KeptProof
from pipetransformer.feed.node_store import (
    behind,
    check_device,
    make_store,
    share_kept,
    warn_of_others,
)
from pipetransformer.feed.random_numbers import own_random_numbers
from pipetransformer.feed.row_block import RowBlock, hit_together
from pipetransformer.feed.row_format import RowFormat
from pipetransformer.feed.samples import Samples, SizedDataset
from pipetransformer.feed.workers import ForeseenSamples, Request
from pipetransformer.model import EntryNames, Task, names_of
from pipetransformer.processes import World

_LOGGER = logging.getLogger(__name__)

# Fewer bytes than these are read faster than a thread hands them over.
_LEAST_AHEAD_BYTES = 1 << 20
# Fetches ahead that may fill a chunk of the prefix, and whose rows a disk is asked for.
_NUM_LATER = 8
_IN_MEMORY = Path("/dev/shm")
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

    Attributes:
        copies: whether a batch stays what it is; else the fetch after the next may change it.
        advice: what to do where samples vary.
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
    ) -> None:
        self.prefix, self.copies, self.is_undisturbed = prefix, False, False
        self.advice = (
            "The Trainer's cache_views= keeps a few fixed views of each sample, its cache=False "
            "says that none are to be kept, its eval_collate_fn= how evaluations' batches are made"
        )
        self.dataset = samples.dataset
        self.samples, self._task, self._world = samples, prefix.task, world
        self._to_come = to_come
        self._coming: Follower[Fetch] = Follower(lambda: with_later(to_come()))
        config = prefix.task.config
        check_device(config, world.device)
        self._foreseen = ForeseenSamples(
            self.samples,
            self._requests,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor,
            pin_memory=config.pin_memory and world.device.type == "cuda",
            timeout_s=config.setup_timeout_s,
        )
        self._chunk_size = config.prefix_chunk_of(world.size, on_gpu=world.device.type == "cuda")
        self._num_views = keeps
        self._generation = self._epoch = -1  # No prefix is followed, and no epoch compared, yet.
        self._rows = RowFormat(prefix, world, self.samples, chunk_size=self._chunk_size)
        self._store: ActivationStore | None = None
        self._cache: PrefixCache | None = None
        self._gave_up = keeps == 0
        # Digests of this run's samples, to compare rows of other runs with.
        self._known: Tensor | None = None
        self._kept: KeptStore | None = None
        self._is_in_memory = Path(config.cache_folder) == _IN_MEMORY
        # Samples whose rows are on their way from the disk.
        self._expected = torch.empty(0, dtype=torch.int64)
        self._block: RowBlock | None = None
        self._may_all_hit, self._stats = True, CacheStats()

    def unused_columns(self) -> tuple[str, ...]:
        """Name the entries of the first sample that the model does not take."""
        return self.samples.collation.unused(self.dataset[0])

    def warn_of_padding(self) -> None:
        """Warn where losses depend on how many replicas there are."""
        if self._world.is_main and self._world.size > 1 and self._rows.padding_may_matter():
            _LOGGER.warning(
                "collate_fn pads each replica's samples of a step to their longest, and outputs "
                "may depend on that: then losses depend on the number of replicas. Pad all "
                "samples to one length"
            )

    @property
    def may_cache(self) -> bool:
        """Tell whether rows are kept: asked for, and not given up."""
        return self._task.config.cache and not self._gave_up

    def look_for_randomness(self) -> None:
        """Give up the cache, with a warning, where a sample has no fixed value. Collective.

        It may change from read to read, or with the samples of its batch.

        Raises:
            ValueError: on every rank: cache_views was set.
        """
        views = self._task.config.cache_views is not None
        varies = self.samples.vary_between_reads(same_seed=views)
        # Samples that vary anyway would look mixed, too.
        told = varies, not varies and self.samples.mix_in_batches()
        varies, mix = map(any, zip(*gather_json(told, group=self._world.group), strict=True))
        if not varies and not mix:
            return
        if views:
            raise ValueError(
                "collate_fn gives samples other values together than one by one, so that there "
                "are no fixed views of them; leave cache_views= out"
                if mix
                else "the training set gives other values each time a sample is read, whatever "
                "the seed, so that there are no fixed views of it; draw random numbers from "
                "torch, numpy or random, or leave cache_views= out"
            )
        self._gave_up = True
        if self._world.is_main:
            _LOGGER.warning(
                "no cache: collate_fn gives samples other values together than one by one (it "
                "mixes those of a batch); the frozen prefix is computed at every step. %s"
                if mix
                else "no cache: the training set gives other values each time a sample is read "
                "(random augmentation); the frozen prefix is computed at every step. %s",
                self.advice,
            )

    def give_up(self) -> None:
        """Keep no rows from now on."""
        self._gave_up = True

    def most_bytes(self, profile: Profile, measured: Batch) -> int:
        """Estimate the most that a node's cache will take, whatever freezes.

        Args:
            profile: knows the bytes of a sample's activations.
            measured: the batch that the profile was measured on.
        """
        model, config = self._task.model, self._task.config
        row_bytes = max(profile.prefix_bytes(num + 1) for num in range(model.num_layers))
        row_bytes *= self._rows.longest_over(measured)
        if config.cache_dtype is not None:
            weights = next(model.model.parameters()).dtype
            computed = self._task.computes_in or weights
            row_bytes *= getattr(torch, config.cache_dtype).itemsize / computed.itemsize
        needed = int(row_bytes * self._num_views * len(self.dataset))
        return min(needed, config.cache_limit_bytes or needed)

    def read(self, ids: Tensor) -> Batch:
        """Read samples to look at; ids may exceed their number."""
        return self.samples.probe((ids % len(self.dataset)).tolist())

    def read_apart(self, ids: Tensor) -> Batch:
        """Read samples from all over the data set, which may be sorted by length."""
        return self.read(ids * max(1, len(self.dataset) // self._task.config.global_batch_size))

    def look(self, ids: Tensor, *, epoch: int) -> Batch:
        return self.samples.probe(ids.tolist(), view=self.view(epoch))

    def rows(self, epoch: int, *, is_last: bool = False) -> Rows:
        """Return the samples as they are in an epoch.

        Args:
            is_last: whether no sample is asked for again in the view that it has now.
        """
        keeps = self._task.config.cache_keep or not is_last
        return EpochRows(self, epoch, keeps=keeps)

    def computed_rows(self, ids: Tensor, *, rounded: bool) -> Batch:
        """Compute rows of samples, rounded to `cache_dtype` or not; none are read or stored."""
        content = self._rows.unstored_content()
        cache = self._cache_over(None, content if rounded else replace(content, dtype=None))
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
        use_cache = prefix.uses_cache and not self._agree_to_give_up()
        if use_cache:
            self._match_store()
        if prefix.depth and prefix.on_stage_0:
            kept = self._store is not None and use_cache
            if kept:
                self._cache = self._cache_over(self._store, self._rows.content, self._known)
            else:
                self._cache = self._cache_over(None, self._rows.unstored_content())

    def _cache_over(
        self, store: ActivationStore | None, content: RowContent, known: Tensor | None = None
    ) -> PrefixCache:
        return PrefixCache(
            self.prefix.run_layers,
            chunk_size=self._chunk_size,
            store=store,
            stamps=self.prefix.stamps,
            device=self._world.device,
            content=content,
            known=known,
        )

    @property
    def cache_bytes(self) -> int:
        """Return what this node's cache takes now."""
        return self._store.num_bytes if self._store is not None else 0

    def take_stats(self) -> CacheStats:
        """Return the cache's counts and times since the last call."""
        stats, self._stats = self._stats, CacheStats()
        return stats + self._cache.take_stats() if self._cache else stats

    def close(self) -> None:
        """Unmap the cache, and end the workers."""
        self._foreseen.close()
        self._drop_store()

    def end_workers(self) -> None:
        """End the workers; the next that read see the data set as it is then."""
        self._foreseen.close()

    def _drop_store(self) -> None:
        self._close_cache()
        if self._store is not None:
            self._store.close()
            self._store = self._kept = None

    def fetch(self, ids: Tensor, *, epoch: int, keeps: bool) -> Batch:
        """See `Rows.fetch`."""
        if self._cache is None:
            return self._load(ids, epoch)
        if self._uses_store:
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
            return self._handed_over(block, *block.take())
        return self._fetch_one(self._cache, coming, keeps=keeps)

    def take_read(self, ids: Tensor, *, epoch: int) -> Batch | None:
        """Return what an earlier fetch has read for this one; None for nothing of use."""
        if self._block is None:
            return None
        self.prefix.stamp_anew_if_edited()
        return self._take_block(ids, epoch)

    def _take_block(self, ids: Tensor, epoch: int) -> Batch | None:
        block, self._block = self._block, None
        if block is None or not block.fits(ids, epoch, self.prefix.stamps):
            return None
        if self._store is None or self._store.is_condemned():
            return None
        batch, stats = block.take()
        changed = None if self.is_undisturbed else self._rows.content.changed
        if changed is not None and bool(changed(ids, batch).any()):
            return None  # A label was corrected since the read.
        return self._handed_over(block, batch, stats)

    def _handed_over(self, block: RowBlock, batch: Batch, stats: CacheStats) -> Batch:
        """Count what was taken of a block, and hold what is left of it."""
        self._block = block if block.has_more else None
        self._stats += stats
        return batch

    def _read_block(self, coming: Fetch) -> RowBlock | None:
        """Read the rows of several fetches at once where that is of use, and they are there."""
        store, cache, epoch = self._store, self._cache, coming.epoch
        if store is None or cache is None or not self._uses_store or not self._may_all_hit:
            return None
        if self._reads_ahead(store, coming.ids):
            return None
        if self._rows.content.checks_every:
            return None  # Each sample is read, and those of many steps may be many bytes.
        on_gpu = self._world.device.type == "cuda"
        steps = hit_together(
            (coming.ids, *coming.later),
            lambda ids: cache.hits(self._row_ids(ids, epoch), depth=self.prefix.depth),
            most_rows=_MOST_BLOCK_BYTES[on_gpu] // store.layout.row_bytes,
        )
        if len(steps) < 2:
            return None
        self._coming.skip(len(steps) - 1)
        ids = torch.cat(steps)
        batch, stats = self._fetch_rows(
            cache,
            ids,
            partial(self._load_by_steps, steps=steps, epoch=epoch),
            epoch=epoch,
            expected=coming.later_ids(len(coming.later))[len(ids) - len(coming.ids) :],
        )
        positions, stamps = self._rows.content.positions, tuple(self.prefix.stamps)
        return RowBlock(epoch, stamps, steps, batch, stats, positions=positions)

    def _fetch_one(self, cache: PrefixCache, coming: Fetch, *, keeps: bool) -> Batch:
        """Fetch one step's samples; those to come may be computed with them."""
        ids, epoch, later = coming.ids, coming.epoch, coming.later_ids(_NUM_LATER)
        batch, stats = self._fetch_rows(
            cache,
            ids,
            partial(self._load, epoch=epoch),
            epoch=epoch,
            expected=later,
            keeps=keeps,
            later=self._later(later, epoch),
        )
        self._stats += stats
        self._may_all_hit = stats.hits == len(ids)
        return batch

    def _fetch_rows(
        self,
        cache: PrefixCache,
        ids: Tensor,
        load: Callable[[Tensor], Batch],
        *,
        epoch: int,
        expected: Tensor,
        **options: Any,
    ) -> tuple[Batch, CacheStats]:
        """Fetch samples' rows from the cache; return what that came to, too.

        Args:
            expected: samples of the fetches to come in the epoch.
            options: of `PrefixCache.fetch`.
        """
        if self._uses_store:
            self._prove_others(ids, epoch)
            self._expect(expected, epoch)
        self._stats += cache.take_stats()
        rows = self._row_ids(ids, epoch)
        batch = cache.fetch(ids, load, depth=self.prefix.depth, row_ids=rows, **options)
        if self.copies:
            batch = {name: entry.clone() for name, entry in batch.items()}
        if self._store is not None and self._world.size > 1 and not len(expected):
            # In the next epoch other processes of the node may be given these samples.
            self._store.settle()
        return batch, cache.take_stats()

    def _expect(self, ids: Tensor, epoch: int) -> None:
        """Have the disk begin to read rows that are asked for later."""
        if self._store is not None and not self._is_in_memory:
            self._store.expect(self._row_ids(ids[~torch.isin(ids, self._expected)], epoch))
            self._expected = ids

    def _load(self, ids: Tensor, epoch: int) -> Batch:
        batch = self._foreseen.read(ids.tolist(), view=self.view(epoch))
        if self._uses_store:
            self._rows.refuse_others(batch)
            self._rows.targets.compare(ids, batch)
        return batch

    def _load_by_steps(self, ids: Tensor, *, steps: Sequence[Tensor], epoch: int) -> Batch:
        """Load samples of a block; workers have read those of each step together."""
        if not self._task.config.num_workers:
            return self._load(ids, epoch)
        parts, left = [], ids
        for step in steps:
            own = torch.isin(left, step)
            if bool(own.any()):
                parts.append(self._load(left[own], epoch))
                left = left[~own]
        positions = self._rows.content.positions
        if positions is not None:
            most = max(part[positions.mask].shape[1] for part in parts)
            parts = [positions.bring(part, most) for part in parts]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def read_ahead(self, ids: Tensor, *, epoch: int) -> None:
        if self._cache is None or self._store is None or not self._uses_store:
            return
        if self._reads_ahead(self._store, ids):
            self._cache.read_ahead(self._row_ids(ids, epoch), depth=self.prefix.depth)

    def _reads_ahead(self, store: ActivationStore, ids: Tensor) -> bool:
        """Return whether a thread reads rows of so many samples beside a step."""
        is_slow = len(ids) * store.layout.row_bytes >= _LEAST_AHEAD_BYTES
        return store.reads_ahead and (is_slow or self._world.device.type == "cuda")

    def _row_ids(self, ids: Tensor, epoch: int, *, num_rows: int | None = None) -> Tensor:
        """Return samples' rows; where the store has fewer rows, those that have one are spread."""
        if num_rows is None:
            num_rows = self._store.num_rows if self._store is not None else 0
        num_all = self._num_views * len(self.dataset)
        wanted = ids + self.view(epoch) * len(self.dataset) if self._num_views > 1 else ids
        if num_rows in (0, num_all):
            return wanted
        # A sample has a row if its share of all rows reaches the next whole number. The number
        # one beyond the last row says that it has none.
        slots = wanted * num_rows // num_all
        return slots.where((wanted + 1) * num_rows // num_all > slots, num_rows)

    def _later(self, ids: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return later samples that may be collated together with others, and their rows."""
        # Of a collate_fn it is known only with `positions` how a sample depends on its batch.
        collation = self.samples.collation
        knows_padding = self._rows.content.positions is not None
        is_apart = len(collation.padded_together(len(self.dataset))) > 1
        if is_apart or (collation.function is not None and not knows_padding):
            ids = ids[:0]
        return ids, self._row_ids(ids, epoch)

    def view(self, epoch: int) -> int:
        """Return the view of each sample that an epoch has."""
        views = self._task.config.cache_views
        return epoch if views is None else epoch % views  # Without views each epoch is its own.

    def _requests(self) -> Iterator[Request]:
        """Yield what the dataset will be asked for, fetch by fetch."""
        coming = iter(self._to_come())
        if self._cache is None:
            for epoch, ids in coming:
                if len(ids):
                    yield tuple(ids.tolist()), self.view(epoch)
            return
        fetches, behind = itertools.tee(with_later(coming))
        samples = (
            (
                (f.ids, self._row_ids(f.ids, f.epoch)),
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
                yield tuple(wanted.tolist()), self.view(epoch)

    @property
    def _uses_store(self) -> bool:
        return self._store is not None and self.prefix.uses_cache and not self._gave_up

    def _close_cache(self) -> None:
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _agree_to_give_up(self) -> bool:
        """Tell whether any node's cache was given up, or is condemned. Collective."""
        condemned = self._store is not None and self._store.is_condemned()
        if self._task.config.cache_keep:
            # Before the ranks meet: a set makes room for the next only when nobody uses it.
            self._drop_store()
        self._gave_up = any(gather_json(self._gave_up or condemned, group=self._world.group))
        return self._gave_up

    def _match_store(self) -> None:
        """Make another store if rows of this depth have another layout, or a set of their own."""
        layout = self._rows.agree_on_layout()
        if self._store is not None and self._store.layout == layout:
            return
        self._drop_store()
        if layout is None:
            self._gave_up = True
            return
        limit = self._task.config.cache_limit_bytes
        num_rows = self._num_views * len(self.dataset)
        if self._task.config.cache_keep:
            self._store = self._kept_store(layout, num_rows)
            self._gave_up = self._store is None
            return
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
        self._store = make_store(self._world, self._task.config, layout, num_rows)
        self._gave_up = self._store is None

    def _kept_store(self, layout: RowLayout, num_rows: int) -> ActivationStore | None:
        """Open the rows that are kept for this prefix, or make room for them. Collective."""
        config, world = self._task.config, self._world
        found: Any = None
        if world.is_main:  # Rank 0 always holds the prefix.
            content, num_views = self._rows.content, self._num_views
            data = data_origin(self.samples, content, config, num_views=num_views)
            found = [data, self.prefix.stamps[-1], secrets.randbits(63)]
        data, stamp, run = broadcast_json(found, group=world.group)
        kept = KeptRows(
            RowSets(Path(config.cache_folder), limit_bytes=config.cache_limit_bytes),
            {**data, **machine_origin(world.device, chunk_size=self._chunk_size)},
            about_rows(self._task.model, self.prefix.depth, len(self.dataset)),
            run,
        )
        store = share_kept(world, kept, layout, num_rows, stamp=stamp, is_right=self._proves_right)
        if store is None:
            return None
        self._kept = store
        is_told = config.cache_fingerprint is not None
        if not is_told and (self._known is None or len(self._known) != store.num_rows):
            self._known = torch.zeros(store.num_rows, dtype=torch.int64)
        return behind(world, store)

    def _proves_right(self, store: KeptStore) -> bool:
        """Return whether rows that were found are what this run computes, as far as a rank can."""
        if not self.prefix.on_stage_0:
            return True
        ids = torch.arange(len(self.dataset))
        rows = self._row_ids(ids, 0, num_rows=store.num_rows)
        return self._proof(epoch=0).holds(store, ids, rows)

    def _proof(self, *, epoch: int) -> KeptProof:
        stamps, content, view = self.prefix.stamps, self._rows.content, self.view(epoch)
        return KeptProof(self._cache_over, stamps, self.samples, content, view)

    def _prove_others(self, ids: Tensor, epoch: int) -> None:
        """Read no row of another run before some of its rows were computed again."""
        store = self._kept
        if store is None or store.is_condemned():
            return
        if not self._proof(epoch=epoch).holds(store, ids, self._row_ids(ids, epoch)):
            warn_of_others(store)


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
