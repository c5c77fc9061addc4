"""Build plain models and their pipelines, and compare what both compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.gpipe.module import GPipe
from autopipe.trace.trace import Trace

MODES = ("always", "except_last", "never")


every_mode = pytest.mark.parametrize("mode", MODES)


# Sums over micro-batches come in another order than over the mini-batch: a few units of float64.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class Call(nn.Module):
    """Run a function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Any) -> Any:
        return self.function(input)


def on_cpu(module: nn.Sequential, balance: Any, **options: Any) -> GPipe:
    """Wrap a module so that its partitions are on the CPU, also where there are GPUs."""
    return GPipe(module, balance, devices=["cpu"] * len(balance), **options)


def linears(*widths: int) -> nn.Sequential:
    """Return linear layers and tanh, alike on every call, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [
            layer
            for width, after in zip(widths, widths[1:])  # noqa: B905
            for layer in (nn.Linear(width, after), nn.Tanh())
        ]
        return nn.Sequential(*layers).double()


def ramp(*shape: int) -> Tensor:
    """Return float64 values between -1 and 1 that differ."""
    generator = torch.Generator().manual_seed(5)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1


def assert_same_gradients(found: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    """Compare the gradient of every parameter, None included."""
    pairs = zip(found.named_parameters(), expected.named_parameters(), strict=True)
    for (name, ours), (_, plain) in pairs:
        assert (ours.grad is None) == (plain.grad is None), name
        if ours.grad is not None and plain.grad is not None:
            torch.testing.assert_close(ours.grad, plain.grad, **(tolerance or CLOSE))


def assert_transparent(
    module: nn.Sequential, balance: list[int], input: Any, **options: Any
) -> None:
    """Compare output, input gradients and every parameter's gradient with the plain module's."""
    plain, model = copy.deepcopy(module), on_cpu(copy.deepcopy(module), balance, **options)
    outputs, leaves = [], []
    for runner in (plain, model):
        given = input if isinstance(input, tuple) else (input,)
        own = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in given)
        output = runner(own if isinstance(input, tuple) else own[0])
        assert isinstance(output, tuple) == isinstance(outputs[0] if outputs else output, tuple)
        members = output if isinstance(output, tuple) else (output,)
        sum(t.square().sum() for t in members if t.requires_grad).backward()  # type: ignore
        outputs.append(output)
        leaves.append(own)
    torch.testing.assert_close(outputs[1], outputs[0], **CLOSE)
    for ours, expected in zip(leaves[1], leaves[0], strict=True):
        assert (ours.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(ours.grad, expected.grad, **CLOSE)
    assert_same_gradients(model, plain)


def wrapped(mode: str = "except_last", chunks: int = 3) -> tuple[nn.Sequential, GPipe]:
    """Return a plain model and its pipeline of three partitions."""
    plain = linears(3, 5, 4, 2)
    return plain, on_cpu(copy.deepcopy(plain), [1, 3, 2], chunks=chunks, checkpoint=mode)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


WIDTH, SAMPLES, CHUNKS = 8, 12, 4


CASES = [
    (balance, schedule, checkpoint)
    for balance in ((2, 2), (1, 1, 2), (4,))
    for schedule in ("gpipe", "1f1b")
    for checkpoint in ("always", "except_last", "never")
]


def model(balance: tuple[int, ...] = (2, 2), **options: Any) -> GPipe:
    """Wrap layers each of which saves its input, 8 values a sample, and nothing else."""
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH).double() for _ in range(4)])
    return GPipe(layers, balance, chunks=CHUNKS, **options)


def batch() -> tuple[Tensor, Tensor]:
    return torch.rand(2, SAMPLES, WIDTH, dtype=torch.float64).unbind()


def traced_step(balance: tuple[int, ...], schedule: str, checkpoint: str) -> Trace:
    pipeline = model(balance, checkpoint=checkpoint, schedule=schedule)
    with pipeline.trace() as trace:
        pipeline.step(*batch(), nn.functional.l1_loss)
    return trace


def recomputed(checkpoint: str) -> range:
    return range({"always": CHUNKS, "except_last": CHUNKS - 1, "never": 0}[checkpoint])
