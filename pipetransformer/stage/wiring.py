"""Connect a stage with the others of its pipeline: activations, gradients, side inputs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

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
    Watchdog,
)
from autopipe.plan import PipelinePlan
from autopipe.profile import recomputes_itself
from pipetransformer.errors import PeerError
from pipetransformer.model import Task, trained_parameters
from pipetransformer.processes import World
from pipetransformer.stage.batch_cut import Turn
from pipetransformer.stage.side_inputs import SideReceiver, SideSender

_Numbers = TypeVar("_Numbers", list[float], list[list[float]])

_HIDDEN_TAG, _GRADIENT_TAG, _SIDE_TAG = 1, 2, 3
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
        sublayers = task.model.sublayers
        # The head's backward follows its forward, so it would be repeated for nothing.
        self.repeated = frozenset(
            index
            for index in self.indices
            if plan.recomputes
            and index < len(sublayers) - 1
            and not recomputes_itself(sublayers[index].module)
        )
        if self.index == 0:
            self.side_out = tuple(
                SideSender([self._sender(rank, _SIDE_TAG) for rank in self.ranks_of(stage)], names)
                for stage in range(1, topology.length)
                if (names := self._sides_of(stage))
            )
        elif self._sides_of(self.index):
            host = torch.device("cpu")
            self.side_in = SideReceiver(
                [Receiver(self._peer(rank, _SIDE_TAG), host) for rank in self.ranks_of(0)]
            )

    def links(self) -> StageLinks:
        """Build the links to the stages below and above; a spare has none."""
        links = StageLinks()
        if self.is_spare:
            return links
        watchdog = self._watchdog
        previous, following = self.index - 1, self.index + 1
        if previous >= 0:
            links.below = _route(
                ProcessLinkBelow(
                    Receiver(self._peer(rank, _HIDDEN_TAG, watchdog), self.device),
                    self._sender(rank, _GRADIENT_TAG, watchdog),
                )
                for rank in self.ranks_of(previous)
            )
        if following < self.topology.length:
            below = range(self.plan.boundaries[0], self.plan.boundaries[following])
            trains_below = bool(trained_parameters(self.task, below))
            links.above = _route(
                ProcessLinkAbove(
                    self._sender(rank, _HIDDEN_TAG, watchdog),
                    Receiver(self._peer(rank, _GRADIENT_TAG, watchdog), self.device),
                    needs_gradient=trains_below,
                )
                for rank in self.ranks_of(following)
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

    def sums_of(self, values: _Numbers, *, patience: int = 1) -> _Numbers:
        """Return the sums of all ranks' values, few numbers on the CPU. Collective.

        Args:
            patience: how many steps' time to wait at most.
        """
        group = self.world.group
        if group is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        with waiting_for("their part of the loss", group):
            work = dist.all_reduce(total, group=group, async_op=True)
            # The world's group itself allows for the longer waits of a transition.
            work.wait(timedelta(seconds=patience * self.timeout_s))
        sums: _Numbers = total.tolist()
        return sums

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return the workers of a stage of this rank's pipeline, in the order of their turns."""
        return self.topology.stage_of_replica(self.replica, stage)

    def _sides_of(self, stage: int) -> tuple[str, ...]:
        model, boundaries = self.task.model, self.plan.boundaries
        is_last = stage == self.topology.length - 1
        names = model.sides_of(boundaries[stage], boundaries[stage + 1])
        return (*names, *(model.targets if is_last else ()))

    def _sender(self, rank: int, tag: int, watchdog: Watchdog | None = None) -> Sender:
        peer = self._peer(rank, tag, watchdog)
        # 1F1B keeps at most as many micro-batches in flight as the pipeline has workers.
        return Sender(peer, most_pending=sum(self.topology.workers) + 1)

    def _peer(self, rank: int, tag: int, watchdog: Watchdog | None = None) -> Peer:
        group = self.groups.backward if tag == _GRADIENT_TAG else self.groups.forward
        assert group is not None
        name = _NAMES[tag]
        return Peer(rank, group, tag, name, self.timeout_s, watchdog, PeerError)


def _route(links: Iterable[Link]) -> Link:
    """Join the links to a stage's workers, which take micro-batches by turns."""
    all_links = list(links)
    return all_links[0] if len(all_links) == 1 else RoutedLink(all_links)
