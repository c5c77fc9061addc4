"""Hold what the manual says of automatic balancing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopipe.balance.balance import balance_by_size, balance_by_time
from autopipe.profile import chain
from tests.helpers.clocks import AddLeaves, Clock, Timed
from tests.helpers.pipes import linears, on_cpu, ramp


def by_time(partitions: int, module: nn.Sequential, sample: Any, **options: Any) -> list[int]:
    return balance_by_time(partitions, module, sample, timeout=0.0, **options)


both = pytest.mark.parametrize("balance", [by_time, balance_by_size], ids=["time", "size"])
Balance = Callable[..., list[int]]


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


def test_layers_are_balanced_by_the_memory_that_they_keep() -> None:
    rising = nn.Sequential(*(AddLeaves(n) for n in range(1, 7)))
    falling = nn.Sequential(*(AddLeaves(n) for n in range(6, 0, -1)))
    assert balance_by_size(2, rising, torch.rand(10, 100)) == [4, 2]
    assert balance_by_size(2, falling, torch.rand(10, 100)) == [2, 4]


def test_the_exact_split_beats_the_peer_s_blocks_where_costs_are_far_above_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(chain.time, "perf_counter", clock)
    seconds = [10.0] * 8 + [20.0] * 2
    counts = balance_by_time(2, nn.Sequential(*(Timed(clock, s) for s in seconds)), torch.rand(1))
    assert max(sum(seconds[: counts[0]]), sum(seconds[counts[0] :])) == 60
