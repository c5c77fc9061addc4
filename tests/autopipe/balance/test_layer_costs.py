"""Prove what is measured of each layer, with a clock that only the layers move."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.balance.layer_costs import layer_bytes, layer_seconds
from autopipe.profile import chain as chain_module
from autopipe.skip.skip_layers import skippable, stash
from tests.helpers.clocks import AddLeaves, Clock, Fork, Join, Timed
from tests.helpers.pipes import Call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(chain_module.time, "perf_counter", clock)
    return clock


def test_time_of_the_backward_counts(clock: Clock) -> None:
    module = nn.Sequential(*(Timed(clock, 0.01, backward_s) for backward_s in (1, 2, 3, 4, 5, 6)))
    assert layer_seconds(module, torch.rand(1), timeout_s=0) == pytest.approx(
        [1.01, 2.01, 3.01, 4.01, 5.01, 6.01]
    )


def test_whole_passes_repeat_until_the_timeout_and_the_first_of_several_only_warms_up(
    clock: Clock,
) -> None:
    module = nn.Sequential(Timed(clock, 1.0, first_s=9.0), Timed(clock, 2.0))
    # Passes end at 12, 15 and 18 seconds.
    assert layer_seconds(module, torch.rand(1), timeout_s=15.5) == [2.0, 4.0]
    assert [layer.num_calls for layer in module] == [3, 3]


def test_one_pass_runs_also_without_time(clock: Clock) -> None:
    module = nn.Sequential(Timed(clock, 1.0, first_s=9.0), Timed(clock, 2.0))
    assert layer_seconds(module, torch.rand(1), timeout_s=0.0) == [10.0, 2.0]


def test_every_pass_starts_from_the_sample_which_in_place_layers_leave_alone(clock: Clock) -> None:
    seen = []

    def look(input: Tensor) -> Tensor:
        seen.append(input.clone())
        return input

    sample = torch.tensor([-1.0, 2.0])
    module = nn.Sequential(Call(look), nn.ReLU(inplace=True), Timed(clock, 1.0))
    layer_seconds(module, sample, timeout_s=2.5)
    assert [input.tolist() for input in seen] == [[-1.0, 2.0]] * 3
    assert sample.tolist() == [-1.0, 2.0]


def test_first_layer_computes_a_gradient_of_the_sample_only_where_it_requires_one(
    clock: Clock,
) -> None:
    module = nn.Sequential(*(Timed(clock, 1.0, backward_s=2.0) for _ in range(2)))
    module.requires_grad_(False)
    assert layer_seconds(module, torch.rand(1), timeout_s=0) == [1.0, 3.0]
    sample = torch.rand(1, requires_grad=True)
    assert layer_seconds(module, sample, timeout_s=0) == [3.0, 3.0]
    assert sample.grad is None


def test_tensors_that_want_a_gradient_are_kept_for_it_and_nothing_piles_up() -> None:
    module = nn.Sequential(*(AddLeaves(num_leaves) for num_leaves in range(1, 7)))
    sample = torch.rand(10, 100)
    # The leaves and the output.
    expected = [4 * 1000 * (num_leaves + 1) for num_leaves in range(1, 7)]
    assert layer_bytes(module, sample, param_scale=2.0) == expected


def test_parameters_count_param_scale_times() -> None:
    module = nn.Sequential(*(nn.Linear(width, width + 1) for width in range(1, 7)))
    outputs = [4 * 7 * width for width in range(2, 8)]
    parameters = [4 * width * width for width in range(2, 8)]
    assert layer_bytes(module, torch.rand(7, 1), param_scale=0.0) == outputs
    assert layer_bytes(module, torch.rand(7, 1), param_scale=2.5) == [
        output + 2.5 * own for output, own in zip(outputs, parameters, strict=True)
    ]


def test_input_and_what_shares_its_storage_count_nothing() -> None:
    module = nn.Sequential(
        nn.Tanh(), nn.Identity(), nn.Flatten(), nn.ReLU(inplace=True), Call(torch.square)
    )
    # Tanh and ReLU save their output, the square its input.
    sizes = layer_bytes(module, torch.rand(2, 3, 4, requires_grad=True), param_scale=2.0)
    assert sizes == [96.0, 0.0, 0.0, 0.0, 96.0]


def test_what_is_kept_besides_the_output_counts_by_storage() -> None:
    module = nn.Sequential(
        nn.Tanh(),
        nn.Sequential(nn.Sigmoid(), nn.Tanh()),
        nn.Dropout(),
        Call(lambda x: x.exp().exp()),
    ).eval()
    sizes = layer_bytes(module, torch.rand(100, requires_grad=True), param_scale=2.0)
    # Dropout's mask and the inner tanh's and exp's outputs.
    assert sizes == [400.0, 800.0, 800.0, 800.0]


def test_parameter_of_two_layers_counts_in_the_first() -> None:
    shared = nn.Linear(8, 8, bias=False)
    module = nn.Sequential(shared, nn.Sequential(shared, nn.Linear(8, 8, bias=False)), shared)
    assert layer_bytes(module, torch.rand(0, 8), param_scale=3.0) == [768.0, 768.0, 0.0]


def test_tuples_with_integers_pass_from_layer_to_layer() -> None:
    def embed(input: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, values = input
        assert not ids.is_floating_point()
        return ids, values.exp()

    module = nn.Sequential(Call(embed), Call(embed), Call(lambda input: input[0] * input[1]))
    sample = torch.arange(8), torch.rand(8)
    assert layer_bytes(module, sample, param_scale=2.0) == [32.0, 32.0, 32.0]
    assert layer_seconds(module, sample, timeout_s=0)[2] > 0


def test_skip_counts_where_it_is_stashed_and_not_where_it_is_popped() -> None:
    module = nn.Sequential(Fork(), nn.Identity(), Join())
    # Fork keeps the branch (which exp saves) and its output, Join its output; both of its factors
    # were handed to it.
    assert layer_bytes(module, torch.rand(100), param_scale=0.0) == [800.0, 0.0, 400.0]


def test_time_of_a_skip_counts_in_its_own_layer(clock: Clock) -> None:
    class PlainTimedFork(Timed):
        def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:  # type: ignore[override]
            yield stash("branch", super().forward(input))
            return input + 1

    fork = skippable(stash=["branch"])(PlainTimedFork)(clock, 1.0, 2.0)
    module = nn.Sequential(fork, Timed(clock, 0.25, 0.25), Join())
    assert layer_seconds(module, torch.rand(4), timeout_s=0) == [3.0, 0.5, 0.0]


# CUDA ------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_cuda_counts_the_same_bytes_but_for_rounding() -> None:
    module = nn.Sequential(
        nn.Linear(256, 512),
        nn.Tanh(),
        nn.Dropout(),
        AddLeaves(3),
        nn.ReLU(inplace=True),
        Fork(),
        nn.Linear(512, 512),
        Join(),
    )
    counted = layer_bytes(module, torch.rand(64, 256), param_scale=2.0)
    allocated = layer_bytes(module.cuda(), torch.rand(64, 256).cuda(), param_scale=2.0)
    for index, (cpu, cuda) in enumerate(zip(counted, allocated, strict=True)):
        # Dropout's mask has a byte an element on CUDA, four on CPU.
        expected = cpu - 3 * 64 * 512 if index == 2 else cpu
        # CUDA allocates blocks of 512 bytes.
        assert cuda == pytest.approx(expected, abs=4096), index
    for seconds in layer_seconds(module, torch.rand(64, 256).cuda(), timeout_s=0.0):
        assert seconds > 0
