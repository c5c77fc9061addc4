"""Prove what a mini-batch runs and repeats, what it keeps, and what is left when it fails.

That it computes what the plain module does is in tests/conformance/test_transparency.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autopipe.engine.current_micro_batch import is_recomputing
from autopipe.gpipe.module import GPipe
from tests.helpers.models import NUM_CLASSES, NUM_FEATURES, tiny_data, tiny_model
from tests.helpers.pipes import MODES
from tests.helpers.pool import Pool


def batch(num_samples: int = 7) -> tuple[Tensor, Tensor]:
    x, y = tiny_data(num_samples=num_samples).tensors
    return x, y


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


@dataclass(frozen=True)
class Counts:
    """Say how often a parameter's hooks were called."""

    tensor_hook: int
    accumulate_hook: int


def ddp_gradients(checkpoint: str) -> tuple[list[list[float]], Counts]:
    """Train a GPipe module inside DistributedDataParallel on this rank's half of a batch."""
    rank, counts = dist.get_rank(), [0, 0]
    ours = GPipe(tiny_model(), [3, 3], chunks=2, checkpoint=checkpoint)
    wrapped = DistributedDataParallel(ours)
    parameter = ours[0].weight
    assert isinstance(parameter, nn.Parameter)
    parameter.register_hook(lambda _: counts.__setitem__(0, counts[0] + 1))
    parameter.register_post_accumulate_grad_hook(lambda _: counts.__setitem__(1, counts[1] + 1))
    x, y = batch(8)
    half = slice(4 * rank, 4 * rank + 4)
    nn.functional.cross_entropy(wrapped(x[half]), y[half]).backward()
    values = [gradient.flatten().tolist() for gradient in gradients(ours) if gradient is not None]
    return values, Counts(*counts)


@pytest.mark.parametrize("checkpoint", MODES)
def test_distributed_data_parallel_trains_a_gpipe_module(two_ranks: Pool, checkpoint: str) -> None:
    plain, (x, y) = tiny_model(), batch(8)
    nn.functional.cross_entropy(plain(x), y).backward()
    for values, counts in two_ranks.run(ddp_gradients, checkpoint):
        assert counts == Counts(1, 1)
        for mine, other in zip(values, gradients(plain), strict=True):
            assert other is not None
            torch.testing.assert_close(
                torch.tensor(mine, dtype=torch.float64), other.flatten(), rtol=1e-7, atol=1e-9
            )


class Fails(nn.Module):
    """Raise in the backward."""

    def forward(self, hidden: Tensor) -> Tensor:
        return FailingBackward.apply(hidden)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("deliberate")


def test_frozen_partitions_are_neither_repeated_nor_sent_gradients() -> None:
    repeated: list[int] = []

    class Notes(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            if is_recomputing():
                repeated.append(1)
            return hidden

    frozen = nn.Linear(NUM_FEATURES, 4).double().requires_grad_(False)
    head = nn.Linear(4, NUM_CLASSES).double()
    ours = GPipe(nn.Sequential(frozen, Notes(), head), [2, 1], chunks=3, checkpoint="always")
    x, y = batch()
    nn.functional.cross_entropy(ours(x), y).backward()
    assert repeated == []
    assert frozen.weight.grad is None and head.weight.grad is not None


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_a_tensor_that_a_forward_leaves_in_its_layer_does_not_join_the_next_step(
    balance: list[int], checkpoint: str
) -> None:
    class Leaves(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.feature = super().forward(x)
            return self.feature

    ours = GPipe(
        nn.Sequential(Leaves(3, 3), Leaves(3, 3)), balance, chunks=2, checkpoint=checkpoint
    )
    for _ in range(2):
        ours(torch.ones(4, 3)).sum().backward()


@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_a_failed_backward_is_not_continued(balance: list[int]) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), Fails())
    ours = GPipe(layers, balance, chunks=3, checkpoint="never")
    loss = ours(torch.ones(6, 3)).sum()
    with pytest.raises(ArithmeticError, match="deliberate"):
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run its forward again"):
        loss.backward(retain_graph=True)
    assert all(gradient is None for gradient in gradients(ours))


def test_a_step_in_inference_mode_is_refused() -> None:
    ours = GPipe(nn.Sequential(nn.Linear(3, 3)), [1])
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference mode"):
        ours.step(torch.ones(2, 3), torch.ones(2, 3), nn.functional.mse_loss)
