"""Prove that workers of several chunks, linked in a ring, compute what the plain model does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.engine import StageReport, StageRun, run_chunks
from autopipe.schedule import interleaved
from tests.helpers.marks import slow
from tests.helpers.pool import Pool
from tests.helpers.stages import StackWork, connect_chunks, layers_of, stage_model

NUM_CHUNKS = 2
Trained = tuple[dict[str, Tensor], tuple[StageReport, ...]]


def train(steps: tuple[tuple[int, ...], ...], num_frozen: int, checkpoint: bool) -> list[Trained]:
    """Take steps over the same links; return each one's gradients of this worker's chunks."""
    worker, num_workers, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    links, found = connect_chunks(group, NUM_CHUNKS), []
    for sizes in steps:
        model = stage_model()
        model[:num_frozen].requires_grad_(False)
        recomputed = range(len(sizes)) if checkpoint else ()
        program = interleaved(num_workers, len(sizes), recomputed=recomputed)[worker]
        chunks, own = [], set[int]()
        for chunk in range(NUM_CHUNKS):
            stage = chunk * num_workers + worker
            layers = layers_of(model, stage, NUM_CHUNKS * num_workers)
            own |= {id(parameter) for parameter in layers.parameters()}
            part = tuple(ins for ins in program if ins.chunk == chunk)
            chunks.append(StageRun(part, StackWork(layers, sizes), links[chunk], sizes))
        reports = run_chunks(program, chunks)
        gradients = {n: p.grad for n, p in model.named_parameters() if id(p) in own}
        found.append(({n: grad for n, grad in gradients.items() if grad is not None}, reports))
    return found


def plain_gradients(sizes: tuple[int, ...], num_frozen: int) -> dict[str, Tensor]:
    model = stage_model()
    model[:num_frozen].requires_grad_(False)
    work = StackWork(model, sizes)
    nn.functional.cross_entropy(
        model(torch.cat(work.x)), torch.cat(work.y), reduction="sum"
    ).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("num_workers", "num_frozen", "checkpoint"),
    [(2, 0, False), (2, 0, True), (2, 3, False), (4, 0, False), slow(4, 3, True)],
)
def test_interleaved_gradients_equal_the_plain_models_for_every_parameter(
    request: pytest.FixtureRequest, num_workers: int, num_frozen: int, checkpoint: bool
) -> None:
    pool: Pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[num_workers])
    # M = K, 2 K and 4 K; micro-batches are uneven.
    steps = tuple(tuple(1 + i % 3 for i in range(n * num_workers)) for n in (1, 2, 4))
    workers = pool.run(train, steps, num_frozen, checkpoint)
    for number, sizes in enumerate(steps):
        expected = plain_gradients(sizes, num_frozen)
        ours = [trained[number][0] for trained in workers]
        merged = {name: value for own in ours for name, value in own.items()}
        # Each parameter lies on one worker.
        assert len(merged) == sum(map(len, ours))
        assert merged.keys() == expected.keys()
        for name, value in merged.items():
            # Float64, summed in another order.
            torch.testing.assert_close(value, expected[name], rtol=1e-7, atol=1e-9)


def test_each_chunk_keeps_fewer_graphs_than_there_are_micro_batches(two_ranks: Pool) -> None:
    ((_, first),), ((_, last),) = two_ranks.run(train, ((1,) * 8,), 0, False)
    assert [report.peak_in_flight for report in (*first, *last)] == [4, 2, 3, 1]
