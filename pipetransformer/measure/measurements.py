"""Measure, on the live devices, what the planner needs to know.

It takes a few seconds before the first step; later, steps themselves correct the costs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from autodp import broadcast_json, gather_json
from autopipe.profile import (
    MICRO_BATCH_S,
    MeasuredChain,
    Profile,
    ProfiledSublayer,
    SublayerCost,
    chain_seconds,
    join_chains,
    join_sizes,
    merge,
    profile_sublayers,
    uncertainty,
)
from pipetransformer.feed import Batch
from pipetransformer.measure.kinds import choose_sublayers
from pipetransformer.measure.link_times import measure_messages, measure_sums
from pipetransformer.measure.reading_times import measure_rows, measure_samples
from pipetransformer.measure.spans import Need, cut_spans, forward, run_spans, sublayer_needs
from pipetransformer.measure.sublayer_times import (
    measure_company,
    measure_update,
    time_alone,
    untouched_bytes,
)
from pipetransformer.model import Task
from pipetransformer.processes import World, free_bytes, tightest

_BUDGET_S = 1.5
"""Seconds that timing the sublayers may take; larger micro-batches are left out beyond it."""

_MOST_ROUNDS = 5

_SHRINKS = (4, 2, 0)
"""Halvings of the largest micro-batch, to the sizes that are measured."""

_WORK_S = 0.01
"""Seconds computed between two messages while links are timed, so that caches go cold."""


def measure(
    task: Task, world: World, read: Callable[[Tensor], Batch], *, held_bytes: int = 0
) -> Profile:
    """Measure sublayers, optimizer, links and memory; every rank gets the medians. Collective.

    It may be called while training, and leaves everything as it was. Sublayers that a rank does
    not hold get random weights meanwhile. A model that does not fit is measured in parts.

    Args:
        read: reads samples of the training set.
        held_bytes: what training holds on this rank's device meanwhile.
    """
    cut = _cut_alike(task, world, read)
    whole_spans_of = _choose_spans(task, world, cut, held_bytes)
    timed_sublayers = choose_sublayers(task, world, cut, whole_spans_of)
    spans_of = {size: timed_sublayers.within(spans) for size, spans in whole_spans_of.items()}
    batches, rounds = _choose_batches(task, world, cut, spans_of)
    timed = _measure_chain(task, world, batches=batches, spans_of=spans_of, rounds=rounds)
    smallest, largest = min(batches), max(batches)
    alone = partial(time_alone, world=world, repeats=max(1, rounds // 2))
    alone_s = run_spans(task, world.device, spans_of[largest], [batches[largest]], alone)
    idle_node_share = measure_company(timed, alone_s, world)
    update_s, state_ratio = measure_update(task, world.device)
    untouched = untouched_bytes(task, world, batches[largest], whole_spans_of[largest])
    costs = _with_bytes(timed_sublayers.for_all(timed.costs), state_ratio, untouched)
    worked = first_sublayers(costs, whole_spans_of[smallest][0], _WORK_S)
    messages = _measure_messages(task, world, batch=batches[smallest], span=worked)
    # Workers read while stages compute, so a step does not wait for them.
    samples: dict[str, Any] = {"fetch_s": 0.0, "read_s": 0.0}
    if not task.config.num_workers:
        samples = measure_samples(read, largest)
    measured_here = Profile(
        batch_sizes=tuple(batches),
        sublayers=costs,
        idle_node_share=idle_node_share,
        optimizer_s_per_byte=update_s,
        all_reduce=measure_sums(
            world,
            sum(cost.gradient_bytes for cost in costs),
            timeout_s=task.config.setup_timeout_s,
        ),
        uncertainty=statistics.median(map(uncertainty, timed.rounds_s)),
        micro_batch_s=MICRO_BATCH_S,
        **messages,
        **samples,
        **measure_rows(task.config.cache_folders[-1], world.device),
    )
    return merge(
        [Profile.from_json(one) for one in gather_json(measured_here.to_json(), group=world.group)]
    ).smoothed()


def first_sublayers(costs: Sequence[SublayerCost], span: range, seconds: float) -> range:
    """Return a span's first sublayers whose forwards take that long together, or all of it."""
    taken_s = accumulate(costs[index].forward_s[0] for index in span)
    missing = sum(one < seconds for one in taken_s)
    return span[: missing + 1]


def _with_bytes(
    costs: Sequence[SublayerCost], state_ratio: float, untouched: Mapping[int, float]
) -> tuple[SublayerCost, ...]:
    """Add to sublayers their optimizer state and the gradients that a step leaves zeros."""
    return tuple(
        replace(
            cost,
            optimizer_bytes=round(state_ratio * cost.gradient_bytes),
            untouched_bytes=min(untouched.get(index, 0.0), cost.gradient_bytes),
        )
        for index, cost in enumerate(costs)
    )


def _measure_chain(
    task: Task,
    world: World,
    *,
    batches: Mapping[int, Batch],
    spans_of: Mapping[int, Sequence[Sequence[int]]],
    rounds: int,
) -> MeasuredChain:
    """Time every sublayer at every size; ranks start together. Collective."""

    def time_span(sublayers: list[ProfiledSublayer], inputs: list[Batch]) -> MeasuredChain:
        # A barrier: the ranks of a node slow each other down, as in training.
        gather_json(None, group=world.group)
        return profile_sublayers(sublayers, inputs, repeats=rounds)

    chains = []
    for spans, sizes in groupby(batches, key=spans_of.__getitem__):
        inputs = [batches[size] for size in sizes]
        chains.append(join_chains(run_spans(task, world.device, spans, inputs, time_span)))
    return join_sizes(chains)


def _measure_messages(task: Task, world: World, *, batch: Batch, span: range) -> dict[str, Any]:
    """Time messages between ranks that compute rank 0's span beside them. Collective."""

    def time_beside_work(subs: list[ProfiledSublayer], inputs: list[Batch]) -> dict[str, Any]:
        return measure_messages(world, partial(forward, subs, inputs[0]))

    span = range(*broadcast_json([span.start, span.stop], group=world.group))
    (costs,) = run_spans(task, world.device, [span], [batch], time_beside_work)
    return costs


Cut = Callable[[int], Batch]
"""Gives the first samples of a batch, on the device."""


def largest_micro_batch(task: Task, world: World) -> int:
    """Return the micro-batch size that is set, or the largest of a sensible plan."""
    batch = task.config.global_batch_size
    # A stage with half the layers may take twice a rank's share.
    return min(batch, task.config.micro_batch_size or 2 * -(-batch // world.size))


def _cut_alike(task: Task, world: World, read: Callable[[Tensor], Batch]) -> Cut:
    """Return what cuts micro-batches from one batch: they are padded alike, as in a step."""
    whole = read(torch.arange(largest_micro_batch(task, world)))
    return lambda size: {name: t[:size].to(world.device) for name, t in whole.items()}


def _choose_spans(
    task: Task, world: World, cut: Cut, held_bytes: int
) -> dict[int, tuple[range, ...]]:
    """Return the micro-batch sizes to measure, ascending, with the spans for each. Collective.

    Sizes are the largest that a sensible plan runs, a quarter and a sixteenth of it. Above a
    rank's share of the batch, a micro-batch occurs only where a stage has at most half the layers.
    It is measured over half of them, as a layer takes longer the more is in memory at once. A size
    is left out where a single sublayer does not fit, except the smallest.
    """
    per_rank = -(-task.config.global_batch_size // world.size)
    sizes = sorted({max(1, largest_micro_batch(task, world) >> halvings) for halvings in _SHRINKS})
    # The tightest rank decides, so that all come to the same spans.
    set_bytes, free = task.config.memory_limit_bytes, free_bytes(world)
    limit_here = tightest((None if set_bytes is None else set_bytes - held_bytes, free))
    least = tightest(gather_json(limit_here, group=world.group))
    limit = math.inf if least is None else least
    needs = [Need(0, 0.0)] * len(task.model.sublayers)
    if limit < math.inf:
        needs = sublayer_needs(task, world.device, cut(1))
    fitting = [size for size in sizes if all(need.at(size) <= limit for need in needs)]
    return {
        size: cut_spans(needs, size, limit, parts=-(-size // per_rank))
        for size in fitting or sizes[:1]
    }


def _choose_batches(
    task: Task,
    world: World,
    cut: Cut,
    spans_of: Mapping[int, Sequence[Sequence[int]]],
) -> tuple[dict[int, Batch], int]:
    """Return batches of the sizes to measure, and how often to time them. Collective.

    The budget may exclude larger sizes, for all ranks alike.
    """
    batches, round_s = dict[int, Batch](), 0.0

    def time_once(subs: list[ProfiledSublayer], inputs: list[Batch]) -> float:
        return chain_seconds(subs, inputs[0])

    for size, spans in spans_of.items():
        batch = cut(size)
        if task.config.compile:  # What compiling takes is no part of the budget, nor of times.
            run_spans(task, world.device, spans, [batch], time_once)
        gather_json(None, group=world.group)
        own_s = run_spans(task, world.device, spans, [batch], time_once)
        seconds = max(gather_json(sum(own_s), group=world.group))
        if batches and 2 * (round_s + seconds) > _BUDGET_S:
            break
        batches[size] = batch
        round_s += seconds
    return batches, max(1, min(_MOST_ROUNDS, int(_BUDGET_S / max(round_s, 1e-9))))
