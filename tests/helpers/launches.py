"""Record what ranks launch on GPUs in a training step, and find where they would wait for ever.

`record` runs the real stages, one rank after the other, on tensors without memory. Only torch's
messages and sums are replaced, by ones that note what NCCL would be given. `stuck` executes that:

    host     launches in its program's order; waits where it settles, and for gloo's messages
    stream   begins what it was given in order, each behind the end of the one before
    queue    of the hardware: holds several streams' launches in the host's order, and begins none
             before its first, even of another stream
    NCCL     an operation ends when all members of its communicator have begun their part

A launch that is put into one queue with more streams only waits for more. So ranks that come to
an end with one queue for all streams do so with any number, and any streams in each.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autocache import CacheStats
from autodp import Groups, MessageSums, Topology
from autopipe.loss import Loss
from autopipe.plan import PipelinePlan
from pipetransformer import adamw
from pipetransformer.config import TrainConfig
from pipetransformer.feed import ComingStep
from pipetransformer.model import LossScale, Task, adapt
from pipetransformer.processes import World
from pipetransformer.stage import AsynchronousStage, Stage, wiring
from pipetransformer.stage.step_result import StepNumbers, StepSums

META, WIDTH = torch.device("meta"), 2048
MAIN = "main"


@dataclass(frozen=True)
class Launch:
    """Give a stream something to do.

    Args:
        after: numbers of the rank's launches that must have ended, beside those of its stream.
        communicator: of an operation of NCCL; None for a wait, which ends as it begins.
        operation, peer: "send" or "receive" and a rank, or "sum" and None.
    """

    stream: str
    after: tuple[int, ...] = ()
    communicator: str | None = None
    operation: str = ""
    peer: int | None = None


@dataclass(frozen=True)
class Post:
    """Let a host tell others that it has come so far, one time more."""

    what: tuple[Any, ...]


@dataclass(frozen=True)
class Await:
    """Let a host wait: for a launch of its own, or until something was posted so many times."""

    launch: int | None = None
    what: tuple[Any, ...] = ()
    times: int = 0


@dataclass
class Program:
    """Hold what a rank's host does, in order."""

    steps: list[Launch | Post | Await] = field(default_factory=list)
    num_launches: int = 0
    last_of: dict[str, int] = field(default_factory=dict)

    def launch(self, what: Launch) -> int:
        """Append a launch, behind what its stream was given before; return its number."""
        before = () if (last := self.last_of.get(what.stream)) is None else (last,)
        self.steps.append(replace(what, after=(*what.after, *before)))
        number = self.last_of[what.stream] = self.num_launches
        self.num_launches += 1
        return number

    def operate(self, communicator: str, operation: str, peer: int | None = None) -> int:
        """Append an operation; as torch has it, on the communicator's own stream, behind main."""
        main = self.last_of.get(MAIN)
        after = () if main is None else (main,)
        return self.launch(Launch(communicator, after, communicator, operation, peer))

    def wait_for(self, launch: int) -> None:
        """Let the main stream wait; the host goes on."""
        self.launch(Launch(MAIN, (launch,)))


Members = dict[str, int]
"""How many ranks each communicator has."""
QueueOf = Callable[[int, str], int]
"""(number of a rank's stream, its name) -> the hardware's queue."""


def stuck(programs: Sequence[Program], members: Members, queue_of: QueueOf) -> list[str]:
    """Return what each rank that comes to no end waits for; nothing where all end."""
    run = _Run(programs, members, queue_of)
    while run.goes_on():
        pass
    return run.waiting()


def ended_in_order(program: Program) -> Program:
    """Return a program of which each operation of NCCL waits for the end of the one before."""
    changed, before, number = Program(num_launches=program.num_launches), (), 0
    changed.last_of.update(program.last_of)
    for step in program.steps:
        if isinstance(step, Launch):
            if step.communicator is not None:
                step, before = replace(step, after=(*step.after, *before)), (number,)
            number += 1
        changed.steps.append(step)
    return changed


class _Run:
    """Execute programs; nothing that has become possible becomes impossible, so in any order."""

    def __init__(self, programs: Sequence[Program], members: Members, queue_of: QueueOf) -> None:
        self._programs, self._members = programs, members
        self._hosts = [deque(program.steps) for program in programs]
        self._queue_of = [
            {stream: queue_of(n, stream) for n, stream in enumerate(program.last_of)}
            for program in programs
        ]
        self._queues = [defaultdict[int, deque[tuple[int, Launch]]](deque) for _ in programs]
        self._ended: list[set[int]] = [set() for _ in programs]
        self._num_launched = [0] * len(programs)
        self._posted: Counter[tuple[Any, ...]] = Counter()
        self._num_begun: Counter[tuple[int, str]] = Counter()
        self._begun: dict[tuple[str, int], list[tuple[int, int, Launch]]] = defaultdict(list)

    def goes_on(self) -> bool:
        """Let every host and queue go as far as it comes; return whether any did."""
        moved = False
        for rank, host in enumerate(self._hosts):
            while host and self._may(rank, host[0]):
                self._do(rank, host.popleft())
                moved = True
            for queue in self._queues[rank].values():
                while queue and self._ended[rank].issuperset(queue[0][1].after):
                    self._begin(rank, *queue.popleft())
                    moved = True
        return moved

    def waiting(self) -> list[str]:
        """Say for what hosts, and then queues, still wait."""
        told = [f"rank {n} at {host[0]}" for n, host in enumerate(self._hosts) if host]
        queues = ((n, queue) for n, own in enumerate(self._queues) for queue in own.values())
        told += [f"rank {n}'s queue at {queue[0][1]}" for n, queue in queues if queue]
        for (name, number), parts in self._begun.items():
            if len(parts) < self._members[name]:
                told.append(f"operation {number} of {name}: only rank {parts[0][0]}")
        return told

    def _may(self, rank: int, step: Launch | Post | Await) -> bool:
        if isinstance(step, Await):
            is_over = step.launch is None or step.launch in self._ended[rank]
            return is_over and self._posted[step.what] >= step.times
        return True

    def _do(self, rank: int, step: Launch | Post | Await) -> None:
        if isinstance(step, Post):
            self._posted[step.what] += 1
        elif isinstance(step, Launch):
            queue = self._queues[rank][self._queue_of[rank][step.stream]]
            queue.append((self._num_launched[rank], step))
            self._num_launched[rank] += 1

    def _begin(self, rank: int, number: int, launch: Launch) -> None:
        """Begin a launch, which leaves its queue; end what all members have begun."""
        name = launch.communicator
        if name is None:
            self._ended[rank].add(number)
            return
        parts = self._begun[name, self._num_begun[rank, name]]
        self._num_begun[rank, name] += 1
        parts.append((rank, number, launch))
        if len(parts) == self._members[name] and _fit(parts):
            for member, its_number, _ in parts:
                self._ended[member].add(its_number)


def _fit(parts: Sequence[tuple[int, int, Launch]]) -> bool:
    """Return whether the members' parts are one operation; NCCL would wait for ever."""
    if all(launch.operation == "sum" for _, _, launch in parts):
        return True
    (one, _, first), (other, _, second) = parts
    kinds = {first.operation, second.operation}
    return kinds == {"send", "receive"} and (first.peer, second.peer) == (other, one)


@dataclass(frozen=True)
class Group:
    """Stand for a process group."""

    name: str
    ranks: tuple[int, ...]


@dataclass
class Recorder:
    """Take the calls of torch.distributed that each rank makes in turn."""

    programs: list[Program]
    rank: int = 0
    members: Members = field(default_factory=dict)
    counts: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    texts: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        return self.programs[self.rank]

    def send(self, tensor: Tensor, peer: int, group: Group, tag: int = 0) -> Any:
        if not tensor.is_cpu:
            return self._message(group, "send", peer)
        way = (self.rank, peer, tag)
        self.counts["sent", way] += 1
        number = self.counts["sent", way]
        self.texts[way, number] = tensor.clone()
        self.program.steps.append(Post(("sent", way)))
        return _Work(self.program, Await(what=("asked", way), times=number))

    def receive(self, tensor: Tensor, peer: int, group: Group, tag: int = 0) -> Any:
        if not tensor.is_cpu:
            return self._message(group, "receive", peer)
        way = (peer, self.rank, tag)
        self.counts["asked", way] += 1
        number = self.counts["asked", way]
        # Of what goes to a stage before there is nothing yet, nor is it looked at.
        tensor.copy_(self.texts[way, number])
        self.program.steps.append(Post(("asked", way)))
        return _Work(self.program, Await(what=("sent", way), times=number))

    def sum(self, tensor: Tensor, group: Group, async_op: bool = False) -> Any:
        if tensor.is_cpu:
            self.counts["summed", group.name, self.rank] += 1
            times = self.counts["summed", group.name, self.rank] * len(group.ranks)
            self.program.steps.append(Post(("summed", group.name)))
            return _Work(self.program, Await(what=("summed", group.name), times=times))
        self.members[group.name] = len(group.ranks)
        return _Work(self.program, self.program.operate(group.name, "sum"))

    def _message(self, group: Group, operation: str, peer: int) -> Any:
        low, high = sorted((self.rank, peer))
        # Outside a batch, torch gives each pair of ranks a communicator, and that a stream.
        name = f"{group.name} {low}:{high}"
        self.members[name] = 2
        return _Work(self.program, self.program.operate(name, operation, peer))


class _Work:
    """Stand for an operation under way: over NCCL `wait` lets the main stream wait."""

    def __init__(self, program: Program, end: int | Await) -> None:
        self._program, self._end = program, end

    def wait(self, timeout: Any = None) -> None:
        if isinstance(self._end, Await):
            self._program.steps.append(self._end)
        else:
            self._program.wait_for(self._end)


class _GpuWorld(World):
    """Be a rank whose messages are in its GPU's memory."""

    @property
    def link_device(self) -> torch.device:
        return torch.device("cuda")


class _Rows:
    """Give stage 0 samples of a model without memory."""

    def fetch(self, ids: Tensor) -> dict[str, Tensor]:
        return {"x": torch.zeros(len(ids), 8), "y": torch.zeros(len(ids), dtype=torch.int64)}

    look = fetch

    def read_ahead(self, ids: Tensor) -> None:
        """Do nothing."""

    def take_stats(self) -> CacheStats:
        return CacheStats()


class _End:
    """Sum as a step's end on devices does; a number that a host would read has no value here."""

    def __init__(self, stage: Stage, everyone: Any) -> None:
        self._stage = stage
        self._sums = None if everyone is None else MessageSums(everyone, META, lambda text: None)

    def begin(self) -> None:
        """Have nothing to refuse."""

    def finish(self, *_: Any, **__: Any) -> StepNumbers:
        if self._stage.trained.reducer is not None:
            self._stage.trained.reducer.finish()
        if self._sums is not None:
            self._sums.begin(self._sums.empty(1, torch.float64))
            self._sums.complete()
        return StepNumbers(0.0, 0.0, False, StepSums())


def _block() -> nn.Module:
    # Each weight, of 16 MB that are nowhere, fills most of a bucket of its own.
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


class _Stream(AsynchronousStage):
    """Train a stream of steps; what a host would read has no value here."""

    def _update_once(self, coming: ComingStep, work: Any) -> StepSums:
        if self.trained.reducer is not None:
            self.trained.reducer.finish()
        return StepSums(trained=1.0)

    def _check_stream(self, *_: Any) -> None:
        """Find nothing wrong."""


@lru_cache(maxsize=2)
def _task(versions: Any) -> Task:
    with META:
        layers = (nn.Linear(8, WIDTH), _block(), _block(), _block(), nn.Linear(WIDTH, 3))
        layered = adapt(nn.Sequential(*layers))
    names = frozenset(name for name, _ in layered.model.named_parameters())
    config = TrainConfig(weight_versions=versions)
    return Task(layered, Loss(nn.CrossEntropyLoss()), adamw(), config, names)


@dataclass(frozen=True)
class Shape:
    """Name the pipelines of a world of K * R ranks, and a step of theirs.

    Args:
        samples: of each step's batch.
        workers: of each stage of one pipeline, in the place of `replicas`.
        versions: of weights, where steps follow each other without flushes.
        one_way: whether both directions have one communicator, which no run of ours has.
    """

    length: int
    replicas: int
    micro_batches: int
    schedule: str = "1f1b"
    samples: tuple[int, ...] = ()
    workers: tuple[int, ...] | None = None
    versions: str | None = None
    one_way: bool = False


def record(shape: Shape) -> tuple[list[Program], Members]:
    """Return what all ranks do in training steps, none of which waits for the one before.

    That the host waits at a step's end would only keep it from what follows.
    """
    size = sum(shape.workers) if shape.workers else shape.length * shape.replicas
    topology = Topology(size, size, shape.length, stage_workers=shape.workers)
    recorder = Recorder([Program() for _ in range(size)])
    with _recorded(recorder):
        # Headers go up, so that a rank runs behind those of the stages below.
        for rank in sorted(range(size), key=topology.stage_of):
            recorder.rank = rank
            _train(shape, topology, rank)
    return recorder.programs, recorder.members


def _train(shape: Shape, topology: Topology, rank: int) -> None:
    """Train a rank's steps, in the real stage."""
    boundaries = tuple(5 * n // shape.length for n in range(shape.length + 1))
    plan = PipelinePlan(
        shape.length, boundaries, shape.micro_batches, shape.schedule, 1.0, (0,) * shape.length
    )
    size, stage = topology.num_ranks, topology.stage_of(rank)
    everybody: Any = Group("world", tuple(range(size))) if size > 1 else None
    world = _GpuWorld(rank, size, size, META, everybody, owned=False)
    one = (_Stream if shape.versions else Stage)(
        _task(shape.versions),
        world,
        plan=plan,
        topology=topology,
        groups=(groups := _groups(shape, topology, topology.replica_of(rank), stage)),
        loss_scale=LossScale(is_dynamic=False),
    )
    one._end = one._later_end = _End(one, groups.everyone)  # type: ignore[assignment]
    batches = shape.samples or (2 * shape.micro_batches * shape.replicas,) * 2
    steps = [
        ComingStep(torch.arange(samples), step, step, step == 0, 1.0)
        for step, samples in enumerate(batches)
    ]
    if isinstance(one, AsynchronousStage):
        one.train_stream(steps, _Rows())
        steps.clear()
    for coming in steps:
        one.train_step(coming, _Rows(), looks=False)
    one.close()


def _groups(shape: Shape, topology: Topology, replica: int, stage: int) -> Any:
    """Return a rank's groups, as `build_groups` shares them out."""
    pipeline, holders = topology.pipelines[replica], topology.stage_ranks(stage)
    forward = Group(f"forward {replica}", pipeline)
    backward = forward if shape.one_way else Group(f"backward {replica}", pipeline)
    own = Group(f"stage {stage}", holders) if len(holders) > 1 else None
    every = tuple(range(topology.num_ranks))
    everyone = own if holders == every else Group("everyone", every)
    return Groups(forward, backward, own, everyone)  # type: ignore[arg-type]


@contextmanager
def _recorded(recorder: Recorder) -> Iterator[None]:
    """Let torch.distributed, and what would ask a GPU, note what they are told."""

    class Watchdog:
        def __init__(self, *_: Any, **__: Any) -> None:
            """Watch nothing."""

        def check(self) -> None:
            """Find nothing wrong."""

        def watch(self, what: str, limit_s: float) -> None:
            """Note nothing: the wait itself was noted."""

        def settle(self) -> None:
            if MAIN in recorder.program.last_of:
                number = recorder.program.last_of[MAIN]
                recorder.program.steps.append(Await(number))

    def tolist(tensor: Tensor) -> list[Any]:
        if not tensor.is_meta:
            return real(tensor)
        if MAIN in recorder.program.last_of:  # The host waits for a number of the device.
            recorder.program.steps.append(Await(recorder.program.last_of[MAIN]))
        return [True] * len(tensor)

    real = Tensor.tolist
    with (
        mock.patch.multiple(
            dist,
            isend=recorder.send,
            irecv=recorder.receive,
            all_reduce=recorder.sum,
            get_rank=lambda group=None: recorder.rank,
        ),
        mock.patch.object(wiring, "Watchdog", Watchdog),
        mock.patch("autodp.rank_sums.link_device", lambda device, group: device),
        mock.patch("autodp.rank_sums.wait_text", lambda what, group: what),
        mock.patch.object(Tensor, "tolist", tolist),
    ):
        yield
