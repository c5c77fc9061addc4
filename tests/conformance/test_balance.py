"""Hold what the manual says of automatic balancing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.balance.balance import balance_by_size, balance_by_time
from autopipe.profile import chain
from autopipe.skip.skip_layers import pop, skippable, stash
from tests.helpers.clocks import AddLeaves, Clock, Timed
from tests.helpers.pipes import Call, linears, on_cpu, ramp


def by_time(partitions: int, module: nn.Sequential, sample: Any, **options: Any) -> list[int]:
    return balance_by_time(partitions, module, sample, timeout=0.0, **options)


both = pytest.mark.parametrize("balance", [by_time, balance_by_size], ids=["time", "size"])
Balance = Callable[..., list[int]]


def growing(*widths: int) -> nn.Sequential:
    """Return linear layers between the widths."""
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:])))  # noqa: B905


@both
def test_a_balance_counts_the_layers_of_each_partition_and_suits_gpipe(balance: Balance) -> None:
    module = linears(3, 5, 4, 2)
    for partitions in range(1, 7):
        counts = balance(partitions, module, ramp(4, 3))
        assert type(counts) is list and all(type(count) is int and count > 0 for count in counts)
        assert len(counts) == partitions and sum(counts) == len(module)
        torch.testing.assert_close(
            on_cpu(copy.deepcopy(module), counts)(ramp(4, 3)), module(ramp(4, 3))
        )


def test_arguments_have_the_documented_names_and_defaults() -> None:
    parameters = inspect.signature(balance_by_time).parameters
    assert list(parameters)[:5] == ["partitions", "module", "sample", "timeout", "device"]
    assert parameters["timeout"].default == 1.0
    parameters = inspect.signature(balance_by_size).parameters
    assert list(parameters)[:6] == [
        "partitions", "module", "input", "chunks", "param_scale", "device",
    ]  # fmt: skip
    assert (parameters["chunks"].default, parameters["param_scale"].default) == (1, 2.0)
    for function in (balance_by_time, balance_by_size):
        for parameter in list(inspect.signature(function).parameters.values())[3:]:
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    for optimizer in ("SGD", "Adam", "Adadelta", "Adagrad", "RMSprop"):
        assert optimizer in (balance_by_size.__doc__ or "")


@pytest.mark.parametrize(
    ("seconds", "expected"), [((1, 2, 3, 4, 5, 6), [4, 2]), ((6, 5, 4, 3, 2, 1), [2, 4])]
)
def test_layers_are_balanced_by_their_elapsed_time(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[int, ...], expected: list[int]
) -> None:
    clock = Clock()
    monkeypatch.setattr(chain.time, "perf_counter", clock)
    module = nn.Sequential(*(Timed(clock, float(s)) for s in seconds))
    assert balance_by_time(2, module, torch.rand(1)) == expected


def test_profiling_goes_on_until_the_timeout_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(chain.time, "perf_counter", clock)
    calls: list[int] = []

    class Count(Timed):
        def forward(self, input: Any) -> Any:
            calls.append(1)
            return super().forward(input)

    for timeout, fewest in ((0.0, 1), (5.0, 5)):
        calls.clear()
        balance_by_time(1, nn.Sequential(Count(clock, 1.0)), torch.rand(1), timeout=timeout)
        assert fewest <= len(calls) <= fewest + 2


def test_every_pass_of_the_profiling_starts_from_the_sample() -> None:
    sums: list[float] = []

    def look(input: Tensor) -> Tensor:
        sums.append(float(input.sum()))
        return input.zero_()

    balance_by_time(1, nn.Sequential(Call(look)), torch.ones(10, 10), timeout=0.02)
    assert set(sums) == {100.0}


def test_layers_are_balanced_by_the_memory_that_they_keep() -> None:
    rising = nn.Sequential(*(AddLeaves(n) for n in range(1, 7)))
    falling = nn.Sequential(*(AddLeaves(n) for n in range(6, 0, -1)))
    assert balance_by_size(2, rising, torch.rand(10, 100)) == [4, 2]
    assert balance_by_size(2, falling, torch.rand(10, 100)) == [2, 4]


def test_equal_layers_are_counted_alike_wherever_they_stand() -> None:
    module = nn.Sequential(*(AddLeaves(3) for _ in range(8)))
    assert balance_by_size(4, module, torch.rand(50, 50)) == [2, 2, 2, 2]


def test_parameters_count_by_param_scale_and_micro_batches_by_chunks() -> None:
    # Layers that keep much of a batch, and one with many parameters.
    module = nn.Sequential(*(AddLeaves(2) for _ in range(3)), nn.Linear(40, 40))
    sample = torch.rand(400, 40)
    assert balance_by_size(2, module, sample, param_scale=0.0) == [2, 2]
    assert balance_by_size(2, module, sample, param_scale=1000.0) == [3, 1]
    assert balance_by_size(2, module, sample, chunks=200, param_scale=4.0) == [3, 1]
    assert balance_by_size(2, growing(*range(1, 8)), torch.rand(7, 1), param_scale=100) == [4, 2]


@both
def test_balancing_leaves_module_gradients_sample_and_random_state_alone(balance: Balance) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    module[3].requires_grad_(False)
    module[1].eval()
    module(torch.rand(4, 3)).sum().backward()
    grads = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    state, modes = copy.deepcopy(module.state_dict()), [m.training for m in module.modules()]
    sample = torch.rand(4, 3, requires_grad=True)
    before, values = torch.get_rng_state(), sample.detach().clone()
    balance(2, module, sample)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(sample, values) and sample.grad is None
    assert [m.training for m in module.modules()] == modes
    assert [p.requires_grad for p in module.parameters()] == [True] * 4 + [False] * 2
    for key, value in module.state_dict().items():
        assert torch.equal(value, state[key]), key
    for parameter, grad in zip(module.parameters(), grads, strict=True):
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(grad, parameter.grad)


@both
def test_layers_are_profiled_in_training_mode_and_skips_and_tuples_pass(balance: Balance) -> None:
    modes: list[bool] = []

    class Look(nn.Module):
        def forward(self, pair: Any) -> Any:
            modes.append(self.training)
            return pair[0] * 2, pair[1]

    class Give(nn.Module):
        def forward(self, pair: Any) -> Any:
            yield stash("skip", pair[0])
            return pair

    class Take(nn.Module):
        def forward(self, pair: Any) -> Any:
            skip = yield pop("skip")
            return pair[0] + skip

    give: Any = skippable(stash=["skip"])(Give)
    take: Any = skippable(pop=["skip"])(Take)
    module = nn.Sequential(give(), Look(), take()).eval()
    counts = balance(2, module, (torch.rand(4, 3), torch.arange(4)))
    assert sum(counts) == 3 and modes and all(modes) and not module.training


@both
def test_a_sample_on_another_device_than_the_module_is_refused(balance: Balance) -> None:
    with pytest.raises(ValueError, match="module and sample must be on one device"):
        balance(1, growing(1, 1), torch.rand(1, 1, device="meta"))
    assert balance(1, growing(1, 1), torch.rand(1, 1), device="cpu") == [1]


@both
def test_what_cannot_be_balanced_is_refused(balance: Balance) -> None:
    with pytest.raises(TypeError, match="module must be nn.Sequential"):
        balance(1, nn.Linear(1, 1), torch.rand(1, 1))
    for partitions in (0, 3):
        with pytest.raises(ValueError, match=f"2 layers cannot fill {partitions} partitions"):
            balance(partitions, growing(1, 1, 1), torch.rand(1, 1))


def test_the_exact_split_beats_the_peer_s_blocks_where_costs_are_far_above_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(chain.time, "perf_counter", clock)
    seconds = [10.0] * 8 + [20.0] * 2
    counts = balance_by_time(2, nn.Sequential(*(Timed(clock, s) for s in seconds)), torch.rand(1))
    assert max(sum(seconds[: counts[0]]), sum(seconds[counts[0] :])) == 60
