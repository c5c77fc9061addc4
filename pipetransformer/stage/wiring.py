"""Connect a stage with the others of its pipeline: activations, gradients, side inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from autodp import Groups, Topology
from autopipe.engine import (
    LinkError,
    Peer,
    ProcessLinkAbove,
    ProcessLinkBelow,
    Receiver,
    Sender,
    StageLinks,
    Watchdog,
)
from autopipe.plan import PipelinePlan
from pipetransformer.errors import PeerError
from pipetransformer.job import Task, trained_parameters
from pipetransformer.processes import World
from pipetransformer.stage.side_inputs import SideReceiver, SideSender
from pipetransformer.stage.work import StageLayers

_HIDDEN_TAG, _GRADIENT_TAG, _SIDE_TAG = 1, 2, 3


@dataclass(frozen=True)
class StageWiring:
    """Say where a stage is, and build its connections.

    Args:
        task: what is trained.
        world: this rank's place.
        plan: what the stages do.
        topology: which rank is which stage.
        groups: those of the topology.
    """

    task: Task
    world: World
    plan: PipelinePlan
    topology: Topology
    groups: Groups

    @property
    def index(self) -> int:
        """Return which stage this rank is."""
        return self.topology.stage_of(self.world.rank)

    @property
    def is_spare(self) -> bool:
        """Tell whether this rank is in no pipeline."""
        return self.topology.is_spare(self.world.rank)

    @property
    def replica(self) -> int:
        """Return which pipeline this rank belongs to."""
        return self.topology.replica_of(self.world.rank)

    @property
    def timeout_s(self) -> float:
        """Return the longest wait for another rank."""
        return self.task.config.step_limit_s(self.plan.predicted_step_s)

    def layers(self, indices: range) -> StageLayers:
        """Describe the stage's layers and how side inputs and targets reach it."""
        side_out = (
            tuple(
                SideSender(self._sender(stage, _SIDE_TAG, "side inputs"), self._sides_of(stage))
                for stage in range(1, self.topology.length)
                if self._sides_of(stage)
            )
            if self.index == 0
            else ()
        )
        side_in = None
        if self.index > 0 and not self.is_spare and self._sides_of(self.index):
            side_in = SideReceiver(
                Receiver(self._peer(0, _SIDE_TAG, "side inputs"), torch.device("cpu"))
            )
        is_last = self.index == self.topology.length - 1
        return StageLayers(self.task, indices, self.world.device, side_out, side_in, is_last)

    def links(self) -> StageLinks:
        """Build the links to the stages below and above; a spare has none.

        Between GPUs one watchdog limits the waits of both: they are in one stream.
        """
        links = StageLinks()
        if self.is_spare:
            return links
        on_cuda = self.world.link_device.type == "cuda"
        watchdog = Watchdog(self.groups.abort) if on_cuda else None
        device = self.world.device
        previous, following = self.index - 1, self.index + 1
        if previous >= 0:
            links.below = ProcessLinkBelow(
                Receiver(self._peer(previous, _HIDDEN_TAG, "activations", watchdog), device),
                self._sender(previous, _GRADIENT_TAG, "gradients", watchdog),
            )
        if following < self.topology.length:
            links.above = ProcessLinkAbove(
                self._sender(following, _HIDDEN_TAG, "activations", watchdog),
                Receiver(self._peer(following, _GRADIENT_TAG, "gradients", watchdog), device),
                needs_gradient=self._trains_up_to(following),
            )
        return links

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

    def _sender(self, stage: int, tag: int, name: str, watchdog: Watchdog | None = None) -> Sender:
        peer = self._peer(stage, tag, name, watchdog)
        return Sender(peer, most_pending=self.topology.length + 1)

    def _peer(self, stage: int, tag: int, name: str, watchdog: Watchdog | None = None) -> Peer:
        rank = self.topology.pipeline_ranks(self.replica)[stage]
        group = self.groups.backward if tag == _GRADIENT_TAG else self.groups.forward
        assert group is not None
        return Peer(rank, group, tag, name, self.timeout_s, watchdog)


@contextmanager
def naming_peers() -> Iterator[None]:
    """Turn a link's error into the one that users know of: a rank is gone or silent."""
    try:
        yield
    except LinkError as error:
        raise PeerError(str(error)) from error
