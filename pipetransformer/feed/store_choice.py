"""Choose where a cache's rows lie: in a GPU's memory, or in a file that a node shares.

cache_device    one process, all rows fit    one process, they do not    several processes
"auto"          GPU                          file                        file
"cuda"          GPU                          file, with a warning        each its own GPU
"cpu"           file                         file                        file
"""

from __future__ import annotations

import logging

import torch

from autocache import ActivationStore, DeviceStore, RowLayout, WrittenBehind, device_bytes
from autodp import gather_json
from pipetransformer.config import TrainConfig
from pipetransformer.feed.node_store import share_store
from pipetransformer.processes import World, plannable_bytes

_LOGGER = logging.getLogger(__name__)

_SHARE = 0.5
"""Of a GPU's memory that this process has never used, how much rows may take unasked."""


def make_store(
    world: World,
    config: TrainConfig,
    layout: RowLayout,
    num_rows: int,
    *,
    may_use_device: bool = True,
) -> ActivationStore | None:
    """Make a store of so many rows; None on all ranks where there is no room for one. Collective.

    Args:
        may_use_device: whether the GPU's memory is not needed for other things.
    """
    if may_use_device and _wants_device(world, config, layout, num_rows):
        store = _on_device(world, layout, num_rows)
        if store is not None:
            return store
    shared = share_store(world, config.cache_folder, layout, num_rows)
    if shared is None or world.device.type != "cuda":
        return shared
    return WrittenBehind(shared, device=world.device)


def check_device(config: TrainConfig, device: torch.device) -> None:
    """Raise a ValueError where rows are asked for on a GPU, and there is none."""
    if config.cache_device == "cuda" and device.type != "cuda":
        raise ValueError(
            f"cache_device is 'cuda', but this run computes on {device.type}; leave it out, or "
            "train on a GPU"
        )


def room_on_device(device: torch.device) -> int:
    """Return the bytes of a GPU that rows may take unasked.

    What this process has used at most stays free for it, and of the rest a half: measuring has
    used less before the first step than a step will.
    """
    free = plannable_bytes(device)
    if free is None:
        return 0
    most, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return int(_SHARE * max(0, free - (most - now)))


def _wants_device(world: World, config: TrainConfig, layout: RowLayout, num_rows: int) -> bool:
    if config.cache_device != "auto":
        return config.cache_device == "cuda"
    # Of several processes each would compute what the others have, after every shuffle.
    needed = device_bytes(layout, num_rows)
    return world.size == 1 and needed <= room_on_device(world.device)


def _on_device(world: World, layout: RowLayout, num_rows: int) -> DeviceStore | None:
    """Make a store on each process's device; None, with a warning, where one has no room."""
    store, failure = None, ""
    try:
        store = DeviceStore(layout, num_rows, device=world.device)
    except torch.OutOfMemoryError:
        failure = (
            f"the {device_bytes(layout, num_rows)} bytes of {num_rows} rows do not fit "
            f"{world.device}"
        )
    failures = [text for text in gather_json(failure, group=world.group) if text]
    if not failures:
        return store
    if store is not None:
        store.close()
    if world.is_main:
        _LOGGER.warning(
            "the cache is in host memory, as %s; cache_dtype= makes rows smaller, "
            "cache_limit_bytes= makes them fewer, cache_device='cpu' asks for this",
            failures[0],
        )
    return None
