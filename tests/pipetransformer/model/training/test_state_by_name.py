"""Prove that an optimizer built anew, given the old one's state by name, continues bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adam, AdamW, Optimizer

from pipetransformer import adamw
from pipetransformer.model import OptimizerFactory, put_state, take_state

Named = list[tuple[str, nn.Parameter]]


class Numbers(Optimizer):
    """Keep a float, an int and None beside tensors, as optimizers may."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step by a rate that depends on both numbers."""
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 2**40) + 1
            state["rate"] = state.get("rate", 0.1) / 3
            state["unused"] = None
            parameter -= state["rate"] * (state["count"] - 2**40) * parameter.grad


def plain(kind: Any, **settings: Any) -> OptimizerFactory:
    return lambda named: kind([p for _, p in named], **settings)


FACTORIES: dict[str, OptimizerFactory] = {
    "ours": adamw(1e-2),
    "AdamW": plain(torch.optim.AdamW, lr=1e-2),
    "Adam fused": plain(torch.optim.Adam, lr=1e-2, fused=True),
    "AMSGrad": plain(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "NAdam": plain(torch.optim.NAdam, lr=1e-2),
    "SGD": plain(torch.optim.SGD, lr=1e-2),
    "SGD momentum": plain(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": plain(torch.optim.RMSprop, lr=1e-2, momentum=0.9, centered=True),
    "numbers": plain(Numbers),
}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Make parameters with names that have slashes, dots and a marker in them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (4, 3), "a.bias": (4,), "b/c.weight": (2, 2), "scale": ()}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        for name, shape in shapes.items()
    }


def train(
    optimizers: Sequence[Optimizer], named: Mapping[str, nn.Parameter], steps: range
) -> None:
    """Take steps whose gradients depend on the step and the name alone."""
    for step in steps:
        for name, parameter in named.items():
            generator = torch.Generator().manual_seed(1000 * step + len(name))
            parameter.grad = torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )
        for optimizer in optimizers:
            optimizer.step()


def copied(flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in flat.items()}


def assert_same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Compare every entry."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", FACTORIES)
def test_a_fresh_optimizer_with_the_state_continues_bit_by_bit(
    kind: str, dtype: torch.dtype
) -> None:
    named = parameters(dtype)
    optimizer = FACTORIES[kind](list(named.items()))
    train([optimizer], named, range(3))
    state = copied(take_state(optimizer, named))
    moved = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    # In another order: state must find its parameter by name.
    fresh = FACTORIES[kind](list(reversed(moved.items())))
    put_state(fresh, moved, state)
    assert_same_bits(take_state(fresh, moved), state)
    train([optimizer], named, range(3, 6))
    train([fresh], moved, range(3, 6))
    assert_same_bits(moved, named)
    assert_same_bits(take_state(fresh, moved), take_state(optimizer, named))


@pytest.mark.parametrize("kind", FACTORIES)
def test_two_optimizers_over_halves_continue_as_the_whole_would(kind: str) -> None:
    named = parameters()
    optimizer = FACTORIES[kind](list(named.items()))
    train([optimizer], named, range(3))
    moved = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    halves: list[Optimizer] = []
    for names in (("a.weight", "scale"), ("a.bias", "b/c.weight")):
        part = {name: moved[name] for name in names}
        halves.append(FACTORIES[kind](list(part.items())))
        put_state(
            halves[-1], part, copied(take_state(optimizer, {name: named[name] for name in names}))
        )
    train([optimizer], named, range(3, 6))
    train(halves, moved, range(3, 6))
    assert_same_bits(moved, named)


def test_state_is_named_by_parameter_and_numbers_keep_their_type() -> None:
    named = parameters(torch.float64)
    optimizer = Numbers(named.values())
    train([optimizer], named, range(1))
    flat = take_state(optimizer, {"b/c.weight": named["b/c.weight"]})
    assert {name: (t.dtype, t.item()) for name, t in flat.items()} == {
        "b/c.weight/count#number": (torch.int64, 2**40 + 1),
        "b/c.weight/rate#number": (torch.float64, 0.1 / 3),
    }
    fresh = Numbers(named.values())
    put_state(fresh, named, flat)
    state = fresh.state[named["b/c.weight"]]
    assert {name: type(value) for name, value in state.items()} == {"count": int, "rate": float}


def test_there_is_no_state_before_the_first_step_or_without_an_optimizer() -> None:
    named = parameters()
    optimizer = adamw()(list(named.items()))
    assert take_state(optimizer, named) == {} == take_state(None, named)
    put_state(optimizer, named, {})
    assert len(optimizer.state) == 0


def test_state_that_cannot_travel_is_refused() -> None:
    named = parameters()
    optimizer = torch.optim.SGD(named.values(), lr=0.1)
    optimizer.state[named["scale"]]["history"] = [1, 2]
    with pytest.raises(TypeError, match=r"SGD keeps a list as 'history'; .* another optimizer"):
        take_state(optimizer, named)


@pytest.mark.parametrize(
    ("names", "decays"),
    [(("a.weight", "a.bias", "scale"), [0.3, 0.0]), (("a.weight",), [0.3]), (("a.bias",), [0.0])],
)
def test_adamw_decays_matrices_alone_and_makes_no_empty_group(
    names: tuple[str, ...], decays: list[float]
) -> None:
    named: Named = [(name, parameters()[name]) for name in names]
    optimizer = adamw(0.5, weight_decay=0.3, betas=(0.8, 0.9))(named)
    groups = optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == decays
    assert all(group["lr"] == 0.5 and group["betas"] == (0.8, 0.9) for group in groups)
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for _, p in named}


@pytest.mark.parametrize(
    ("kind", "settings", "step_device"),
    [
        (AdamW, {"fused": True}, "cuda"),
        (Adam, {"fused": True, "amsgrad": True}, "cuda"),
        (AdamW, {"capturable": True}, "cuda"),
        (AdamW, {}, "cpu"),
        (SGD, {"momentum": 0.9}, ""),
    ],
)
def test_a_step_count_returns_to_where_the_optimizer_reads_it(
    kind: Any, settings: dict[str, bool], step_device: str
) -> None:
    # Optimizer state of frozen layers waits in host memory, and a checkpoint is read there. The
    # default optimizer, whose fused kernel reads the step count on the GPU, failed after a thaw.
    with FakeTensorMode():
        named = {"weight": nn.Parameter(torch.empty(4, 3, device="cuda"))}
        first = kind(named.values(), **settings)
        named["weight"].grad = torch.empty(4, 3, device="cuda")
        first.step()
        expected = {key: value.device for key, value in take_state(first, named).items()}
        assert not step_device or expected["weight/step"].type == step_device
        parked = {key: value.cpu() for key, value in take_state(first, named).items()}

        again = kind(named.values(), **settings)
        put_state(again, named, parked)
        for key, value in take_state(again, named).items():
            assert value.device == expected[key], key
        again.step()
