"""Measure, on the live devices, what the planner needs to know.

It takes a few seconds before the first step, and is repeated where a run's steps no longer take
what they took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from autodp import broadcast_json, gather_json
from autopipe import (
    Profile,
    ProfiledSublayer,
    SublayerCost,
    chain_seconds,
    merge_profiles,
    profile_sublayers,
)
from pipetransformer.adapters import LayeredModel
from pipetransformer.data import Batch
from pipetransformer.measure_compute import measure_company, measure_update
from pipetransformer.measure_network import measure_agreement, measure_links, measure_sums
from pipetransformer.measure_reading import measure_rows, measure_samples
from pipetransformer.task import Task
from pipetransformer.world import World

_BUDGET_S = 4.0
"""Seconds that timing the sublayers may take, beyond which larger micro-batches are left out."""

MEASURE_GUESS_S = 2 * _BUDGET_S
"""What measuring takes, until it was done."""

_MOST_ROUNDS, _MOST_SIZES = 7, 6


@dataclass(frozen=True)
class Measurements:
    """Hold the profile, and the rate at which a cached row can be read."""

    profile: Profile
    copy_bytes_per_s: float


def measure(task: Task, world: World, read: Callable[[Tensor], Batch]) -> Measurements:
    """Measure sublayers, optimizer, links and memory; every rank measures, all get the medians.

    It may be called while training: sublayers that a rank does not hold get random weights for
    as long, and everything is left as it was. Collective.

    Args:
        task, world: what is trained, and where.
        read: reads samples of the training set.
    """
    # Start together: the ranks of a node slow each other down.
    gather_json(None, group=world.group)
    with _whole(task, world.device):
        batches, rounds = _choose_batches(task, world, read)
        chain = profile_sublayers(_sublayers(task), batches, repeats=rounds)
        lengthening, alone_share = measure_company(_sublayers(task), batches, chain, world)
        update_s, state_ratio = measure_update(task)
        work = partial(_forward, _sublayers(task), batches[0])
        link, node_link = measure_links(world, work)
        agreement_s = measure_agreement(world, work)
    costs = tuple(_with_state(cost, state_ratio) for cost in chain.costs)
    sizes = tuple(len(next(iter(batch.values()))) for batch in batches)
    fetch_s, read_s = measure_samples(read, sizes[-1])
    cached_fetch_s, cached_byte_s = measure_rows()
    own = Profile(
        batch_sizes=sizes,
        sublayers=costs,
        read_s=read_s,
        fetch_s=fetch_s,
        cached_fetch_s=cached_fetch_s,
        alone_share=alone_share,
        optimizer_s_per_byte=update_s,
        step_overhead_s=2 * agreement_s,
        link=link,
        node_link=node_link,
        all_reduce=measure_sums(
            world,
            sum(cost.gradient_bytes for cost in costs),
            timeout_s=task.config.setup_timeout_s,
        ),
    )
    gathered = gather_json([own.to_json(), 1 / cached_byte_s], group=world.group)
    merged = merge_profiles([Profile.from_json(values) for values, _ in gathered])
    rate = sorted(rate for _, rate in gathered)[len(gathered) // 2]
    merged = merged.lengthened(lengthening)
    values = broadcast_json([merged.to_json(), rate], group=world.group)
    return Measurements(Profile.from_json(values[0]), values[1])


@contextmanager
def _whole(task: Task, device: torch.device) -> Iterator[None]:
    """Lend the whole model on a device, trainable as the user left it."""
    model = task.model
    absent = [
        i for i in range(len(model.sublayers)) if any(t.is_meta for t in model.tensors(i).values())
    ]
    for index in absent:
        _fill(model, index, device)
    parameters = dict(model.model.named_parameters())
    flags = {name: parameter.requires_grad for name, parameter in parameters.items()}
    came_from_cpu = all(p.device.type == "cpu" for p in parameters.values())
    try:
        model.model.to(device)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in task.trainable)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(flags[name])
        if came_from_cpu:
            model.model.to("cpu")
        for index in absent:
            model.release(index)


def _fill(model: LayeredModel, index: int, device: torch.device) -> None:
    """Give a released sublayer weights that compute at the speed of real ones."""
    model.materialize(index, device)
    # A generator of its own leaves the caller's random numbers as they were.
    generator = torch.Generator(device).manual_seed(index)
    with torch.no_grad():
        for tensor in model.tensors(index).values():
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                tensor.normal_(0.0, 0.02, generator=generator)
            else:
                tensor.fill_(1)


def _choose_batches(
    task: Task, world: World, read: Callable[[Tensor], Batch]
) -> tuple[list[Batch], int]:
    """Read batches of the micro-batch sizes to measure, ascending; say how often to time them.

    Sizes are halves of the largest that a sensible plan runs; the budget may exclude the larger
    ones, for all ranks alike.
    """
    per_rank = -(-task.config.batch_size // world.size)
    largest = min(task.config.batch_size, 2 * per_rank)
    sizes = sorted({max(1, largest >> halvings) for halvings in range(_MOST_SIZES)})
    sublayers, batches, round_s = _sublayers(task), list[Batch](), 0.0
    for size in sizes:
        batch = {name: t.to(world.device) for name, t in read(torch.arange(size)).items()}
        seconds = max(gather_json(chain_seconds(sublayers, batch), group=world.group))
        if batches and 2 * (round_s + seconds) > _BUDGET_S:
            break
        batches.append(batch)
        round_s += seconds
    return batches, max(1, min(_MOST_ROUNDS, int(_BUDGET_S / max(round_s, 1e-9))))


def _sublayers(task: Task) -> list[ProfiledSublayer]:
    return [
        ProfiledSublayer(sub.name, sub.layer, sub.module, _caller(task, index))
        for index, sub in enumerate(task.model.sublayers)
    ]


def _caller(task: Task, index: int) -> Callable[[Tensor | None, Mapping[str, Tensor]], Tensor]:
    """Return what runs a sublayer; the last one's loss counts with it."""
    model = task.model
    names = model.targets

    def call(hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
        output = model.call(index, batch if hidden is None else hidden, sides=batch)
        if index < len(model.sublayers) - 1:
            return output
        targets = batch[names[0]] if len(names) == 1 else {name: batch[name] for name in names}
        loss = task.loss_fn(output, targets)
        return loss[0] if isinstance(loss, tuple) else loss

    return call


def _forward(sublayers: Sequence[ProfiledSublayer], batch: Batch) -> None:
    hidden: Tensor | None = None
    with torch.no_grad():
        for sublayer in sublayers:
            hidden = sublayer.call(hidden, batch)


def _with_state(cost: SublayerCost, ratio: float) -> SublayerCost:
    return replace(cost, optimizer_bytes=round(ratio * cost.gradient_bytes))
