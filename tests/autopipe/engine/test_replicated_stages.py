"""Prove that stages of several processes, and stages without flushes, compute the same."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe import StashedPipeline
from autopipe.engine import (
    Link,
    Peer,
    ProcessLinkAbove,
    ProcessLinkBelow,
    Receiver,
    RoutedLink,
    Sender,
    StageLinks,
    StageRun,
)
from autopipe.schedule import StageWorkers, replicated_one_f_one_b, unflushed
from autopipe.stashing import StagePlace, StashedWork
from tests.helpers.models import tiny_data
from tests.helpers.pool import Pool
from tests.helpers.stages import CPU, StackWork, connect, layers_of, place, stage_model

SIZES = (3, 1, 2, 2, 3, 1, 2)


def peer(rank: int, tag: int) -> Peer:
    group = dist.group.WORLD
    assert group is not None
    return Peer(rank, group, tag, "activations" if tag == 1 else "gradients", 30.0)


def link(rank: int, *, above: bool) -> Link:
    if above:
        return ProcessLinkAbove(Sender(peer(rank, 1)), Receiver(peer(rank, 2), CPU))
    return ProcessLinkBelow(Receiver(peer(rank, 1), CPU), Sender(peer(rank, 2)))


def routes(workers: StageWorkers, stage: int) -> StageLinks:
    """Link this rank, a worker of a stage, to all workers of the neighbouring stages."""

    def to(other: int) -> RoutedLink:
        first = sum(workers.replicas[:other])
        ranks = range(first, first + workers.replicas[other])
        return RoutedLink([link(rank, above=other > stage) for rank in ranks])

    last = len(workers.replicas) - 1
    return StageLinks(
        to(stage - 1) if stage > 0 else None, to(stage + 1) if stage < last else None
    )


def train_replicated(replicas: tuple[int, ...]) -> float:
    """Run two steps; return the largest difference from the plain model's gradient."""
    workers, worst = StageWorkers(replicas), 0.0
    stage = workers.stages[dist.get_rank()]
    groups = [
        dist.new_group([rank for rank in range(sum(replicas)) if workers.stages[rank] == one])
        for one in range(len(replicas))
    ]
    links = routes(workers, stage)
    for sizes in (SIZES, SIZES[:5]):
        model = stage_model().double()
        plain = stage_model().double()
        layers = layers_of(model, stage, len(replicas))
        work = DoubleWork(layers, sizes)
        program = replicated_one_f_one_b(replicas, len(sizes))[dist.get_rank()]
        StageRun(program, work, links, sizes).run()
        for x, y in zip(work.x, work.y, strict=True):
            nn.functional.cross_entropy(plain(x), y, reduction="sum").backward()
        expected = layers_of(plain, stage, len(replicas))
        for ours, theirs in zip(layers.parameters(), expected.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            dist.all_reduce(ours.grad, group=groups[stage])
            worst = max(worst, float((ours.grad - theirs.grad).abs().max()))
    return worst


class DoubleWork(StackWork):
    """Compute in float64, and say what the whole pipeline has of a loss."""

    def __init__(self, layers: nn.Module, sizes: tuple[int, ...]) -> None:
        super().__init__(layers, sizes)
        self.x = tuple(part.double() for part in self.x)


@pytest.mark.parametrize("replicas", [(2, 1, 1), (1, 3), (2, 2), (4,)])
def test_replicated_stages_sum_to_the_plain_model_s_gradients(
    four_ranks: Pool, replicas: tuple[int, ...]
) -> None:
    assert max(four_ranks.run(train_replicated, replicas)) < 1e-12


NUM_BATCHES, CHUNKS = 6, 3


def batches() -> list[tuple[Tensor, Tensor]]:
    x, y = tiny_data(num_samples=NUM_BATCHES * 2 * CHUNKS).tensors
    return list(zip(x.double().split(2 * CHUNKS), y.split(2 * CHUNKS), strict=True))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_unflushed(versions: str) -> tuple[dict[str, Tensor], int]:
    """Train on a stream of batches; return this stage's weights, by their place in the model."""
    stage, length, group = place()
    model = stage_model().double()
    layers = layers_of(model, stage, length)
    optimizer = sgd(list(layers.parameters()))
    work = MeanWork(layers, (2,) * CHUNKS * NUM_BATCHES)
    stashed = StashedWork(
        work,
        [layers],
        layers.parameters(),
        place=StagePlace(stage, length, CHUNKS),
        versions=versions,
        update=lambda _: optimizer.step(),
    )
    program = unflushed(length, NUM_BATCHES, CHUNKS)[stage]
    StageRun(program, stashed, connect(group), (2,) * CHUNKS * NUM_BATCHES).run()
    own = {id(parameter) for parameter in layers.parameters()}
    found = {name: p.detach() for name, p in model.named_parameters() if id(p) in own}
    return found, stashed.peak_versions


class MeanWork(DoubleWork):
    def finish(self, micro_batch: int, outputs: object) -> Tensor | None:
        total = super().finish(micro_batch, outputs)  # type: ignore[arg-type]
        return None if total is None else total / (2 * CHUNKS)


@pytest.mark.parametrize("versions", ["stashed", "vertical_sync", "double_buffered"])
def test_processes_without_flushes_compute_what_threads_do(
    four_ranks: Pool, versions: str
) -> None:
    model = stage_model().double()
    pipeline = StashedPipeline(
        model, [2, 2, 2, 2], optimizer=sgd, devices=["cpu"] * 4, chunks=CHUNKS, versions=versions
    )
    loss_fn = partial(nn.functional.cross_entropy, reduction="sum")
    pipeline.train_on(batches(), lambda output, y: loss_fn(output, y) / len(y))
    found = four_ranks.run(train_unflushed, versions)
    assert [peak for _, peak in found] == pipeline.peak_versions
    weights = {name: value for own, _ in found for name, value in own.items()}
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-12, atol=1e-14)
