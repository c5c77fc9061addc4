"""Connect a stage with the others of its pipeline: activations, gradients, side inputs.

Side inputs are attention masks and targets, which stage 0 reads. A micro-batch's entries travel
as one message, each sample's bytes side by side. A header once a step names the entries, their
dtypes and shapes. They travel through host memory, also between GPUs: they are small, and come
from the data set or the cache there, so they wait for no computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from autocache import Uploader
from autodp import Groups, Topology, waiting_for
from autopipe.engine import (
    Link,
    Peer,
    ProcessLinkAbove,
    ProcessLinkBelow,
    Receiver,
    RoutedLink,
    Sender,
    StageLinks,
    TensorSpec,
    Watchdog,
)
from autopipe.plan import PipelinePlan
from autopipe.profile import recomputes_itself
from pipetransformer.errors import PeerError
from pipetransformer.model import Task, trained_parameters
from pipetransformer.processes import World
from pipetransformer.stage.batch_cut import Turn

_HIDDEN_TAG, _GRADIENT_TAG, _SIDE_TAG, _TIED_TAG = 1, 2, 3, 4
_NAMES = {_HIDDEN_TAG: "activations", _GRADIENT_TAG: "gradients", _SIDE_TAG: "side inputs"}


class StageWiring:
    """Say where in its pipeline a rank is, what it runs, and which ranks it talks to.

    Attributes:
        index: which stage this rank is.
        is_spare: whether it is in no pipeline.
        is_last: whether it is the last stage, which needs the targets.
        indices: the sublayers it trains; none on a spare.
        repeated: those of them that run forward again in the backward.
        replica: which pipeline it belongs to.
        turn: the micro-batches that this worker of its stage takes.
        timeout_s: the longest wait for another rank, and for a step.
        uploader: copies from host memory to the device.
        side_out: on stage 0, one sender for every other stage that needs side inputs or targets.
        side_in: on those stages, where these arrive.
    """

    def __init__(
        self, task: Task, world: World, plan: PipelinePlan, topology: Topology, groups: Groups
    ) -> None:
        self.task, self.world, self.device = task, world, world.device
        self.plan, self.topology, self.groups = plan, topology, groups
        self.index = topology.stage_of(world.rank)
        self.is_spare = topology.is_spare(world.rank)
        self.is_last = self.index == topology.length - 1
        self.replica = topology.replica_of(world.rank)
        self.timeout_s = task.config.step_limit_s(plan.predicted_step_s)
        # Between GPUs all links and sums wait in one stream, so one watchdog limits their waits.
        on_cuda = world.link_device.type == "cuda"
        self._watchdog = Watchdog(groups.abort, error=PeerError) if on_cuda else None
        self.uploader = Uploader(world.device)
        self.side_out: tuple[SideSender, ...] = ()
        self.side_in: SideReceiver | None = None
        if self.is_spare:
            self.turn, self.indices, self.repeated = Turn(), range(0), frozenset[int]()
            return
        self.turn = Turn(topology.worker_of(world.rank), topology.workers[self.index])
        self.indices = range(*plan.boundaries[self.index : self.index + 2])
        self.repeated = frozenset(
            index
            for index in self.indices[: len(task.model.sublayers) - 1 - self.indices.start]
            if plan.recomputes and not recomputes_itself(task.model.sublayers[index].module)
        )
        if self.index == 0:
            self.side_out = tuple(
                SideSender(
                    [self._sender(rank, _SIDE_TAG) for rank in self._ranks_of(stage)], names
                )
                for stage in range(1, topology.length)
                if (names := self._sides_of(stage))
            )
        elif self._sides_of(self.index):
            host = torch.device("cpu")
            self.side_in = SideReceiver(
                [Receiver(self._peer(rank, _SIDE_TAG), host) for rank in self._ranks_of(0)]
            )

    def links(self) -> StageLinks:
        """Build the links to the stages below and above; a spare has none."""
        links = StageLinks()
        if self.is_spare:
            return links
        watchdog = self._watchdog
        previous, following = self.index - 1, self.index + 1
        if previous >= 0:
            links.below = _routed(
                ProcessLinkBelow(
                    Receiver(self._peer(rank, _HIDDEN_TAG, watchdog), self.device),
                    self._sender(rank, _GRADIENT_TAG, watchdog),
                )
                for rank in self._ranks_of(previous)
            )
        if following < self.topology.length:
            links.above = _routed(
                ProcessLinkAbove(
                    self._sender(rank, _HIDDEN_TAG, watchdog),
                    Receiver(self._peer(rank, _GRADIENT_TAG, watchdog), self.device),
                    needs_gradient=self._trains_up_to(following),
                )
                for rank in self._ranks_of(following)
            )
        return links

    @property
    def speaks_for_stage(self) -> bool:
        """Return whether this rank is the first of those that hold the same stage."""
        return self.replica == self.turn.number == 0

    def watch(self, what: str) -> None:
        """Limit the newest wait of a GPU's stream for another rank."""
        if self._watchdog is not None:
            self._watchdog.watch(what, self.timeout_s)

    def settle(self) -> None:
        """Wait until all that a GPU's stream waits for has come; a PeerError if it has not.

        Until then its numbers may be anything: none may leave the process, or become a weight.
        """
        if self._watchdog is not None:
            self._watchdog.settle()

    def check(self) -> None:
        """Raise a PeerError if a GPU's stream has waited too long for another rank."""
        if self._watchdog is not None:
            self._watchdog.check()

    def sums_of(self, values: list[float], *, patience: int = 1) -> list[float]:
        """Return the sums of all ranks' values; wait at most for `patience` steps. Collective.

        They are few numbers, on the CPU.
        """
        group = self.world.group
        if group is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        with waiting_for("their part of the loss", group):
            work = dist.all_reduce(total, group=group, async_op=True)
            # The world's group itself allows for the longer waits of a transition.
            work.wait(timedelta(seconds=patience * self.timeout_s))
        return total.tolist()

    def send_tied(self, stage: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors to this pipeline's rank of another stage."""
        (rank,), group, device = self._ranks_of(stage), self.groups.forward, self.world.link_device
        with waiting_for("to take a tied gradient", group, source=rank):
            for tensor in tensors:
                work = dist.isend(tensor.contiguous().to(device), rank, group, _TIED_TAG)
                assert work is not None
                work.wait(timedelta(seconds=self.timeout_s))

    def receive_tied(self, stage: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Receive tensors as these from this pipeline's rank of another stage."""
        (rank,), group, device = self._ranks_of(stage), self.groups.forward, self.world.link_device
        received = []
        with waiting_for("a tied gradient", group, source=rank):
            for pattern in like:
                tensor = torch.empty_like(
                    pattern, device=device, memory_format=torch.contiguous_format
                )
                work = dist.irecv(tensor, rank, group, _TIED_TAG)
                assert work is not None
                work.wait(timedelta(seconds=self.timeout_s))
                received.append(tensor.to(pattern.device))
        return received

    def _ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return the workers of a stage of this rank's pipeline, in the order of their turns."""
        return self.topology.stage_of_replica(self.replica, stage)

    def _sides_of(self, stage: int) -> tuple[str, ...]:
        model, boundaries = self.task.model, self.plan.boundaries
        is_last = stage == self.topology.length - 1
        names = model.sides_of(boundaries[stage], boundaries[stage + 1])
        return (*names, *(model.targets if is_last else ()))

    def _trains_up_to(self, stage: int) -> bool:
        """Return whether a stage below this one trains anything."""
        active = range(self.plan.boundaries[0], self.plan.boundaries[stage])
        return bool(trained_parameters(self.task, active))

    def _sender(self, rank: int, tag: int, watchdog: Watchdog | None = None) -> Sender:
        peer = self._peer(rank, tag, watchdog)
        # 1F1B keeps at most as many micro-batches in flight as the pipeline has workers.
        return Sender(peer, most_pending=sum(self.topology.workers) + 1)

    def _peer(self, rank: int, tag: int, watchdog: Watchdog | None = None) -> Peer:
        group = self.groups.backward if tag == _GRADIENT_TAG else self.groups.forward
        assert group is not None
        name = _NAMES[tag]
        return Peer(rank, group, tag, name, self.timeout_s, watchdog, PeerError)


def _routed(links: Iterable[Link]) -> Link:
    """Join the links to a stage's workers, which take micro-batches by turns."""
    all_links = list(links)
    return all_links[0] if len(all_links) == 1 else RoutedLink(all_links)


class SideSender:
    """Send the entries one other stage needs, to its workers by turns.

    Args:
        senders: to each worker, in the order of their turns.
        names: of the entries.
    """

    def __init__(self, senders: Sequence[Sender], names: Sequence[str]) -> None:
        self._senders = senders
        self._names = names
        self._announced: dict[Sender, dict[str, TensorSpec]] = {}

    def send(self, micro_batch: int, batch: Mapping[str, Tensor]) -> None:
        """Send a micro-batch's entries; those the dataset does not give are left out.

        Raises:
            ValueError: the entries or their shapes are not those of the step's first micro-batch.
        """
        sender = self._senders[micro_batch % len(self._senders)]
        entries = {name: batch[name] for name in self._names if name in batch}
        specs = {name: TensorSpec.of(tensor) for name, tensor in entries.items()}
        if sender not in self._announced:
            sender.send_header(specs)
            self._announced[sender] = specs
        elif specs != self._announced[sender]:
            raise ValueError(
                f"a micro-batch has the side inputs {specs}, the first one "
                f"{self._announced[sender]}; samples of a step, with weight_versions= of all "
                "steps between two pauses, need the same entries of one shape: pad them"
            )
        if entries:
            # Entries are in host memory already: from a GPU `cpu()` would wait for all its work.
            sender.send(torch.cat([_as_bytes(t.cpu()) for t in entries.values()], dim=1))

    def finish_step(self) -> None:
        """Wait until all has left; the next step sends a new header."""
        for sender in self._senders:
            sender.flush()
        self._announced.clear()


class SideReceiver:
    """Receive the entries this stage needs, in the order of its forwards.

    Args:
        receivers: from each worker of stage 0, in the order of their turns.
    """

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self._receivers = receivers
        self._specs: list[dict[str, TensorSpec]] = []

    def begin(self, sizes: Sequence[int], order: Sequence[int]) -> None:
        """Prepare a step: wait for the header of every worker that sends something.

        Args:
            sizes: of all micro-batches.
            order: those that this worker takes.
        """
        count, self._specs = len(self._receivers), []
        for number, receiver in enumerate(self._receivers):
            own = [i for i in order if i % count == number]
            receiver.begin(own, sizes)
            specs = receiver.receive_header() if own else {}
            if specs:
                width = sum(_row_bytes(spec) for spec in specs.values())
                receiver.spec = TensorSpec((width,), "uint8")
                # Asked for only when it is needed, a message waits for a thread of the sender,
                # which computes by then: 3 ms on a busy core.
                receiver.post()
            self._specs.append(specs)

    def receive(self, micro_batch: int) -> dict[str, Tensor]:
        """Return a micro-batch's entries."""
        number = micro_batch % len(self._receivers)
        specs = self._specs[number]
        if not specs:
            return {}
        rows, entries = self._receivers[number].receive(micro_batch), {}
        parts = rows.split([_row_bytes(spec) for spec in specs.values()], dim=1)
        for (name, spec), part in zip(specs.items(), parts, strict=True):
            # A slice of `rows` may not be aligned for the entry's dtype; fresh memory is.
            entry = torch.empty(len(rows), *spec.shape, dtype=getattr(torch, spec.dtype))
            if entry.numel():
                _as_bytes(entry).copy_(part)
            entries[name] = entry
        return entries


def _as_bytes(tensor: Tensor) -> Tensor:
    width = math.prod(tensor.shape[1:])
    return tensor.detach().contiguous().view(len(tensor), width).view(torch.uint8)


def _row_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
