"""Prove that FLOPs which torch lacks or gets wrong are those that a formula by hand gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from autopipe.cluster.kernel_counts import Kernel, count_kernels
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


class Experts(nn.Module):
    """Multiply each token with the matrix of its expert, as transformers' experts do."""

    def __init__(self, num_experts: int, width: int, output: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(num_experts, width, output).bfloat16())

    def forward(self, hidden: Tensor) -> Tensor:
        ends = torch.empty(len(self.weights), dtype=torch.int32)
        return torch._grouped_mm(hidden.bfloat16().flatten(0, 1), self.weights, offs=ends)


def test_experts_count_as_many_products_as_there_are_tokens() -> None:
    # The weights' gradient is a product over the tokens of each expert, the input's as the output.
    forward = 2 * (4 * 24) * 32 * 16
    assert passes(lambda: Experts(8, 32, 16), 4, 24, 32) == (forward, forward, 2 * forward)


class Grouped(nn.Module):
    """Multiply matrices of a shape each in groups."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(shape).bfloat16())

    def forward(self, hidden: Tensor) -> Tensor:
        ends = torch.empty(4, dtype=torch.int32)
        is_batch = hidden.dim() == self.weights.dim() == 3
        return torch._grouped_mm(hidden.bfloat16(), self.weights, offs=None if is_batch else ends)


@pytest.mark.parametrize(
    ("left", "right", "multiplied"),
    [
        ((4, 16, 32), (4, 32, 8), (4, 16, 32, 8)),
        ((4, 16, 32), (32, 64), (16, 32, 64)),
        ((16, 64), (64, 32), (16, 64, 32)),
    ],
)
def test_grouped_products_count_what_is_multiplied(
    left: tuple[int, ...], right: tuple[int, ...], multiplied: tuple[int, ...]
) -> None:
    forward, _, _ = passes(lambda: Grouped(*right), *left)
    assert forward == 2 * prod(multiplied)


class Squaring(nn.Module):
    """Give its input to both sides of a bilinear form."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(24, 24, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.form(hidden, hidden)
        return output


def test_a_bilinear_form_counts_a_product_for_each_of_its_weights() -> None:
    # It has a gradient for each side, and one for the weights.
    forward = 2 * 6 * 24 * 24 * 8
    assert passes(Squaring, 6, 24) == (forward, 2 * forward, 3 * forward)


class Weighing(nn.Module):
    """Multiply the input with a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(48))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weights


def test_a_product_with_a_vector_counts() -> None:
    # The input's gradient is an outer product, which torch computes element by element.
    product = 2 * (4 * 24) * 48
    assert passes(Weighing, 4, 24, 48) == (product, 0, product)


@pytest.fixture
def attend() -> Iterator[Callable[[Tensor], Tensor]]:
    """Register an operation of somebody's own for a while; it attends to itself."""
    with torch.library._scoped_library("pipetransformer_test", "FRAGMENT") as library:
        library.define("attend(Tensor tokens) -> Tensor")
        library.impl("attend", lambda x: F.scaled_dot_product_attention(x, x, x), "CPU")
        library.impl("attend", torch.empty_like, "Meta")
        packet = torch.ops.pipetransformer_test.attend
        yield packet
        flop_registry.pop(packet, None)


class Attending(nn.Module):
    def __init__(self, attend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, hidden: Tensor) -> Tensor:
        return self.attend(hidden.detach())


def test_somebody_s_own_operation_is_refused_unless_it_has_a_formula(
    attend: Callable[[Tensor], Tensor],
) -> None:
    wanted = r"be counted without data: nobody .* pipetransformer_test\.attend computes; measure"
    with pytest.raises(ValueError, match=wanted):
        passes(lambda: Attending(attend), 2, 4, 16, 8)

    @register_flop_formula(attend)
    def _(shape: tuple[int, ...], **_: object) -> int:
        return 4 * prod(shape) * shape[-2]

    forward = 2 * 2 * (2 * 4) * 16 * 16 * 8
    assert passes(lambda: Attending(attend), 2, 4, 16, 8) == (forward, 0, 0)
