"""Prove that partitions are balanced by what was measured, and that balancing only looks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.balance.balance import balance_by_size, balance_by_time
from autopipe.profile import chain as chain_module
from tests.helpers.clocks import Clock, Fork, Join, MaybeFork, MaybeJoin, Timed
from tests.helpers.pipes import Call

Balance = Callable[..., list[int]]
both = pytest.mark.parametrize(
    "balance", [partial(balance_by_time, timeout=0.05), balance_by_size], ids=["time", "size"]
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(chain_module.time, "perf_counter", clock)
    return clock


def growing_linears() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width + 1) for width in range(1, 7)))


@pytest.mark.parametrize(
    ("chunks", "num_samples"), [(1, 9), (2, 5), (3, 3), (4, 3), (9, 1), (99, 1)]
)
def test_size_is_that_of_the_largest_micro_batch(chunks: int, num_samples: int) -> None:
    seen = []

    def look(input: tuple[Tensor, Tensor]) -> Tensor:
        seen.extend([input[0].tolist(), input[1].tolist()])
        return input[0]

    sample = torch.arange(9), torch.rand(9)
    assert balance_by_size(1, nn.Sequential(Call(look)), sample, chunks=chunks) == [1]
    assert seen == [tensor[:num_samples].tolist() for tensor in sample]


@both
def test_layers_are_measured_in_train_mode_with_a_graph_of_their_own(balance: Balance) -> None:
    seen = []

    def look(input: Tensor) -> Tensor:
        assert input.grad_fn is not None
        below = [parent for parent, _ in input.grad_fn.next_functions if parent is not None]
        assert below[0].next_functions == ()
        seen.append(torch.nn.functional.dropout(input, 1.0, training=module.training).sum().item())
        return input

    module = nn.Sequential(nn.Linear(4, 4), Call(look), nn.Sigmoid(), Call(look)).eval()
    with torch.no_grad():
        balance(2, module, torch.rand(2, 4))
    assert set(seen) == {0.0}


@both
def test_skip_may_be_none_and_a_pair_may_be_within_one_layer(balance: Balance) -> None:
    pair = nn.Sequential(MaybeFork(), nn.Tanh(), MaybeJoin())
    module = nn.Sequential(MaybeFork(), MaybeJoin(), pair, nn.Tanh())
    assert sum(balance(2, module, torch.rand(4))) == 4


@both
def test_skips_of_a_failed_run_do_not_wait_for_the_next_one(balance: Balance) -> None:
    def fail(input: Tensor) -> Tensor:
        raise RuntimeError("no forward")

    with pytest.raises(RuntimeError, match="no forward"):
        balance(1, nn.Sequential(Fork(), Call(fail), Join()), torch.rand(4))
    with pytest.raises(RuntimeError, match="popped 'branch', but no layer before it stashed it"):
        Join()(torch.rand(4))


# What is left behind ---------------------------------------------------------------------------


class Replacing(nn.Module):
    """Put a new tensor in place of a buffer at each forward."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.count = self.count + 1
        return input


def stateful() -> nn.Sequential:
    module = nn.Sequential(
        nn.Linear(4, 4),
        nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()),
        Replacing(),
        nn.Linear(4, 4),
        nn.Linear(4, 2),
    )
    module[1][0].eval()
    module[3].requires_grad_(False)
    module[4].weight.grad = torch.full((2, 4), 3.0)
    return module


def found_in(module: nn.Module) -> dict[str, Any]:
    """List, by name, all that balancing must not change; tensors by identity and by value."""
    found: dict[str, Any] = {name: child.training for name, child in module.named_modules()}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        gradient = None if tensor.grad is None else (id(tensor.grad), tensor.grad.tolist())
        found[name] = (id(tensor), tensor.tolist(), tensor.requires_grad, gradient)
    return found | {"random state": torch.get_rng_state().tolist()}


@both
def test_module_and_random_state_are_left_as_found(balance: Balance) -> None:
    module, sample = stateful(), torch.rand(6, 4, requires_grad=True)
    before = found_in(module)
    assert sum(balance(3, module, sample)) == 5
    assert found_in(module) == before
    assert sample.grad is None


@both
def test_module_and_random_state_are_left_as_found_where_a_layer_fails(balance: Balance) -> None:
    module, sample = stateful().append(nn.Linear(5, 5)), torch.rand(6, 4)
    before = found_in(module)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        balance(2, module, sample)
    assert found_in(module) == before


# The split --------------------------------------------------------------------------------------


class Costing(Timed):
    """Take as many seconds as million bytes."""

    def __init__(self, clock: Clock, cost: float) -> None:
        super().__init__(clock, cost)
        # Counted twice, as param_scale is 2.
        weight = torch.empty(int(cost * 1e6) // 2, dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)


def costing(clock: Clock, *costs: float) -> nn.Sequential:
    return nn.Sequential(*(Costing(clock, cost) for cost in costs))


@both
@pytest.mark.parametrize(
    ("costs", "expected"), [((1, 6, 1, 3), [1, 1, 2]), ((9, 1, 1, 1, 1), [1, 2, 2])]
)
def test_dearest_partition_is_cheapest_and_the_others_are_even(
    clock: Clock, balance: Balance, costs: tuple[int, ...], expected: list[int]
) -> None:
    assert balance(3, costing(clock, *costs), torch.rand(0)) == expected


# Refusals --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partitions": 0}, "6 layers cannot fill 0 partitions; choose from 1 to 6"),
        ({"partitions": 7}, "6 layers cannot fill 7 partitions; choose from 1 to 6"),
        ({"device": "meta"}, "module and sample are on cpu, but device is meta"),
    ],
)
def test_arguments_out_of_range_are_refused(
    balance: Balance, changes: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {"partitions": 2, **changes}
    with pytest.raises(ValueError, match=message):
        balance(arguments.pop("partitions"), growing_linears(), torch.rand(7, 1), **arguments)


@both
def test_module_and_sample_on_different_devices_are_refused(balance: Balance) -> None:
    with pytest.raises(ValueError, match="must be on one device, got cpu, meta"):
        balance(2, growing_linears(), torch.rand(7, 1, device="meta"))
    with pytest.raises(ValueError, match="must be on one device, got cpu, meta"):
        balance(2, growing_linears().to("meta"), torch.rand(7, 1))
    with pytest.raises(ValueError, match="nothing can be measured on the meta device"):
        balance(2, growing_linears().to("meta"), torch.rand(7, 1, device="meta"))


@both
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu", 0)])
def test_device_of_module_and_sample_may_be_named(balance: Balance, device: Any) -> None:
    assert len(balance(2, growing_linears(), torch.rand(7, 1), device=device)) == 2


@both
def test_modules_samples_and_outputs_of_other_types_are_refused(balance: Balance) -> None:
    sample = torch.rand(7, 1)
    with pytest.raises(TypeError, match="must be nn.Sequential to be partitioned, got a Linear"):
        balance(1, nn.Linear(1, 1), sample)
    for wrong, name in (([sample], "list"), ((), "tuple"), ((sample, 1), "tuple")):
        with pytest.raises(TypeError, match=f"a tensor or a tuple of tensors, got a {name}"):
            balance(1, growing_linears(), wrong)
    for output, name in ([1], "list"), ((), "tuple"), (None, "NoneType"):
        module = nn.Sequential(nn.Identity(), Call(lambda input, output=output: output))
        with pytest.raises(TypeError, match=rf"layer 1 \(Call\) returned a {name}; it must"):
            balance(1, module, sample)


def test_mini_batches_that_cannot_be_split_are_refused() -> None:
    module = nn.Sequential(nn.Identity())
    with pytest.raises(ValueError, match="chunks must be at least 1, got 0"):
        balance_by_size(1, module, torch.rand(4), chunks=0)
    with pytest.raises(ValueError, match="a tensor without dimensions cannot be split"):
        balance_by_size(1, module, torch.rand(()))
    with pytest.raises(ValueError, match="must hold equally many samples, got 3, 4"):
        balance_by_size(1, module, (torch.rand(4), torch.rand(3)))
    with pytest.raises(ValueError, match="param_scale must be at least 0, got -1"):
        balance_by_size(1, module, torch.rand(4), param_scale=-1)
