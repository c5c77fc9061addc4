"""Connect a stage with the others of its pipeline: activations, gradients, side inputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autocache import Uploader
from autodp import Groups, Topology
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
from pipetransformer.errors import PeerError
from pipetransformer.model import Task, trained_parameters
from pipetransformer.processes import World
from pipetransformer.stage.batch_cut import Turn
from pipetransformer.stage.side_inputs import SideReceiver, SideSender
from pipetransformer.stage.work import StageLayers

_HIDDEN_TAG, _GRADIENT_TAG, _SIDE_TAG = 1, 2, 3


class StageWiring:
    """Say where a stage is, and build its connections.

    Attributes:
        index: which stage this rank is.
        is_spare: whether it is in no pipeline.
        replica: which pipeline it belongs to.
        turn: which of its stage's workers in its pipeline it is, and of how many.
        timeout_s: the longest wait for another rank.
    """

    def __init__(
        self, task: Task, world: World, plan: PipelinePlan, topology: Topology, groups: Groups
    ) -> None:
        self.task, self.world, self.plan = task, world, plan
        self.topology, self.groups = topology, groups
        self.index = topology.stage_of(world.rank)
        self.is_spare = topology.is_spare(world.rank)
        self.replica = topology.replica_of(world.rank)
        self.turn = Turn()
        if not self.is_spare:
            self.turn = Turn(topology.worker_of(world.rank), topology.workers[self.index])
        self.timeout_s = task.config.step_limit_s(plan.predicted_step_s)

    def layers(self, indices: range) -> StageLayers:
        """Describe the stage's layers and how side inputs and targets reach it."""
        name, host = "side inputs", torch.device("cpu")
        side_out: tuple[SideSender, ...] = ()
        side_in = None
        if self.index == 0:
            side_out = tuple(
                SideSender(
                    [self._sender(rank, _SIDE_TAG, name) for rank in self._ranks_of(stage)], sides
                )
                for stage in range(1, self.topology.length)
                if (sides := self._sides_of(stage))
            )
        elif not self.is_spare and self._sides_of(self.index):
            side_in = SideReceiver(
                [Receiver(self._peer(rank, _SIDE_TAG, name), host) for rank in self._ranks_of(0)]
            )
        device = self.world.device
        return StageLayers(
            self.task,
            indices,
            device,
            side_out,
            side_in,
            is_last=self.index == self.topology.length - 1,
            turn=self.turn,
            uploader=Uploader(device),
        )

    def links(self) -> StageLinks:
        """Build the links to the stages below and above; a spare has none.

        Between GPUs one watchdog limits the waits of both: they are in one stream.
        """
        links = StageLinks()
        if self.is_spare:
            return links
        on_cuda = self.world.link_device.type == "cuda"
        watchdog = Watchdog(self.groups.abort, error=PeerError) if on_cuda else None
        device = self.world.device
        previous, following = self.index - 1, self.index + 1
        if previous >= 0:
            links.below = _routed(
                ProcessLinkBelow(
                    Receiver(self._peer(rank, _HIDDEN_TAG, "activations", watchdog), device),
                    self._sender(rank, _GRADIENT_TAG, "gradients", watchdog),
                )
                for rank in self._ranks_of(previous)
            )
        if following < self.topology.length:
            links.above = _routed(
                ProcessLinkAbove(
                    self._sender(rank, _HIDDEN_TAG, "activations", watchdog),
                    Receiver(self._peer(rank, _GRADIENT_TAG, "gradients", watchdog), device),
                    needs_gradient=self._trains_up_to(following),
                )
                for rank in self._ranks_of(following)
            )
        return links

    def _ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return the workers of a stage of this rank's pipeline, in the order of their turns."""
        return self.topology.stage_of_replica(self.replica, stage)

    def _sides_of(self, stage: int) -> tuple[str, ...]:
        names = self.task.model.sides_of(
            self.plan.boundaries[stage], self.plan.boundaries[stage + 1]
        )
        is_last = stage == self.topology.length - 1
        return (*names, *(self.task.model.targets if is_last else ()))

    def _trains_up_to(self, stage: int) -> bool:
        """Tell whether a stage below this one trains anything."""
        active = range(self.plan.boundaries[0], self.plan.boundaries[stage])
        return bool(trained_parameters(self.task, active))

    def _sender(self, rank: int, tag: int, name: str, watchdog: Watchdog | None = None) -> Sender:
        peer = self._peer(rank, tag, name, watchdog)
        return Sender(peer, most_pending=sum(self.topology.workers) + 1)

    def _peer(self, rank: int, tag: int, name: str, watchdog: Watchdog | None = None) -> Peer:
        group = self.groups.backward if tag == _GRADIENT_TAG else self.groups.forward
        assert group is not None
        return Peer(rank, group, tag, name, self.timeout_s, watchdog, PeerError)


def _routed(links: Iterable[Link]) -> Link:
    """Return a link to one worker as it is, to several by turns."""
    all_links = list(links)
    return all_links[0] if len(all_links) == 1 else RoutedLink(all_links)
