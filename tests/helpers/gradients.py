"""Give replicas gradients whose sums are known, and look at what they are reduced to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autodp.gradient_reducer import GradientReducer

BUCKET_BYTES = [1, 64, 25 << 20]
WORLD = 4
EVERYBODY = [list(range(WORLD))] * 9
"""The replicas that use each of nine parameters: all of them."""


def make_parameters() -> list[nn.Parameter]:
    """Make parameters of three dtypes, one of them 0-dim, one empty, one not contiguous."""
    f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
    tensors = [
        torch.zeros(3, 4),
        torch.zeros(4),
        torch.zeros((), dtype=f64),
        torch.zeros(2, 5, dtype=bf16),
        torch.zeros(0),
        torch.zeros(5, 2, dtype=f32).t(),
        torch.zeros(7, dtype=f64),
        torch.zeros(1, dtype=bf16),
        torch.zeros(6),
    ]
    return [nn.Parameter(tensor) for tensor in tensors]


def factor(
    index: int, like: Tensor, replica: int, micro_batch: int = 0, *, whole: bool = True
) -> Tensor:
    """Return a replica's gradient; small whole numbers add up exactly in any order."""
    generator = torch.Generator().manual_seed(1000 * replica + 10 * index + micro_batch)
    if whole:
        return torch.randint(-9, 10, like.shape, generator=generator).to(like.dtype)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def backward(
    parameters: Sequence[nn.Parameter],
    used: Sequence[int],
    micro_batch: int = 0,
    *,
    whole: bool = True,
) -> None:
    """Back-propagate a loss whose gradient for each used parameter is its factor."""
    rank = dist.get_rank()
    terms = [
        (parameters[k] * factor(k, parameters[k], rank, micro_batch, whole=whole)).sum()
        for k in used
    ]
    sum(terms, torch.zeros((), dtype=torch.float64)).backward()


def total(index: int, like: Tensor, replicas: Sequence[int], num_micro_batches: int = 1) -> Tensor:
    return sum(
        (factor(index, like, r, m) for r in replicas for m in range(num_micro_batches)),
        torch.zeros_like(like.detach()),
    )


def wrong_sums(
    parameters: Sequence[nn.Parameter], users: Sequence[Sequence[int]], num_micro_batches: int = 1
) -> list[str]:
    """Name the parameters whose gradient is not exactly the sum over their users' gradients."""
    wrong = []
    for k, (parameter, replicas) in enumerate(zip(parameters, users, strict=True)):
        if not replicas:
            if parameter.grad is not None:
                wrong.append(f"{k}: a gradient that nobody computed")
        elif parameter.grad is None:
            wrong.append(f"{k}: no gradient")
        elif not torch.equal(parameter.grad, total(k, parameter, replicas, num_micro_batches)):
            wrong.append(f"{k}: another sum")
    return wrong


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@contextmanager
def reducing(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[GradientReducer]:
    reducer = GradientReducer(parameters, world(), bucket_bytes=bucket_bytes)
    try:
        yield reducer
    finally:
        reducer.close()
