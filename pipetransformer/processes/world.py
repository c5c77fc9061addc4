"""Find this process's place in the world, its device and its memory.

It is alone, under torchrun, or started by our launcher. A world that cannot train is refused on
all ranks with one message: a rank that left alone would leave the others waiting.

    2 nodes of 2 slots       RANK   LOCAL_RANK   LOCAL_WORLD_SIZE   WORLD_SIZE
    first node               0 1        0 1             2                4
    second node              2 3        0 1             2                4
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from autodp import Topology, gather_json, link_device
from autopipe.plan import fitting_lengths
from pipetransformer.processes.meeting import Seat, assign_gpus, meet

STORE_VARIABLE = "PIPETRANSFORMER_STORE"

_SHARED = "cuda-shared"
"""Slots take a node's GPUs in turn, and talk over gloo: NCCL refuses two ranks on one GPU."""

_SPARE_BYTES = 512 << 20
"""Kept from plans for each process's fixed use of a GPU: workspaces of cuBLAS and cuDNN for each
stream (32 MiB and more on recent GPUs), kernels that load at their first call (100 MiB and more),
NCCL's buffers (a few MiB a channel for each communicator)."""
_SPARE_SHARE = 0.05
"""Share of a GPU kept for use that grows with plans: the allocator rounds sizes up to blocks of
2 MiB, and cannot give free memory in pieces to one large tensor."""

_LOGGER = logging.getLogger(__name__)
_JOINED = itertools.count()
"""Numbers the worlds that this process joins one after the other."""


@dataclass
class World:
    """Hold this rank's coordinates.

    Args:
        rank, size: among all processes.
        slots_per_node: processes of one node.
        group: all ranks, with a CPU backend; None where there is one process, and once closed.
        owned: whether that group was made here, and is destroyed by its last open world.
        slots_per_gpu: slots of this node that share this one's GPU.
        max_replicas: most pipelines that train side by side; None for no limit.
        stage_workers: workers of each stage of the one pipeline of all ranks; None for pipelines
            with one worker a stage.
    """

    rank: int
    size: int
    slots_per_node: int
    device: torch.device
    group: dist.ProcessGroup | None
    owned: bool
    slots_per_gpu: int = 1
    max_replicas: int | None = None
    stage_workers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.owned:
            _OWNERS[id(self)] = self

    @property
    def is_main(self) -> bool:
        """Return whether this rank is the one that decides, records and reports."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        return self.size // self.slots_per_node

    @property
    def backend(self) -> str | None:
        """Return the backend for groups of some ranks, None for one process."""
        # Of this group, as the default group may be a script's, without a backend for CPUs.
        return None if self.group is None else dist.get_backend_config(self.group)

    @property
    def link_device(self) -> torch.device:
        """Return where messages live: on this rank's GPU over NCCL, on the CPU over gloo."""
        return link_device(self.device, self.group)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the pipeline lengths that leave no rank idle, ascending."""
        if self.stage_workers is not None:
            return (1, len(self.stage_workers))
        return fitting_lengths(self.size, self.slots_per_node)

    def topology(self, length: int) -> Topology:
        """Say which rank is which stage of pipelines of a length."""
        if self.stage_workers is not None and length == len(self.stage_workers):
            workers = self.stage_workers
            return Topology(self.size, self.slots_per_node, length, stage_workers=workers)
        return Topology(self.size, self.slots_per_node, length, self.max_replicas)

    def close(self) -> None:
        """Destroy the group and its threads, if it was made here; a script's own stays.

        A default group is destroyed, with all groups, by its last open world.
        """
        if self.owned and self.group is not None and dist.is_initialized():
            _OWNERS.pop(id(self), None)
            if not _is_owned(self.group):
                dist.destroy_process_group(self.group)
            # gloo's threads end with the last reference, and might abort the process's end.
            self.group = None


_OWNERS: WeakValueDictionary[int, World] = WeakValueDictionary()
"""Open worlds with groups that were made here. Weak: a world may be dropped without `close`."""


def _is_owned(group: dist.ProcessGroup | None) -> bool:
    return any(world.group is group for world in _OWNERS.values())


def world_size() -> int:
    """Return the number of processes this one was started with: WORLD_SIZE, checked."""
    if dist.is_initialized():
        return dist.get_world_size()
    return _number("WORLD_SIZE", range(1, 1 << 31), default=1)


def slots_of_a_node() -> int:
    """Return the number of processes of this node: LOCAL_WORLD_SIZE, checked."""
    size = world_size()
    return _number("LOCAL_WORLD_SIZE", range(1, size + 1), default=1 if size == 1 else None)


def connect(device: str, *, timeout_s: float) -> World:
    """Join the world that the environment describes (torchrun's variables), or be alone.

    Args:
        device: "auto", "cpu", "cuda" or "cuda-shared".
        timeout_s: limit of every wait in the world's group.
    Raises:
        ValueError: a variable is missing or out of range; or, on every rank, nodes differ in size
            or device, ranks are not numbered node by node, or a rank lacks the device asked for.
        TimeoutError: ranks did not join in time; the message names them.
    """
    slots, size = slots_of_a_node(), world_size()
    starts = not dist.is_initialized()
    alone = 0 if size == 1 else None
    rank = _number("RANK", range(size), default=alone) if starts else dist.get_rank()
    local_rank = _number("LOCAL_RANK", range(slots), default=alone)
    if size == 1 and starts:
        return World(0, 1, 1, _take(choose_device(device, 1, 0)), None, owned=False)
    seat, limit = _seat(device, rank, local_rank, slots), timedelta(seconds=timeout_s)
    if starts:
        seats = _initialise(rank, size, seat, limit)
        world = World(rank, size, slots, torch.device("cpu"), dist.group.WORLD, owned=True)
    else:
        group, is_new = _join_group(shares=device == _SHARED, timeout=limit)
        # The default group may be an earlier world's, which both worlds then own.
        owned = is_new or _is_owned(group)
        world = World(rank, size, slots, torch.device("cpu"), group, owned=owned)
        try:
            seats = assign_gpus([Seat(**one) for one in gather_json(asdict(seat), group=group)])
        except ValueError:  # On every rank; after a failed wait, closing would wait once more.
            world.close()
            raise
    _sit_down(world, seats[rank], num_gpus=0 if device == "cpu" else _num_gpus())
    return world


def _seat(device: str, rank: int, local_rank: int, slots: int) -> Seat:
    """Return this process's place, as far as it knows that by itself."""
    host, chosen, refusal = socket.gethostname(), torch.device("cpu"), ""
    try:
        chosen = choose_device(device, slots, local_rank)
    except ValueError as error:
        refusal = f"rank {rank} on {host}: {error}"
    kind, only_gpu = chosen.type, ""
    if device == _SHARED:
        kind = _SHARED
    elif device != "cpu" and slots > 1 and _num_gpus() == 1:
        only_gpu = str(torch.cuda.get_device_properties(0).uuid)
    return Seat(local_rank, slots, host, kind, refusal, only_gpu)


def _sit_down(world: World, seat: Seat, *, num_gpus: int) -> None:
    """Give a world the device of this process's seat; warn where GPUs are left unused."""
    if seat.device != "cpu":
        world.device = _take(torch.device("cuda", seat.local_rank % num_gpus))
    elif num_gpus and seat.local_rank == 0:
        _LOGGER.warning(
            f"this node has {num_gpus} GPU(s) for {seat.slots} slots, so training runs on the "
            f"CPU; start {num_gpus} process(es) to use the GPU(s)"
        )
    if seat.device == _SHARED:  # Slots take the GPUs in turn.
        world.slots_per_gpu = len(range(world.device.index, seat.slots, num_gpus))


def likely_device(device: str) -> torch.device:
    """Return the device that a setting most likely gives this process, before it joins a world."""
    # Not the first GPU for all: each process would leave a context in its memory.
    slots = slots_of_a_node()
    if device == "cuda" and _num_gpus() == 1:  # This process's own, or the run is refused.
        return torch.device("cuda", 0)
    return _device_of(device, slots, _number("LOCAL_RANK", range(slots), default=0))


def choose_device(device: str, slots: int, local_rank: int) -> torch.device:
    """Choose this slot's device by the number of GPUs that its process sees.

    Raises:
        ValueError: the slot has no such device.
    """
    num_gpus = _num_gpus()
    if device == _SHARED and not num_gpus:
        raise ValueError(
            "device='cuda-shared' needs a GPU on every node, and this one has none; use "
            "device='cpu'"
        )
    if device == "cuda" and num_gpus < slots:
        raise ValueError(
            f"device='cuda' needs a GPU for each of the {slots} slots of this node, and this "
            f"process sees {num_gpus}; start fewer processes, let each see all GPUs or one that "
            "no other sees (CUDA_VISIBLE_DEVICES), or use device='cpu'"
        )
    return _device_of(device, slots, local_rank)


def _device_of(device: str, slots: int, local_rank: int) -> torch.device:
    """Return this slot's device; the CPU where there are too few GPUs."""
    num_gpus = _num_gpus()
    enough = num_gpus > 0 if device == _SHARED else device != "cpu" and num_gpus >= slots
    return torch.device("cuda", local_rank % num_gpus) if enough else torch.device("cpu")


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_bytes(world: World) -> int | None:
    """Return the bytes that this process can still allocate on its GPU; None on other devices.

    Slots that share a GPU have equal parts of its free memory.
    """
    device = world.device
    if device.type != "cuda":
        return None
    # The driver counts memory as used that torch's allocator has cached, and can give out again.
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] // world.slots_per_gpu + cached


def plannable_bytes(world: World) -> int | None:
    """Return the bytes of a GPU that a plan may fill; None on other devices.

    The rest of the free memory is for uses that no model of a step counts.
    """
    free = free_bytes(world)
    if free is None:
        return None
    share = int(_SPARE_SHARE * torch.cuda.mem_get_info(world.device)[1]) // world.slots_per_gpu
    return max(0, free - share - _SPARE_BYTES)


def tightest(limits: Iterable[int | None]) -> int | None:
    """Return the smallest limit; None is no limit."""
    return min((limit for limit in limits if limit is not None), default=None)


def _initialise(rank: int, size: int, seat: Seat, timeout: timedelta) -> list[Seat]:
    """Meet the other ranks, and start the default process group if they can train together.

    Returns:
        all seats, by rank.
    """
    # The first optimizer imports torch._dynamo, which then keeps a default group alive for good.
    import torch._dynamo  # noqa: F401

    path, number = os.environ.get(STORE_VARIABLE), next(_JOINED)
    meeting_store: dist.Store
    if path is not None:
        meeting_store = dist.FileStore(f"{path}-{number}", size)
    else:
        if not os.environ.get("MASTER_ADDR"):
            raise _complaint("MASTER_ADDR", "the name or address of the head node")
        _number("MASTER_PORT", range(1, 1 << 16))
        meeting_store = next(rendezvous("env://", timeout=timeout))[0]
    name, seats = meet(meeting_store, rank, size, seat, timeout_s=timeout.total_seconds())
    seats = assign_gpus(seats)
    backend = "cpu:gloo,cuda:nccl" if seats[rank].device == "cuda" else "gloo"
    # An earlier world's keys stay in the store; its addresses must not be found again.
    store = dist.PrefixStore(name, meeting_store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return seats


def _join_group(*, shares: bool, timeout: timedelta) -> tuple[dist.ProcessGroup | None, bool]:
    """Return a group of all ranks with a backend for CPUs, and whether it is new. Collective.

    Args:
        shares: whether slots may share a GPU, which NCCL refuses.
    """
    # transformers' TrainingArguments make a default group that has NCCL alone.
    config = dist.get_backend_config()
    if any(one.startswith("cpu:") for one in config.split(",")):
        return dist.group.WORLD, False
    group = dist.new_group(backend="gloo" if shares else f"cpu:gloo,{config}", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group, True


def _take(device: torch.device) -> torch.device:
    """Make a GPU this process's current one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _number(name: str, allowed: range, default: int | None = None) -> int:
    """Read a number that a launcher sets; a ValueError if it is missing or out of range."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or int(text) not in allowed:
        raise _complaint(name, f"a whole number, {allowed[0]} to {allowed[-1]}")
    return int(text)


def cpu_name() -> str:
    """Return the processor's name on Linux, else its architecture."""
    details = Path("/proc/cpuinfo")
    lines = details.read_text().splitlines() if details.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line[:10] == "model name")
    return next(names, platform.machine())


def _complaint(name: str, allowed: str) -> ValueError:
    text = os.environ.get(name)
    state = "is not set" if text is None else f"is {text!r}"
    return ValueError(
        f"the environment variable {name} {state}; it must be {allowed}. Start with torchrun, "
        "or set what it sets: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, "
        "MASTER_PORT"
    )
