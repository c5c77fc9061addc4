"""Simulate a run on a described cluster, with some of the system's parts left out.

What is simulated is what our planner predicts for every epoch. Transitions, evaluations and the
reading of samples are in none of it; nor is the hosts' memory, which is to hold a node's cache.

A node's cache holds what that node has trained on: after e epochs of shuffled samples it has one
with probability 1 - (1 - 1 / nodes) ** e. A row is written as fast as it is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autopipe.plan import PipelinePlan, PlanRequest
from experiments.ablation.parts import ABLATION, ALL, NOTHING_FROZEN, Parts, PartsRow
from pipetransformer.cli import Place
from pipetransformer.config import usual_prefix_chunk
from pipetransformer.elastic import PlanSituation, fastest_per_sample


@dataclass(frozen=True)
class SimulatedTraining:
    """State what is trained.

    Args:
        num_samples: of an epoch.
        global_batch: samples of a step; where `scale_batch`, of every pipeline.
        frozen: layers by epoch.
        micro_batches: M; None lets the planner choose.
        cached_from: frozen layers from which on they are cached.
    """

    num_samples: int
    global_batch: int
    frozen: tuple[int, ...]
    scale_batch: bool = False
    micro_batches: int | None = None
    cached_from: int = 1


@dataclass(frozen=True)
class SimulatedEpoch:
    """State an epoch: layers frozen, the plan, the samples of a step, and seconds."""

    num_frozen: int
    plan: PipelinePlan
    replicas: int
    batch: int
    seconds: float


def simulate(place: Place, training: SimulatedTraining, parts: Parts) -> list[SimulatedEpoch]:
    """Return the epochs of a run; each takes the plan with the highest throughput.

    Raises:
        ValueError: nothing fits the devices' memory.
    """
    epochs: list[SimulatedEpoch] = []
    before = num_filling = 0
    for frozen in training.frozen:
        now = frozen if parts.freeze else 0
        prefix_s = None
        if parts.auto_cache and now >= training.cached_from and _pays(place, training, now):
            hits = 1 - (1 - 1 / num_nodes(place)) ** num_filling
            prefix_s = _cached_s(place, training, before=before, num_frozen=now, hits=hits)
            num_filling += 1
        epochs.append(_epoch(place, training, parts, now, prefix_s))
        before = now
    return epochs


def total_s(epochs: Sequence[SimulatedEpoch]) -> float:
    """Return the seconds of a run."""
    return sum(epoch.seconds for epoch in epochs)


def _epoch(
    place: Place,
    training: SimulatedTraining,
    parts: Parts,
    num_frozen: int,
    cached_s: float | None,
) -> SimulatedEpoch:
    """Simulate an epoch in which a sample's frozen part takes so many seconds with a cache."""
    profile = place.profile
    active = sum(cost.layer >= num_frozen for cost in profile.sublayers)
    fixed = max(n for n in range(1, place.slots_per_node + 1) if n <= active)
    counts = None if training.micro_batches is None else (training.micro_batches,)
    request = PlanRequest(
        place.num_slots,
        place.slots_per_node,
        training.global_batch,
        num_frozen,
        memory_limit_bytes=place.memory_bytes,
        lengths=None if parts.auto_pipe else (fixed,),
        max_replicas=None if parts.auto_dp else num_nodes(place),
        micro_batches=counts,
        prefix_chunk=_chunk(place, training),
        prefix_cached_s=cached_s,
    )
    plan = fastest_per_sample(
        PlanSituation(0, 0, profile, request, None, lambda plan: 0.0, training.scale_batch)
    )
    replicas = request.replicas_of(plan.length)
    batch = training.global_batch * (replicas if training.scale_batch else 1)
    seconds = training.num_samples / batch * plan.predicted_step_s
    return SimulatedEpoch(num_frozen, plan, replicas, batch, seconds)


def _pays(place: Place, training: SimulatedTraining, num_frozen: int) -> bool:
    """Return whether a sample's frozen part is read faster than computed."""
    chunk = _chunk(place, training)
    read_s = _cached_s(place, training, before=num_frozen, num_frozen=num_frozen, hits=1.0)
    return read_s < place.profile.prefix_s(num_frozen, chunk) / chunk


def _cached_s(
    place: Place, training: SimulatedTraining, *, before: int, num_frozen: int, hits: float
) -> float:
    """Return a sample's mean seconds of frozen layers in an epoch that reads and fills a cache.

    A hit is read as it was in the epoch before, and what froze since runs; a miss runs it all.
    What ran is written.
    """
    profile, rate = place.profile, place.profile.cache_bytes_per_s
    assert rate is not None
    chunk = _chunk(place, training)
    written_s = profile.prefix_bytes(num_frozen) / rate
    hit_s = profile.prefix_bytes(before) / rate
    if before != num_frozen:
        hit_s += profile.prefix_s(num_frozen, chunk, above=before) / chunk + written_s
    miss_s = profile.prefix_s(num_frozen, chunk) / chunk + written_s
    return hits * hit_s + (1 - hits) * miss_s


def _chunk(place: Place, training: SimulatedTraining) -> int:
    return usual_prefix_chunk(training.global_batch, place.num_slots)


def simulate_parts(place: Place, training: SimulatedTraining) -> list[PartsRow]:
    """Simulate all rows of the ablation, each also with a batch that grows."""
    return [_row(name, place, training, parts) for name, parts in ABLATION.items()]


def sweep(
    place: Place, training: SimulatedTraining, what: str, alphas: Sequence[str]
) -> list[PartsRow]:
    """Simulate a first row, and others with one thing varied.

    Alpha and the first cached layer are varied with all parts on, beside nothing frozen; M with
    nothing frozen in a pipeline over all devices of a node, beside M = K.

    Args:
        place, training: where, and what.
        what: "alpha", "micro_batches" or "cached_from".
        alphas: of the published rule, as fractions.
    """
    length, most = place.slots_per_node, max(training.frozen)
    layers, epochs = num_layers(place), len(training.frozen)
    by_alpha = {a: frozen_by_epoch(float(Fraction(a)), layers, epochs) for a in alphas}
    variants = {
        "alpha": {
            f"alpha = {alpha}": replace(training, frozen=frozen)
            for alpha, frozen in by_alpha.items()
        },
        "micro_batches": {
            f"M = {count}": replace(training, micro_batches=count)
            for count in range(length, 6 * length + 1, length)
        },
        "cached_from": {
            f"cached from {first}": replace(training, cached_from=first)
            for first in range(1, most + 1)
        },
    }[what]
    if what == "micro_batches":
        fixed = ABLATION[NOTHING_FROZEN]
        return [_row(name, place, one, fixed) for name, one in variants.items()]
    first = _row(NOTHING_FROZEN, place, training, ABLATION[NOTHING_FROZEN])
    return [first, *(_row(name, place, one, ABLATION[ALL]) for name, one in variants.items())]


def num_nodes(place: Place) -> int:
    """Count the nodes, the last of which may not be full."""
    return -(-place.num_slots // place.slots_per_node)


def num_layers(place: Place) -> int:
    """Return how many layers the model has that can freeze."""
    return max(cost.layer for cost in place.profile.sublayers)


def frozen_by_epoch(alpha: float, num_layers: int, num_epochs: int) -> tuple[int, ...]:
    """Return the frozen layers of every epoch: the published rule's closed form, rounded up."""
    levels = (num_layers * (1 - (1 - alpha) ** epoch) for epoch in range(num_epochs))
    return tuple(math.ceil(level - 1e-9) for level in levels)


def _row(name: str, place: Place, training: SimulatedTraining, parts: Parts) -> PartsRow:
    # With the replicas of the start, one a node, the batches are equal.
    of_pipeline = max(1, training.global_batch // num_nodes(place))
    grows = replace(training, scale_batch=True, global_batch=of_pipeline)
    epochs, grown = (simulate(place, one, parts) for one in (training, grows))
    return PartsRow(
        name,
        (total_s(epochs),),
        (total_s(grown),),
        (),
        tuple(f"{epoch.plan.length}x{epoch.replicas}" for epoch in epochs),
        tuple(epoch.batch / epoch.plan.predicted_step_s for epoch in epochs),
    )
