"""Find this process's place in the world: alone, under torchrun, or started by our launcher."""

from __future__ import annotations

import itertools
import logging
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

STORE_VARIABLE = "PIPETRANSFORMER_STORE"

_LOGGER = logging.getLogger(__name__)
_JOINED = itertools.count()
"""Numbers the worlds that this process joins one after the other."""


@dataclass(frozen=True)
class World:
    """Hold this rank's coordinates.

    Args:
        rank, size: among all processes.
        slots_per_node: processes of one node.
        device: this rank's device slot.
        group: all ranks, with a CPU backend; None where there is one process.
        owned: whether the default process group was initialised here, and is to be destroyed here.
    """

    rank: int
    size: int
    slots_per_node: int
    device: torch.device
    group: dist.ProcessGroup | None
    owned: bool

    @property
    def is_main(self) -> bool:
        """Tell whether this rank decides, records and reports."""
        return self.rank == 0

    def close(self) -> None:
        """Destroy the default process group, if it was initialised here."""
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()


def world_size() -> int:
    """Return the number of processes this one was started with."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def slots_of_a_node() -> int:
    """Return the processes of this node; all of them unless a launcher says otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def connect(device: str, *, timeout_s: float) -> World:
    """Join the world that the environment describes (torchrun's variables), or be alone.

    Args:
        device: "auto", "cpu" or "cuda".
        timeout_s: limit of every wait in the world's group.
    Raises:
        ValueError: the device asked for is not there for each slot.
    """
    slots, size = slots_of_a_node(), world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = choose_device(device, slots, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size == 1 and not dist.is_initialized():
        return World(0, 1, 1, chosen, None, owned=False)
    owned = not dist.is_initialized()
    if owned:
        _initialise(chosen, timedelta(seconds=timeout_s))
    return World(dist.get_rank(), size, slots, chosen, dist.group.WORLD, owned)


def choose_device(device: str, slots: int, local_rank: int) -> torch.device:
    """Choose this slot's device; warn where "auto" leaves GPUs idle.

    Raises:
        ValueError: "cuda" was asked for and the node has fewer GPUs than slots.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and num_gpus < slots:
        raise ValueError(f"device='cuda' needs a GPU for each of the {slots} slots of this node, "
                         f"which has {num_gpus}; start fewer processes or use device='cpu'")
    if device != "cpu" and num_gpus >= slots:
        return torch.device("cuda", local_rank)
    if device == "auto" and num_gpus and local_rank == 0:
        _LOGGER.warning("this node has %d GPU(s) for %d slots, so training runs on the CPU; start "
                        "%d process(es) to use the GPU(s)", num_gpus, slots, num_gpus)
    return torch.device("cpu")


def _initialise(device: torch.device, timeout: timedelta) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    path, number = os.environ.get(STORE_VARIABLE), next(_JOINED)
    store: dist.Store
    if path is None:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(f"{path}-{number}", size)
    # Keys of a world that was left stay in the store; its addresses must not be found again.
    dist.init_process_group(backend, store=dist.PrefixStore(f"world-{number}", store), rank=rank,
                            world_size=size, timeout=timeout)
