"""Prove that FLOPs which torch lacks or gets wrong are those that a formula by hand gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from autopipe.cluster.kernels import Kernel, count_kernels
from autopipe.profile.chain import ProfiledSublayer


def flops(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.flops for kernel in kernels)


class Scaled(nn.Module):
    """Scale the input by a parameter, so that what follows passes a gradient down."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


def passes(build: Callable[[], nn.Module], *shape: int) -> tuple[float, float, float]:
    """Count a module's forward, its backward to the input alone, and its whole backward."""
    with torch.device("meta"):
        below, module, batch = Scaled(), build(), {"x": torch.empty(shape)}

    def call(hidden: Tensor | None, _: Mapping[str, Tensor]) -> Tensor:
        assert hidden is not None
        output = module(hidden)
        assert isinstance(output, Tensor)
        return output

    chain = [
        ProfiledSublayer("below", 0, below, lambda _, batch: below(batch["x"])),
        ProfiledSublayer("counted", 1, module, call),
    ]
    _, counted = count_kernels(chain, batch)
    assert flops(counted.frozen) == flops(counted.forward)
    return flops(counted.forward), flops(counted.input_backward), flops(counted.backward)


@pytest.mark.parametrize("groups", [1, 4, 64])
def test_a_grouped_convolution_s_gradients_take_what_its_forward_takes(groups: int) -> None:
    def build() -> nn.Module:
        return nn.Conv2d(64, 128, 3, padding=1, groups=groups)

    # Each of 32 x 32 outputs of 128 channels is a sum over 3 x 3 pixels of 64 / groups channels.
    forward = 2 * (2 * 128 * 32 * 32) * (64 // groups) * 3 * 3
    assert passes(build, 2, 64, 32, 32) == (forward, forward, 2 * forward)


def test_a_depthwise_convolution_s_backward_is_twice_its_forward() -> None:
    _, _, backward = passes(lambda: nn.Conv2d(64, 64, 3, padding=1, groups=64), 2, 64, 32, 32)
    assert backward == 4_718_592


def test_strides_and_one_dimension_count_by_the_outputs() -> None:
    # 128 outputs have 48 channels of 16 groups each, over 128 places of the input.
    forward = 2 * (2 * 48 * 64) * (32 // 16) * 5
    found = passes(lambda: nn.Conv1d(32, 48, 5, padding=2, stride=2, groups=16), 2, 32, 128)
    assert found == (forward, forward, 2 * forward)


def test_a_transposed_convolution_counts_by_its_inputs() -> None:
    # Each of 16 x 16 inputs of 64 channels is added to 2 x 2 outputs of 32 / 4 channels.
    forward = 2 * (2 * 64 * 16 * 16) * (32 // 4) * 2 * 2
    found = passes(lambda: nn.ConvTranspose2d(64, 32, 2, stride=2, groups=4), 2, 64, 16, 16)
    assert found == (forward, forward, 2 * forward)
