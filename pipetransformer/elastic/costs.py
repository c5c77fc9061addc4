"""Learn from live steps and transitions what steps and transitions cost."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autocache import CacheStats
from autodp import largest_incoming_bytes, plan_moves
from autopipe.plan import PipelinePlan
from autopipe.profile import Profile
from pipetransformer.elastic.shards import OPTIMIZER, WEIGHTS, Ownership, shard_name
from pipetransformer.processes import World

_WINDOW = 10
"""Steps whose median counts; fewer are too noisy, and more would notice late."""

_WARM_UP = 2
"""First steps of a plan, which touch fresh memory."""

_UNEQUAL = 0.25
"""Share by which a rank must compute longer than the fastest to count as slow: other processes of
a machine make that much of a difference for a while."""

REVIEW_STEPS = _WARM_UP + _WINDOW
"""Steps after which it is known what a plan's steps take."""

_REGROUP_S = 0.05
"""Building groups, optimizer and buckets; a guess until a transition has moved no bytes."""

_FRESH = 3.0
"""How many times slower bytes travel into fresh memory than in a repeated probe; a guess until a
transition has moved bytes."""


def steady_step(
    took: Mapping[str, float],
    stats: CacheStats,
    plan: PipelinePlan,
    *,
    uses_cache: bool,
    has_workers: bool,
    on_cpu: bool,
) -> tuple[float, float]:
    """Return what a step takes in the long run, and what of that is fetching samples, in seconds.

    Left out are filling a cache, waiting for workers and checking cached samples. What the step
    cannot tell is as the plan predicts it.

    Args:
        took: this rank's seconds of the step, by what they were spent on.
        stats: of the step.
        plan: the plan that it followed.
        uses_cache: whether what the prefix computes is kept.
        has_workers: whether worker processes read the data set.
        on_cpu: whether a layer is computed when it is called, and not only launched.
    """
    data_s, runs_prefix = took["data"], stats.misses + stats.upgrades > 0
    training_s = sum(took.values()) - data_s
    if uses_cache and runs_prefix:
        if not on_cpu:  # The launched prefix is waited for later, among what trains.
            return plan.predicted_step_s, plan.fetch_s
        return training_s + plan.fetch_s, plan.fetch_s
    fetch_s = stats.seconds if uses_cache or has_workers else data_s
    seconds = training_s + fetch_s
    if runs_prefix and not on_cpu:
        fetch_s = seconds * plan.fetch_s / max(plan.predicted_step_s, 1e-9)
    return seconds, fetch_s


class Pace:
    """Watch the steps of one plan."""

    def __init__(self) -> None:
        self._num_steps = 0
        # Seconds of a step, of them without fetching, and of them in which this rank computed.
        self._recent = deque[tuple[float, float, float]](maxlen=_WINDOW)

    def note(self, seconds: float, *, fetch_s: float, computed_s: float) -> bool:
        """Add a step; return whether steps of this plan are now known for the first time.

        Args:
            seconds: what it takes in the long run.
            fetch_s: what of that is fetching samples; see `steady_step`.
            computed_s: in how many of its seconds this rank computed.
        """
        self._num_steps += 1
        if self._num_steps > _WARM_UP:
            self._recent.append((seconds, seconds - fetch_s, computed_s))
        return self._num_steps == REVIEW_STEPS

    @property
    def median_s(self) -> float | None:
        """Return a recent step's seconds; None before there are enough steps."""
        return self._median_s(0)

    @property
    def training_s(self) -> float | None:
        """Return what of that is not fetching: it tells how fast computing is."""
        return self._median_s(1)

    @property
    def computed_s(self) -> float:
        """Return in how many of these seconds this rank computed."""
        return statistics.median(step[2] for step in self._recent)

    def _median_s(self, kind: int) -> float | None:
        if len(self._recent) < _WINDOW:
            return None
        return statistics.median(step[kind] for step in self._recent)


@dataclass
class Calibration:
    """Hold what live steps have taught about costs since they were measured.

    Args:
        lengthening: factor on all computing.
        slowness: factor of each rank over the fastest; () for equal ranks.
        corrections: factor on the steps of plans that were tried, by `plan_name`.
    """

    lengthening: float = 1.0
    slowness: tuple[float, ...] = ()
    corrections: dict[str, float] = field(default_factory=dict)

    def applied_to(self, profile: Profile) -> Profile:
        """Return the costs as they are now."""
        return replace(profile.lengthened(self.lengthening), slowness=self.slowness)

    def correction(self, plan: PipelinePlan) -> float:
        """Return the factor by which a plan's steps turned out longer than predicted; else 1."""
        return self.corrections.get(plan_name(plan), 1.0)

    def correct(self, plan: PipelinePlan, slower: float) -> None:
        """Note that a plan's steps take longer by a factor than they are predicted now."""
        self.corrections[plan_name(plan)] = self.correction(plan) * slower

    def compare_ranks(self, computed_s: Sequence[float], expected_s: Sequence[float]) -> None:
        """Find out how many times longer than the fastest each rank computes.

        Args:
            computed_s: seconds a step, by rank.
            expected_s: by rank, with the slowness known so far; 0 for an idle rank.
        """
        # What is expected contains the slowness so far, so the two factors multiply.
        known = self.slowness or (1.0,) * len(computed_s)
        slowness_of_all = [
            before * seconds / expected if seconds and expected else 0.0
            for before, seconds, expected in zip(known, computed_s, expected_s, strict=True)
        ]
        fastest = min(filter(None, slowness_of_all), default=1.0)
        slowness = tuple(max(one / fastest, 1.0) for one in slowness_of_all)
        self.slowness = slowness if max(slowness) > 1 + _UNEQUAL else ()

    def compare_steps(self, plan: PipelinePlan, measured_s: float) -> None:
        """Find out how much longer all computing takes.

        Args:
            plan: as it is predicted now.
            measured_s: what its steps take, without fetching samples.
        """
        if plan.training_s > 0:
            self.lengthening *= measured_s / plan.training_s


class TransitionCost:
    """Predict transitions, corrected by the transitions that have happened.

    Args:
        rebuild_s: tells the seconds of new groups, which another pipeline length needs. Over NCCL
            they take much longer than all else; the first ones tell.
    """

    def __init__(self, world: World, *, rebuild_s: Callable[[], float] = lambda: 0.0) -> None:
        self._world, self._rebuild_s = world, rebuild_s
        self._regroup_s, self._slowness = _REGROUP_S, _FRESH

    def predict_s(self, profile: Profile, before: PipelinePlan, after: PipelinePlan) -> float:
        """Return the seconds of going from one plan to another."""
        groups_s = self._groups_s(before, after)
        return groups_s + self._regroup_s + self._slowness * self._way_s(profile, before, after)

    def note(
        self, profile: Profile, before: PipelinePlan, after: PipelinePlan, *, seconds: float
    ) -> None:
        """Learn from a transition's measured seconds."""
        way_s = self._way_s(profile, before, after)
        seconds = max(0.0, seconds - self._groups_s(before, after))
        if way_s == 0:  # No bytes moved: all of it was regrouping.
            self._regroup_s = seconds
        else:
            self._slowness = max(0.0, seconds - self._regroup_s) / way_s

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know, as plain values."""
        return {"regroup_s": self._regroup_s, "slowness": self._slowness}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._regroup_s, self._slowness = state["regroup_s"], state["slowness"]

    def _groups_s(self, before: PipelinePlan, after: PipelinePlan) -> float:
        return self._rebuild_s() if before.length != after.length else 0.0

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
        # Ranks receive at the same time: the busiest decides, over the slowest kind of link.
        slowest = min(profile.link.bytes_per_s, profile.node_link.bytes_per_s)
        return largest_incoming_bytes(moves, sizes) / slowest


def plan_name(plan: PipelinePlan) -> str:
    """Name a plan without its boundaries: freezing moves them, and corrections must live on."""
    return f"K = {plan.length}, M = {plan.num_micro_batches}" + ", recomputed" * plan.recomputes


def rest_layers(profile: Profile, resting: Collection[int]) -> Profile:
    """Return the costs where the weights of some layers do not train."""
    if not resting:
        return profile
    return replace(
        profile,
        sublayers=tuple(
            replace(cost, weight_backward_s=(0.0,) * len(profile.batch_sizes))
            if cost.layer in resting
            else cost
            for cost in profile.sublayers
        ),
    )
