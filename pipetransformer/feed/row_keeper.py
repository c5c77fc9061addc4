"""Keep the rows of a data set's samples: in which store, and whether at all."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from autocache import (
    ActivationStore,
    DeviceStore,
    KeptRows,
    KeptStore,
    PrefixCache,
    RowContent,
    RowLayout,
    RowSets,
    TieredStore,
    device_bytes,
    spread_rows,
)
from autodp import broadcast_json, gather_json
from autopipe.profile import Profile
from autopipe.trace import as_bytes
from pipetransformer.feed.collation import Batch
from pipetransformer.feed.frozen_prefix import FrozenPrefix
from pipetransformer.feed.node_store import (
    check_device,
    make_store,
    rows_in_all,
    share_kept,
    warn_of_no_cache,
    warn_of_others,
    write_behind,
)
from pipetransformer.feed.row_format import RowFormat
from pipetransformer.feed.row_origin import about_rows, data_origin, machine_origin
from pipetransformer.feed.row_proof import RowProof
from pipetransformer.feed.samples import Samples
from pipetransformer.processes import World

_LOGGER = logging.getLogger(__name__)

# Fewer bytes than these are read faster than a thread hands them over.
_LEAST_AHEAD_BYTES = 1 << 20
_IN_MEMORY = Path("/dev/shm")


@final
@dataclass(frozen=True)
class RowBudget:
    """Say how many samples of how many have rows, each view of one counted, and their bytes."""

    num_rows: int = 0
    num_samples: int = 0
    num_bytes: int = 0

    def __add__(self, other: RowBudget) -> RowBudget:
        return RowBudget(
            self.num_rows + other.num_rows,
            self.num_samples + other.num_samples,
            self.num_bytes + other.num_bytes,
        )

    def __str__(self) -> str:
        return (
            f"rows of {self.num_rows} of {self.num_samples} samples, about "
            f"{as_bytes(self.num_bytes)}"
        )


_RANDOM = "the training set gives other values each time a sample is read (random augmentation)"
_SEED = (
    "the training set gives other values each time a sample is read, whatever the seed; draw "
    "random numbers from torch, numpy or random, or leave cache_views= out"
)
_MIXES = (
    "collate_fn gives samples other values together than one by one (it mixes those of a batch)"
)
_COUNTS = (
    "collate_fn counts in its attribute %r, so what it makes may depend on how often it was "
    "called, and it is not called for samples with rows"
)


@final
class RowKeeper:
    """Own the store of a frozen prefix's rows, and say which row a sample has.

    Args:
        num_views: of each sample that have rows; 0 where each is asked for once.
        keeps_places: says whether replicas read the same samples in every epoch.

    Attributes:
        format: what a row holds.
        store: None where none is of use.
        known: digests of this run's samples, to compare rows of other runs with.
        advice: what to do where samples vary.
    """

    def __init__(
        self,
        prefix: FrozenPrefix,
        world: World,
        samples: Samples,
        *,
        num_views: int,
        keeps_places: Callable[[], bool],
    ) -> None:
        self._prefix, self._world, self._samples = prefix, world, samples
        self._task, self._num_samples = prefix.task, len(samples.dataset)
        self.advice = (
            "The Trainer's cache_views= keeps a few fixed views of each sample, its cache=False "
            "says that none are to be kept, its eval_collate_fn= how evaluations' batches are made"
        )
        config = self._task.config
        check_device(config, world.device)
        self._chunk_size = config.prefix_chunk_of(world.size, on_gpu=world.device.type == "cuda")
        self._num_views, self._gave_up = num_views, num_views == 0
        self._keeps_places, self._num_readers = keeps_places, 0
        self.format = RowFormat(prefix, world, samples, chunk_size=self._chunk_size)
        self.store: ActivationStore | None = None
        self.known: Tensor | None = None
        self._kept: KeptStore | None = None
        self._is_in_memory = config.cache_folders == (_IN_MEMORY,)
        # Samples whose rows are on their way from the disk.
        self._expected = torch.empty(0, dtype=torch.int64)

    @property
    def may_cache(self) -> bool:
        """Return whether rows are kept: asked for, and not given up."""
        return self._task.config.cache and not self._gave_up

    def look_for_randomness(self) -> None:
        """Give up the cache, with a warning, where a sample has no fixed value. Collective.

        It may change from read to read, or with the samples of its batch.

        Raises:
            ValueError: on every rank: cache_views was set.
        """
        views = self._task.config.cache_views is not None
        varies = self._samples.vary_between_reads(same_seed=views)
        # Samples that vary anyway would look mixed, too.
        mix = not varies and self._samples.mix_in_batches()
        counts = "" if varies or mix else self._samples.counts_in()
        ours = (varies, _SEED if views else _RANDOM), (mix, _MIXES), (counts, _COUNTS % counts)
        gathered = gather_json([why for is_so, why in ours if is_so], group=self._world.group)
        if not (reasons := list(chain(*gathered))):
            return
        if views:
            raise ValueError(f"there are no fixed views of samples, as {reasons[0]}")
        self._gave_up = True
        warn_of_no_cache(self._world, reasons[0], self.advice)

    def give_up(self) -> None:
        """Keep no rows from now on."""
        self._gave_up = True

    def warn_of_padding(self) -> None:
        """Warn where losses depend on how many replicas there are."""
        if self._world.is_main and self._world.size > 1 and self.format.padding_may_matter():
            _LOGGER.warning(
                "collate_fn pads each replica's samples of a step to their longest, and outputs "
                "may depend on that: then losses depend on the number of replicas. Pad all "
                "samples to one length"
            )

    def budget(self, profile: Profile, measured: Batch) -> RowBudget:
        """Estimate the most that a node's cache will take in a file, whatever freezes.

        Args:
            profile: knows the bytes of a sample's activations.
            measured: the batch that the profile was measured on.
        """
        model, config = self._task.model, self._task.config
        row_bytes = max(profile.prefix_bytes(num + 1) for num in range(model.num_layers))
        row_bytes *= self.format.mean_over(measured)
        if config.cache_dtype is not None:
            weights = next(model.model.parameters()).dtype
            computed = self._task.computes_in or weights
            row_bytes *= getattr(torch, config.cache_dtype).itemsize / computed.itemsize
        num_all = self._num_views * self._num_samples
        num_rows = rows_in_all(config, num_all, int(row_bytes))
        return RowBudget(num_rows, num_all, int(num_rows * row_bytes))

    def cache_over(
        self, store: ActivationStore | None, content: RowContent, known: Tensor | None = None
    ) -> PrefixCache:
        return PrefixCache(
            self._prefix.run_layers,
            chunk_size=self._chunk_size,
            store=store,
            stamps=self._prefix.stamps,
            device=self._world.device,
            content=content,
            known=known,
        )

    @property
    def num_bytes(self) -> int:
        """Return what this node's cache takes now."""
        if self.store is None:
            return 0
        # On GPUs each process has its own.
        return self.store.num_bytes + (self._world.slots_per_node - 1) * self.bytes_on_device

    @property
    def bytes_on_device(self) -> int:
        """Return what rows take on this process's GPU."""
        return sum(device_bytes(store.layout, store.num_slots) for store in self._device_stores())

    @property
    def uses_store(self) -> bool:
        return self.store is not None and self._prefix.uses_cache and not self._gave_up

    def view(self, epoch: int) -> int:
        """Return the view of each sample that an epoch has."""
        views = self._task.config.cache_views
        return epoch if views is None else epoch % views  # Without views each epoch is its own.

    def reads_ahead(self, store: ActivationStore, ids: Tensor) -> bool:
        """Return whether a thread reads these samples' rows beside a step."""
        is_slow = len(ids) * store.layout.row_bytes >= _LEAST_AHEAD_BYTES
        return store.reads_ahead and (is_slow or self._world.device.type == "cuda")

    def row_ids(self, ids: Tensor, epoch: int, *, num_rows: int | None = None) -> Tensor:
        """Return samples' rows; where the store has fewer rows, those that have one are spread."""
        if num_rows is None:
            num_rows = self.store.num_rows if self.store is not None else 0
        num_all = self._num_views * self._num_samples
        wanted = ids + self.view(epoch) * self._num_samples if self._num_views > 1 else ids
        if num_rows in (0, num_all):
            return wanted
        rows, has_row = spread_rows(wanted, num_rows, num_all)
        return rows.where(has_row, num_rows)  # One beyond the last says that there is none.

    def expect(self, ids: Tensor, epoch: int) -> None:
        """Have the disk begin to read rows that are asked for later."""
        if self.store is not None and not self._is_in_memory:
            self.store.expect(self.row_ids(ids[~torch.isin(ids, self._expected)], epoch))
            self._expected = ids

    def agree_to_give_up(self) -> bool:
        """Return whether any node's cache was given up, or is condemned. Collective."""
        condemned = self.store is not None and self.store.is_condemned()
        if self._task.config.cache_keep:
            # Before the ranks meet: a set makes room for the next only when nobody uses it.
            self.drop()
        self._gave_up = any(gather_json(self._gave_up or condemned, group=self._world.group))
        return self._gave_up

    def match_store(self) -> None:
        """Make another store if rows of this depth have another layout, or a set of their own.

        So it is where fewer processes than before read them, and a GPU has no room for their part.
        """
        layout, readers = self.format.agree_on_layout(), self._agree_on_readers()
        if self.store is not None and self.store.layout == layout:
            holds_all = all(store.num_slots == store.num_rows for store in self._device_stores())
            if readers >= self._num_readers or holds_all:
                return
        self.drop()
        self._num_readers = readers
        if layout is None:
            self._gave_up = True
            return
        num_rows = self._num_views * self._num_samples
        if rows_in_all(self._task.config, num_rows, layout.expected_bytes) == 0:
            warn_of_no_cache(
                self._world,
                f"cache_limit_bytes={self._task.config.cache_limit_bytes} has room for less than "
                f"a tenth of {num_rows} rows of {layout.expected_bytes} bytes",
            )
            return
        if self._task.config.cache_keep:
            self.store = self._kept_store(layout, num_rows)
        else:
            config = self._task.config
            self.store = make_store(self._world, config, layout, num_rows, readers=readers)
        self._gave_up = self.store is None
        if self.store is not None and self._world.is_main:
            _LOGGER.info("the cache has %s", _account(self.store, num_rows))

    def _device_stores(self) -> list[DeviceStore]:
        tiers = () if self.store is None else _tiers(self.store)
        return [tier for tier in tiers if isinstance(tier, DeviceStore)]

    def _agree_on_readers(self) -> int:
        """Return how many processes read rows; 0 where each may read any row. Collective."""
        if self._world.size == 1 or not self._keeps_places():
            return int(self._world.size == 1)
        return sum(gather_json(self._prefix.on_stage_0, group=self._world.group))

    def _kept_store(self, layout: RowLayout, num_rows: int) -> ActivationStore | None:
        """Open the rows that are kept for this prefix, or make room for them. Collective."""
        config, world = self._task.config, self._world
        found: Any = None
        if world.is_main:  # Rank 0 always holds the prefix.
            content, num_views = self.format.content, self._num_views
            data = data_origin(self._samples, content, config, num_views=num_views)
            found = [data, self._prefix.stamps[-1], secrets.randbits(63)]
        data, stamp, run = broadcast_json(found, group=world.group)
        (folder,), (limit,) = config.cache_folders, config.cache_limits
        kept = KeptRows(
            RowSets(folder, limit_bytes=config.cache_limit or limit),
            {**data, **machine_origin(world.device, chunk_size=self._chunk_size)},
            about_rows(self._task.model, self._prefix.depth, self._num_samples),
            run,
        )
        store = share_kept(world, kept, layout, num_rows, stamp=stamp, is_right=self._proves_right)
        if store is None:
            return None
        self._kept = store
        is_trusted = config.cache_fingerprint is not None
        if not is_trusted and (self.known is None or len(self.known) != store.num_rows):
            self.known = torch.zeros(store.num_rows, dtype=torch.int64)
        return write_behind(world, store)

    def _proves_right(self, store: KeptStore) -> bool:
        """Return whether rows that were found are what this run computes, as far as a rank can."""
        if not self._prefix.on_stage_0:
            return True
        ids = torch.arange(self._num_samples)
        rows = self.row_ids(ids, 0, num_rows=store.num_rows)
        return self._proof(epoch=0).holds(store, ids, rows)

    def _proof(self, *, epoch: int) -> RowProof:
        stamps, content, view = self._prefix.stamps, self.format.content, self.view(epoch)
        return RowProof(self.cache_over, stamps, self._samples, content, view)

    def prove_others(self, ids: Tensor, epoch: int) -> None:
        """Read no row of another run before some of its rows were computed again."""
        store = self._kept
        if store is None or store.is_condemned():
            return
        if not self._proof(epoch=epoch).holds(store, ids, self.row_ids(ids, epoch)):
            warn_of_others(store)

    def drop(self) -> None:
        """Let go of the store; rows that are kept between runs stay."""
        if self.store is not None:
            self.store.close()
            self.store = self._kept = None


def _tiers(store: ActivationStore) -> Sequence[ActivationStore]:
    return store.tiers if isinstance(store, TieredStore) else (store,)


def _account(store: ActivationStore, num_samples: int) -> str:
    """Return how many samples have rows, in how many bytes, and how many are in which place."""
    tiers = _tiers(store)
    # Rows of unequal lengths take their bytes as they are written.
    sizes = [max(tier.num_bytes, tier.num_rows * tier.layout.expected_bytes) for tier in tiers]
    account = str(RowBudget(store.num_rows, num_samples, sum(sizes)))
    if not isinstance(store, TieredStore):
        return account
    places = (
        f"{tier.num_rows} in {place} ({as_bytes(size)})"
        for place, tier, size in zip(store.places, tiers, sizes, strict=True)
    )
    return f"{account}: {', '.join(places)}"
