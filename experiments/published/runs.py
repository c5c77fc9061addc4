"""Simulate runs of the published system on its own machines.

GPipe, K by Algorithm 1, M by the throughput table, a batch of 400 a
pipeline, so that the global batch grows with R; the frozen layers' forward on the first device,
ahead of the pipeline and in one piece, as Algorithm 1 pipelines only the active layers. One
process drives a pipeline, so that all its launches add up: by micro-batch, and by active layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopipe.plan import (
    PlanRequest,
    best_first,
    plan_as_published,
    predict,
    published_split,
    throughput_table,
)
from autopipe.profile import Profile, RingCost
from experiments.ablation.parts import ABLATION as PARTS
from experiments.ablation.parts import NOTHING_FROZEN, Parts
from experiments.published.setting import (
    BATCH,
    CACHE_FROM,
    CLUSTER,
    HOST_S,
    NUM_LAYERS,
    NUM_SAMPLES,
    SPEED_UPS,
    TRANSITION_S,
    published_frozen,
)

START = PlanRequest(CLUSTER.num_slots, CLUSTER.slots_per_node, 2 * BATCH, num_frozen=0)
BASELINE = PARTS[NOTHING_FROZEN]
ABLATION = {name: PARTS[name] for name in SPEED_UPS}


@dataclass(frozen=True)
class Epoch:
    """State an epoch of a simulated run.

    Args:
        num_frozen, length, replicas, num_micro_batches: its layers, K, R and M.
        prefix_s: the part of a step that frozen layers take.
        step_s: a whole step.
        transition_s: before its first step.
        seconds: all of it.
    """

    num_frozen: int
    length: int
    replicas: int
    num_micro_batches: int
    prefix_s: float
    step_s: float
    transition_s: float
    seconds: float


@dataclass(frozen=True)
class PublishedSystem:
    """Hold what the published system's runs are simulated with.

    Args:
        profile: a device's costs.
        tables: samples/s by K and M.
        frozen_cost: Algorithm 1's lambda; 0 gives the paper's K.
        cache_read_s: of a sample; None takes the frozen forward of CACHE_FROM layers.
        host_s: of a micro-batch through all layers, in the process that drives the pipeline.
    """

    profile: Profile
    tables: Mapping[int, Mapping[int, float]]
    frozen_cost: float = 0.0
    cache_read_s: float | None = None
    host_s: float = HOST_S

    def run(self, parts: Parts) -> list[Epoch]:
        """Simulate a run by the published schedule of freezing."""
        epochs: list[Epoch] = []
        before = 0
        for num_frozen in published_frozen():
            now = num_frozen if parts.freeze else 0
            epochs.append(self._epoch(parts, before, now))
            before = now
        return epochs

    def _epoch(self, parts: Parts, before: int, num_frozen: int) -> Epoch:
        devices, request = CLUSTER.slots_per_node, replace(START, num_frozen=num_frozen)
        if parts.auto_pipe:
            devices = plan_as_published(self.profile, request, frozen_cost=self.frozen_cost).length
        replicas = CLUSTER.num_slots // devices if parts.auto_dp else CLUSTER.nodes
        # Frozen layers leave the pipeline; where nothing packs it, devices without a layer idle.
        length = min(devices, sum(cost.layer >= num_frozen for cost in self.profile.sublayers))
        prefix_s = self._prefix_s(before, num_frozen, cached=parts.auto_cache)
        count = self.best_count(length)
        step_s = prefix_s + self.pipeline_s(num_frozen, length, replicas, count)
        num_steps = math.ceil(NUM_SAMPLES / (BATCH * replicas))
        moved_s = 0.0 if num_frozen == before else TRANSITION_S[devices]
        seconds = num_steps * step_s + moved_s
        return Epoch(num_frozen, length, replicas, count, prefix_s, step_s, moved_s, seconds)

    def best_count(self, length: int) -> int:
        """Return M for K; lengths that were not profiled take their longer neighbour's M / K."""
        profiled = min(other for other in self.tables if other >= length)
        return best_first(self.tables[profiled])[0] // profiled * length

    def pipeline_s(self, num_frozen: int, length: int, replicas: int, count: int) -> float:
        """Return the seconds of a step after the frozen layers' forward."""
        slots = length * replicas // CLUSTER.nodes
        request = PlanRequest(
            length * replicas, slots, BATCH * replicas, num_frozen, prefix_cached_s=0.0
        )
        cuts = published_split(self.profile, num_frozen, length, frozen_cost=self.frozen_cost)
        step_s = predict(
            replace(self.profile, all_reduce=RingCost(CLUSTER.link, CLUSTER.node_link)),
            request,
            boundaries=cuts,
            num_micro_batches=count,
            schedule="gpipe",
        ).predicted_step_s
        return step_s + _host_s(self.host_s, length, count) * (1 - num_frozen / NUM_LAYERS)

    def _prefix_s(self, before: int, num_frozen: int, *, cached: bool) -> float:
        """Return the seconds of a batch's frozen layers, on one device and in one piece.

        A cached sample is read as it was in the epoch before; layers frozen since are computed.
        """
        whole_s = self.profile.prefix_s(num_frozen, BATCH)
        if not cached or before < CACHE_FROM:
            return whole_s
        if self.cache_read_s is None:
            read_s = self.profile.prefix_s(CACHE_FROM, BATCH)
        else:
            read_s = BATCH * self.cache_read_s
        return min(whole_s, read_s + self.profile.prefix_s(num_frozen, BATCH, above=before))


def published_system(profile: Profile, *, host_s: float = HOST_S) -> PublishedSystem:
    """Profile the throughputs, once for each K, as the published system does at its start."""
    batch = START.global_batch
    tables = {
        length: {
            count: batch / (batch / rate + _host_s(host_s, length, count))
            for count, rate in throughput_table(profile, START, length).items()
        }
        for length in (8, 4, 2, 1)
    }
    return PublishedSystem(profile, tables, host_s=host_s)


def _host_s(micro_batch_s: float, length: int, count: int) -> float:
    """Return the seconds that a step takes longer because one process drives all its stages."""
    return micro_batch_s * count if length > 1 else 0.0


def total_s(epochs: Sequence[Epoch]) -> float:
    """Return the seconds of a run."""
    return sum(epoch.seconds for epoch in epochs)
