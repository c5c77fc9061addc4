"""Choose where a cache's rows lie: in a GPU's memory, in a file that a node shares, or in both.

cache_device    all rows fit                 they do not
"auto"          GPU                          GPU and file
"cuda"          GPU                          as "auto", with a warning
"cpu"           file                         file

Of several processes each has rows of the samples that it reads on its own GPU, where no other can
read them. With "auto" a GPU has room for its process's part of them. So all go into the file where
a process does not read the same samples in every epoch. With "cuda" it has room for all.

A place with room for less than a tenth of the rows gets none. What is free decides, and
`cache_limit_bytes`; see `enough`.

One process creates a node's file, and all of the node open it. It has no name where the platform
allows that, and loses its name at once elsewhere, so a run that dies leaves nothing behind. Places
are tried in this order:

    place               all rows        else as many as every node holds
    cache_folder        1               3
    temporary files     2               4     only where cache_folder is the default
"""

from __future__ import annotations

import bisect
import errno
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from autocache import (
    ActivationStore,
    DeviceStore,
    KeptRows,
    KeptStore,
    NamelessFilesError,
    RowLayout,
    RowStore,
    TieredStore,
    WriteBehind,
    device_bytes,
)
from autodp import gather_json
from pipetransformer.config import TrainConfig
from pipetransformer.processes import World, plannable_bytes

_LOGGER = logging.getLogger(__name__)

_SHARE = 0.75
"""Of what is free in a place that must keep some: workers hand over samples in /dev/shm."""
_LEAST_SHARE = 0.1
"""Of all rows; with fewer, computing them all costs hardly more."""
_BESIDE_ROW_BYTES = 64
"""What a row takes beside its own bytes, rounded up."""
_DEVICE_SHARE = 0.5
"""Of a GPU's memory that this process has never used, how much rows may take unasked."""
_DEVIATIONS = 6
"""By how many standard deviations a process may read more of the GPUs' rows than others. Places
have samples at random, and which rows are on GPUs follows samples' numbers."""


@dataclass(frozen=True)
class _Offer:
    """Say what came of making a store on a node; each node's first rank makes one.

    Attributes:
        path: of the store's file; "" where there is none.
        place: where it is, or was first wished to be.
        cause: why rows are not where they were wished to be; "" where they are.
        num_fitting: rows for which there is room.
    """

    path: str
    place: str
    cause: str
    num_fitting: int


def share_files(
    world: World,
    folders: Mapping[Path, int | None],
    layout: RowLayout,
    num_rows: int,
    *,
    limit_bytes: int | None = None,
    num_elsewhere: int = 0,
) -> dict[str, RowStore]:
    """Create files on every node, each for what the one before has no room for. Collective.

    The default folder is replaced by that of temporary files where it is too small, as /dev/shm
    is in containers. Folders that the user chose are not replaced.

    Args:
        folders: with the most bytes of rows in each.
        limit_bytes: the most that all rows take.
        num_elsewhere: further rows, which lie in a faster place.
    Returns:
        The files by their folders, equally many on all ranks. A folder has none where a node has
        no room for a tenth of the rows that are left.
    """
    files: dict[str, RowStore] = {}
    causes, left = list[str](), num_rows
    for folder, own_bytes in folders.items():
        limits = [limit for limit in (own_bytes, limit_bytes) if limit is not None]
        most_bytes = min(limits, default=None)
        num = rows_within(most_bytes, left, layout.expected_bytes)
        if num == 0:
            continue
        places = [folder]
        if [*map(str, folders)] == [TrainConfig.cache_folder]:
            with suppress(FileNotFoundError):  # No folder for temporary files can be written to.
                places.append(Path(tempfile.gettempdir()))
        request = _FileRequest(tuple(places), layout, most_bytes)
        store, outcome = _share_most(world, request, num)
        causes += [outcome.cause] if outcome.cause else []
        if store is not None:
            files[outcome.place] = store
            left -= store.num_rows
            if limit_bytes is not None:
                limit_bytes -= store.num_rows * layout.expected_bytes
    num_kept, cause = num_elsewhere + num_rows - left, "; ".join(causes)
    if causes and not num_kept:
        warn_of_no_cache(world, cause)
    elif causes and world.is_main and (left or len(folders) == 1):
        _LOGGER.warning(
            "the cache holds %d of %d rows, in %s, as %s; cache_folder= names another place, "
            "cache_dtype= makes rows smaller",
            num_kept,
            num_elsewhere + num_rows,
            " and ".join(files) or "the device's memory alone",
            cause,
        )
    return files


def warn_of_no_cache(world: World, cause: str, advice: str = "") -> None:
    """Warn, in one process of all, that no rows are kept."""
    if world.is_main:
        text = "no cache: %s; the frozen prefix is computed at every step%s"
        _LOGGER.warning(text, cause, f". {advice}" if advice else "")


@dataclass(frozen=True)
class _FileRequest:
    """Say what a node's file holds, and where it may lie, the best place first.

    Args:
        limit_bytes: the most that rows take where they vary.
    """

    places: tuple[Path, ...]
    layout: RowLayout
    limit_bytes: int | None

    def make(self, num_rows: int, *, in_need: bool) -> tuple[RowStore | None, _Offer]:
        """Make the file in the first place that takes it.

        Args:
            in_need: whether the first place, too, must keep some room for others.
        """
        causes: list[str] = []
        for place in self.places:
            try:
                if (in_need or causes) and num_rows > (num := _num_fitting(place, self.layout)):
                    what = f"{place} has room for {num} rows beside what others need"
                    raise OSError(errno.ENOSPC, what)
                store = _create(place, self.layout, num_rows, self.limit_bytes)
            except OSError as error:
                causes.append(str(error))
            else:
                return store, _Offer(str(store.path), str(place), "; ".join(causes), num_rows)
        num_fitting = max(_num_fitting(place, self.layout) for place in self.places)
        return None, _Offer("", str(self.places[0]), "; ".join(causes), num_fitting)


def _share_most(
    world: World, request: _FileRequest, num_rows: int
) -> tuple[RowStore | None, _Offer]:
    """Create a store on every node, with fewer rows where one lacks room for all. Collective."""
    store, outcome = _share(world, request, num_rows, in_need=False)
    if store is None and outcome.num_fitting < num_rows and enough(outcome.num_fitting, num_rows):
        store, fewer = _share(world, request, outcome.num_fitting, in_need=True)
        outcome = replace(outcome, place=fewer.place) if store is not None else outcome
    return store, outcome


def _share(
    world: World, request: _FileRequest, num_rows: int, *, in_need: bool
) -> tuple[RowStore | None, _Offer]:
    """Create a store on every node in the first place that takes it. Collective.

    Returns:
        None on all ranks where one has failed; and what is to be said of all nodes, equal on all.
    """
    leads, group = world.rank % world.slots_per_node == 0, world.group
    store, offer, failure = None, None, ""
    with ExitStack() as undone:  # A rank that is gone makes the gathering raise.
        if leads:
            store, offer = request.make(num_rows, in_need=in_need)
        if store is not None:
            undone.callback(store.close)
        gathered = gather_json(offer and asdict(offer), group=group)
        undone.pop_all()
    offers = [_Offer(**offer) for offer in gathered if offer is not None]  # One of each node.
    if not leads and all(offer.path for offer in offers):
        path = offers[world.rank // world.slots_per_node].path
        try:
            store = RowStore.open(path, request.layout, num_rows)
        except (OSError, ValueError) as error:
            failure = str(error)
    failures = [text for text in gather_json(failure, group=group) if text]
    failures += [offer.cause for offer in offers if not offer.path]
    if store is not None:
        # All ranks have opened the file, or given up: it needs no name any more.
        store.unlink()
    if store is not None and failures:
        store.close()
        store = None
    return store, _summary(offers, failures)


def _summary(offers: Sequence[_Offer], failures: Sequence[str]) -> _Offer:
    """Return what is to be said of all nodes: of the first where rows are not where wished."""
    first = next((offer for offer in offers if offer.cause), offers[0])
    num_fitting = min(offer.num_fitting for offer in offers)
    return replace(first, cause=[*failures, first.cause][0], num_fitting=num_fitting)


def _num_fitting(place: Path, layout: RowLayout) -> int:
    """Return how many rows fit into a place that keeps some room; 0 where it is no place.

    Rows of unequal lengths count by the one that is expected.
    """
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return 0
    return int(_SHARE * free) // (layout.expected_bytes + _BESIDE_ROW_BYTES)


def _create(folder: Path, layout: RowLayout, num_rows: int, limit_bytes: int | None) -> RowStore:
    """Create the file of a node's cache, without a name where such files can be made."""
    try:
        return RowStore.create_nameless(folder, layout, num_rows, limit_bytes=limit_bytes)
    except NamelessFilesError as error:
        _LOGGER.info("the cache's file has a name until all have opened it: %s", error)
        name = f"pipetransformer-{os.getpid()}-{time.time_ns()}"
        return RowStore.create(folder / name, layout, num_rows, limit_bytes=limit_bytes)


def share_kept(
    world: World,
    kept: KeptRows,
    layout: RowLayout,
    num_rows: int,
    *,
    stamp: int,
    is_right: Callable[[KeptStore], bool],
) -> KeptStore | None:
    """Open the rows that earlier runs have kept, on every node, or make room for new ones.

    Collective. A node's first rank opens them before the others do.

    Args:
        is_right: computes some rows again; False where they differ. Those sets are removed.
    Returns:
        None on all ranks where a rank cannot open them.
    """
    open_rows = partial(_open_kept, kept, layout, num_rows, stamp)
    store, failure = None, ""
    leads = world.rank % world.slots_per_node == 0
    with ExitStack() as undone:  # A rank that is gone makes the gathering raise.
        for turn in (True, False):
            if leads == turn:
                try:
                    store = open_rows()
                    if leads and not is_right(store):
                        warn_of_others(store)
                        store.close()
                        store = open_rows()
                    undone.callback(store.close)
                except OSError as error:
                    failure = str(error)
            failures = [text for text in gather_json(failure, group=world.group) if text]
            if failures:
                warn_of_no_cache(world, failures[0])
                return None
        undone.pop_all()
    if store is not None and store.num_rows < num_rows:
        _LOGGER.warning(
            "%s keeps %d of %d rows, by its limit or its disk; the others are computed at every "
            "step. `pipetransformer cache ls` says what is there",
            kept.sets.folder,
            store.num_rows,
            num_rows,
        )
    return store


def _open_kept(kept: KeptRows, layout: RowLayout, num_rows: int, stamp: int) -> KeptStore:
    """Open a set, or make one; it has fewer rows where the disk has no room for all."""
    try:
        return KeptStore(kept, layout, num_rows, stamp=stamp)
    except OSError as error:
        num_fitting = _num_fitting(kept.sets.folder, layout)
        is_less = num_fitting < num_rows and enough(num_fitting, num_rows)
        if error.errno != errno.ENOSPC or not is_less:
            raise
        return KeptStore(kept, layout, num_fitting, stamp=stamp)


def warn_of_others(store: KeptStore) -> None:
    """Read no rows that this run does not compute; remove them, unless another run writes them."""
    store.condemn()
    _LOGGER.warning(
        "rows in %s are other than this run computes, though the weights are the same (code was "
        "changed, or a library): they are not read, and removed unless another run writes them",
        store.folder,
    )


def write_behind(world: World, store: ActivationStore) -> ActivationStore:
    """Have rows written behind a GPU's steps; a CPU's step needs all cores."""
    return store if world.device.type != "cuda" else WriteBehind(store, device=world.device)


def make_store(
    world: World, config: TrainConfig, layout: RowLayout, num_rows: int, *, readers: int
) -> ActivationStore | None:
    """Make a store within the limit; None on all ranks where a node has no room. Collective.

    On a device each row has room for the longest, so that a limit holds fewer.

    Args:
        readers: processes that read the rows, each its own; 0 where each may read any.
    """
    limit, device = config.cache_limit, None
    if config.cache_device == "cuda":
        num_on_device = enough(rows_within(limit, num_rows, layout.row_bytes), num_rows)
        device = _on_device(world, layout, num_on_device, num_on_device)
        if device is not None:
            return device
    num_rows = rows_within(limit, num_rows, layout.expected_bytes)
    if config.cache_device != "cpu" and readers:
        slots = partial(_num_slots, config=config, readers=readers)
        num_on_device = _num_on_device(world, layout, num_rows, limit, slots)
        device = _on_device(world, layout, num_on_device, slots(num_on_device))
    tiers: dict[str, ActivationStore] = {}
    if device is not None:
        tiers["the GPUs' memory" if world.size > 1 else f"{world.device}'s memory"] = device
        limit = None if limit is None else limit - device.num_rows * layout.row_bytes
    num_elsewhere = 0 if device is None else device.num_rows
    if num_elsewhere < num_rows:
        files = share_files(
            world,
            dict(zip(config.cache_folders, config.cache_limits, strict=True)),
            layout,
            num_rows - num_elsewhere,
            limit_bytes=limit,
            num_elsewhere=num_elsewhere,
        )
        tiers.update({place: write_behind(world, file) for place, file in files.items()})
    return TieredStore(tiers) if len(tiers) > 1 else next(iter(tiers.values()), None)


def rows_within(limit_bytes: int | None, num_rows: int, row_bytes: int) -> int:
    """Return how many rows a limit allows."""
    return num_rows if limit_bytes is None else min(num_rows, limit_bytes // max(row_bytes, 1))


def rows_in_all(config: TrainConfig, num_rows: int, row_bytes: int) -> int:
    """Return how many rows the limits of all folders allow, where these are enough."""
    in_each = [rows_within(limit, num_rows, row_bytes) for limit in config.cache_limits]
    num = rows_within(config.cache_limit, min(num_rows, sum(in_each)), row_bytes)
    return enough(num, num_rows)


def enough(num_fitting: int, num_rows: int) -> int:
    """Return how many rows are kept: those that fit, or none below a tenth of all."""
    return num_fitting if num_fitting >= _LEAST_SHARE * num_rows else 0


def check_device(config: TrainConfig, device: torch.device) -> None:
    """Raise a ValueError where rows are asked for on a GPU, and there is none."""
    if config.cache_device == "cuda" and device.type != "cuda":
        raise ValueError(
            f"cache_device is 'cuda', but this run computes on {device.type}; leave it out, or "
            "train on a GPU"
        )


def room_on_device(world: World) -> int:
    """Return the bytes of a GPU that rows may take unasked.

    The most that this process has used stays free for it, and half of the rest: measuring has
    used less before the first step than a step will.
    """
    device, free = world.device, plannable_bytes(world)
    if free is None:
        return 0
    most, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return int(_DEVICE_SHARE * max(0, free - (most - now)))


def _num_slots(num_rows: int, config: TrainConfig, readers: int) -> int:
    """Return how many of the devices' rows a process has room for; see `BatchCut.slices`."""
    size, unit = config.global_batch_size, config.micro_batch_size or 1
    mean = num_rows * -(-size // unit // readers) * unit / size
    return min(num_rows, math.ceil(mean + _DEVIATIONS * math.sqrt(mean)))


def _num_on_device(
    world: World,
    layout: RowLayout,
    num_rows: int,
    limit: int | None,
    slots: Callable[[int], int],
) -> int:
    """Return how many of all rows lie on devices that were not asked for; 0 for too few.

    Collective: where one device has less room than others, that is what each has.
    """
    room = min(gather_json(room_on_device(world), group=world.group))
    most = room // max(1, device_bytes(layout, 1))
    num = bisect.bisect_right(range(num_rows + 1), most, key=slots) - 1
    more_bytes = layout.row_bytes - layout.expected_bytes
    if limit is not None and more_bytes:
        # What rows take on a device beyond their length must not cost another its place.
        num = min(num, (limit - num_rows * layout.expected_bytes) // more_bytes)
    return enough(num, num_rows)


def _on_device(
    world: World, layout: RowLayout, num_rows: int, num_slots: int
) -> DeviceStore | None:
    """Make a store on each process's device; None, with a warning, where one has no room."""
    if num_rows == 0:
        return None
    store, failure = None, ""
    try:
        store = DeviceStore(layout, num_rows, device=world.device, num_slots=num_slots)
    except torch.OutOfMemoryError:
        failure = (
            f"the {device_bytes(layout, num_slots)} bytes of {num_slots} rows do not fit "
            f"{world.device}"
        )
    failures = [text for text in gather_json(failure, group=world.group) if text]
    if not failures:
        return store
    if store is not None:
        store.close()
    if world.is_main:
        _LOGGER.warning(
            "the device does not hold all rows, as %s; cache_dtype= makes rows smaller, "
            "cache_limit_bytes= makes them fewer, cache_device='cpu' has all in host memory",
            failures[0],
        )
    return None
