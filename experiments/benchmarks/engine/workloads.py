"""Hold what the engine's benchmark trains, the ways to train it, and the proof that they agree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopipe.gpipe import GPipe
from experiments.benchmarks.gpipe.unet import unet
from experiments.benchmarks.measuring.rounds import ResultsDifferError

RELATIVE_TOLERANCE = 1e-4
"""Of a parameter's gradient, by norms; float32 sums in another order differ by about 1e-6."""
ABSOLUTE_TOLERANCE = 1e-6
"""Times the norm of all gradients: one that is exactly 0 comes out as rounding errors."""

Step = Callable[[], Tensor]
"""Run forward and backward of one mini-batch from gradients that are None; return the loss."""


@dataclass(frozen=True)
class MiniBatch:
    """Hold a synthesized mini-batch; the loss is the mean squared error."""

    input: Tensor
    target: Tensor

    def split(self, num_micro_batches: int) -> list[MiniBatch]:
        """Return the micro-batches, all of the same size."""
        assert len(self.input) % num_micro_batches == 0
        parts = zip(
            self.input.chunk(num_micro_batches), self.target.chunk(num_micro_batches), strict=True
        )
        return [MiniBatch(input, target) for input, target in parts]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss."""
    return nn.functional.mse_loss(output, target)


class EngineModel(ABC):
    """Describe a model and its mini-batch."""

    name: str
    batch_size: int

    @abstractmethod
    def build(self) -> nn.Sequential:
        """Build the model, always with the same weights."""

    @abstractmethod
    def mini_batch(self) -> MiniBatch:
        """Synthesize the mini-batch."""


@dataclass(frozen=True)
class Encoder(EngineModel):
    """Describe a Transformer encoder of equal blocks, without dropout."""

    width: int = 256
    hidden: int = 1024
    sequence: int = 128
    batch_size: int = 32
    num_blocks: int = 8
    num_heads: int = 4
    name: str = "encoder"

    def build(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    self.width, self.num_heads, self.hidden, dropout=0.0, batch_first=True
                )
                for _ in range(self.num_blocks)
            )
        )

    def mini_batch(self) -> MiniBatch:
        torch.manual_seed(1)
        shape = self.batch_size, self.sequence, self.width
        return MiniBatch(torch.randn(shape), torch.randn(shape))


@dataclass(frozen=True)
class UNet(EngineModel):
    """Describe U-Net (B, C) on square images, with its long skips."""

    num_blocks: int = 2
    num_channels: int = 16
    side: int = 96
    batch_size: int = 32
    name: str = "unet"

    def build(self) -> nn.Sequential:
        torch.manual_seed(0)
        return unet(self.num_blocks, self.num_channels, dropout=0.0)

    def mini_batch(self) -> MiniBatch:
        torch.manual_seed(1)
        images = torch.rand(self.batch_size, 3, self.side, self.side)
        return MiniBatch(images, torch.rand(self.batch_size, 1, self.side, self.side))


@dataclass(frozen=True)
class Contestant:
    """Pair a way to train with the module that it trains."""

    module: nn.Module
    step: Step

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients in the order of the layers, which all contestants share."""
        return [parameter.grad for parameter in self.module.parameters()]


def plain(model: nn.Sequential, batch: MiniBatch, num_micro_batches: int) -> Contestant:
    """Train the model itself, micro-batch by micro-batch, each backward after its forward."""
    parts = batch.split(num_micro_batches)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for part in parts:
            loss = loss_of(model(part.input), part.target) / num_micro_batches
            loss.backward()
            total += loss.detach()
        return total

    return Contestant(model, step)


def through_autograd(module: nn.Module, batch: MiniBatch) -> Contestant:
    """Train a module by its forward and `loss.backward()`."""

    def step() -> Tensor:
        module.zero_grad(set_to_none=True)
        loss = loss_of(module(batch.input), batch.target)
        loss.backward()
        return loss.detach()

    return Contestant(module, step)


def by_schedule(module: GPipe, batch: MiniBatch, schedule: str) -> Contestant:
    """Train a pipeline by its `step`."""

    def step() -> Tensor:
        module.zero_grad(set_to_none=True)
        return module.step(batch.input, batch.target, loss_of, schedule=schedule)

    return Contestant(module, step)


@dataclass(frozen=True)
class Results:
    """Hold what a step found.

    Args:
        loss: 0-dim.
        gradients: of every parameter, in the order of the layers.
    """

    loss: Tensor
    gradients: tuple[Tensor | None, ...]

    @staticmethod
    def of(contestant: Contestant) -> Results:
        """Take a step; copy its results, as the next one overwrites them."""
        loss = contestant.step()
        return Results(loss, tuple(g if g is None else g.clone() for g in contestant.gradients()))

    def verify(self, name: str, found: Results) -> None:
        """Compare the loss and each gradient to these.

        Raises:
            ResultsDifferError: they differ by more than the tolerances.
        """
        if not torch.isclose(found.loss, self.loss, rtol=RELATIVE_TOLERANCE, atol=0.0):
            raise ResultsDifferError(f"{name}: the loss is {found.loss}, not {self.loss}")
        norms = [torch.zeros(()) if g is None else g.norm() for g in self.gradients]
        absolute = ABSOLUTE_TOLERANCE * torch.stack(norms).norm()
        pairs = zip(found.gradients, self.gradients, norms, strict=True)
        for number, (gradient, expected, norm) in enumerate(pairs):
            if gradient is None or expected is None:
                raise ResultsDifferError(f"{name}: parameter {number} has no gradient")
            error = (gradient - expected).norm()
            # Not written as a comparison from above, which would let NaN pass.
            if not error <= RELATIVE_TOLERANCE * norm + absolute:
                raise ResultsDifferError(
                    f"{name}: the gradient of parameter {number} differs by {error} where its "
                    f"norm is {norm}"
                )


def verify_all(contestants: Mapping[str, Contestant], reference: Contestant) -> None:
    """Compare a step of each contestant to one of the reference.

    Raises:
        ResultsDifferError: a result differs, or its shape.
    """
    expected = Results.of(reference)
    for name, contestant in contestants.items():
        expected.verify(name, Results.of(contestant))
