"""Training without flushes computes what its formulas say, bit for bit, and holds what they say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from autopipe import StashedPipeline
from autopipe.stashing import StagePlace, most_versions

BATCHES, SAMPLES = 7, 12
BALANCES = {1: [6], 2: [4, 2], 3: [2, 2, 2]}


def model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [layer for _ in range(3) for layer in (nn.Linear(5, 5), nn.Tanh())]
    return nn.Sequential(*layers).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        tuple(torch.randn(2, SAMPLES, 5, dtype=torch.float64, generator=generator))  # type: ignore[misc]
        for _ in range(BATCHES)
    ]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def delay(versions: str, stage: int, num_stages: int) -> int:
    """Return how many micro-batches a stage's weights are behind, as the papers' formulas say."""
    return num_stages - 1 - stage if versions == "stashed" else num_stages - 1


def by_hand(
    module: nn.Sequential,
    balance: list[int],
    chunks: int,
    versions: str,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> list[float]:
    """Train a module by delayed gradients in a plain loop, with every version ever kept."""
    ends = [sum(balance[: n + 1]) for n in range(len(balance))]
    stages = [module[a:b] for a, b in pairwise((0, *ends))]
    optimizers = [optimizer(list(stage.parameters())) for stage in stages]
    history = [[copy.deepcopy(stage) for stage in stages]]
    losses, number = [], 0
    for batch, (inputs, targets) in enumerate(batches()):
        total = 0.0
        for x, y in zip(inputs.chunk(chunks), targets.chunk(chunks), strict=True):
            used = []
            for s in range(len(stages)):
                if versions == "double_buffered":
                    version = max(0, batch - (len(stages) > 1))
                else:
                    done = max(0, number - delay(versions, s, len(stages)))
                    version = done // chunks
                used.append(copy.deepcopy(history[version][s]))
            value = x
            for stage in used:
                value = stage(value)
            loss = loss_fn(value, y) * (len(x) / SAMPLES)
            loss.backward()
            total += loss.item()
            for stage, old in zip(stages, used, strict=True):
                for p, q in zip(stage.parameters(), old.parameters(), strict=True):
                    p.grad = q.grad if p.grad is None else p.grad + q.grad
            number += 1
        for one in optimizers:
            one.step()
            one.zero_grad()
        history.append([copy.deepcopy(stage) for stage in stages])
        losses.append(total)
    return losses


@pytest.mark.parametrize("versions", ["stashed", "vertical_sync", "double_buffered"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [momentum, adam])
def test_weights_are_those_of_delayed_gradients(
    versions: str, chunks: int, num_stages: int, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    if versions == "double_buffered" and chunks < num_stages - 1:
        pytest.skip("two versions do not suffice")
    expected, actual = model(), model()
    losses = by_hand(expected, BALANCES[num_stages], chunks, versions, optimizer)
    pipeline = StashedPipeline(
        actual,
        BALANCES[num_stages],
        optimizer=optimizer,
        devices=["cpu"] * num_stages,
        chunks=chunks,
        versions=versions,
    )
    assert pipeline.train_on(batches(), loss_fn) == pytest.approx(losses, rel=1e-12)
    for (name, p), q in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q), name
    places = [StagePlace(stage, num_stages, chunks) for stage in range(num_stages)]
    assert pipeline.peak_versions == [most_versions(versions, place) for place in places]
