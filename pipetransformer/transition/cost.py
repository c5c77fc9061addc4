"""Predict what a transition costs, from the bytes that move and what earlier ones took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autodp import largest_incoming_bytes, plan_moves
from autopipe.plan import PipelinePlan
from autopipe.profile import Profile
from pipetransformer.processes import World
from pipetransformer.transition.ownership import OPTIMIZER, WEIGHTS, Ownership, shard_name

_REGROUP_S = 0.05
"""Building groups, optimizer and buckets, before a change that moved nothing has told."""

_FRESH = 3.0
"""How many times slower bytes travel into fresh memory than in a repeated probe, before a
transition has told."""


class TransitionCost:
    """Predict transitions; each one that happened corrects the coming predictions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._regroup_s, self._slowness = _REGROUP_S, _FRESH

    def predict_s(self, profile: Profile, before: PipelinePlan, after: PipelinePlan) -> float:
        """Return the seconds of going from one plan to another."""
        return self._regroup_s + self._slowness * self._way_s(profile, before, after)

    def note(
        self, profile: Profile, before: PipelinePlan, after: PipelinePlan, *, seconds: float
    ) -> None:
        """Learn from a transition's measured seconds."""
        way_s = self._way_s(profile, before, after)
        if way_s == 0:
            self._regroup_s = seconds
        else:
            self._slowness = max(0.0, seconds - self._regroup_s) / way_s

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know, as plain values."""
        return {"regroup_s": self._regroup_s, "slowness": self._slowness}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._regroup_s, self._slowness = state["regroup_s"], state["slowness"]

    def _way_s(self, profile: Profile, before: PipelinePlan, after: PipelinePlan) -> float:
        """Return the seconds for the bytes of the rank that receives most, at a probe's rate."""
        names = tuple(cost.name for cost in profile.sublayers)
        old, new = (
            Ownership(names, self._world.topology(plan.length), plan.boundaries).shards()
            for plan in (before, after)
        )
        sizes: dict[str, int] = {}
        for cost in profile.sublayers:
            sizes[shard_name(cost.name, WEIGHTS)] = cost.parameter_bytes + cost.buffer_bytes
            sizes[shard_name(cost.name, OPTIMIZER)] = cost.optimizer_bytes
        moves = plan_moves(old, new, sizes, slots_per_node=self._world.slots_per_node)
        slowest = min(profile.link.bytes_per_s, profile.node_link.bytes_per_s)
        return largest_incoming_bytes(moves, sizes) * (1 / slowest)
