"""Prove that a forward is repeated in its modes and with its weights, or that this is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.gpipe import GPipe
from tests.helpers.pipes import assert_same_gradients, every_mode, on_cpu, ramp

REPEATS = pytest.mark.parametrize("mode", ["always", "except_last"])


def layers() -> nn.Sequential:
    """Return layers whose output depends on modes and on running statistics, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        norm = nn.BatchNorm1d(4)
        return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 2)).double()


def pipe(mode: str, **options: Any) -> GPipe:
    return on_cpu(layers(), [2, 2], chunks=2, checkpoint=mode, **options)


def change_mode(model: nn.Module) -> None:
    model.train(not model.training)


def change_one_mode(model: nn.Module) -> None:
    next(part for part in model.modules() if isinstance(part, nn.BatchNorm1d)).eval()


@every_mode
@pytest.mark.parametrize("change", [change_mode, change_one_mode])
def test_modes_changed_before_the_backward_change_no_gradient_and_are_kept(
    mode: str, change: Callable[[nn.Module], None]
) -> None:
    """A model put into eval mode to be evaluated before the backward learned something else."""
    changed, expected = pipe(mode), pipe(mode)
    output = changed(ramp(6, 3))
    change(changed)
    modes = [part.training for part in changed.modules()]
    output.square().sum().backward()
    expected(ramp(6, 3)).square().sum().backward()
    assert_same_gradients(changed, expected, rtol=0.0, atol=0.0)
    assert [part.training for part in changed.modules()] == modes
    for ours, theirs in zip(changed.buffers(), expected.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@every_mode
def test_modes_of_an_eval_forward_are_not_changed_by_a_later_train(mode: str) -> None:
    changed, expected = pipe(mode), pipe(mode)
    for model in (changed, expected):
        model.eval()
        output = model(ramp(6, 3))
        if model is changed:
            model.train()
        output.square().sum().backward()
    assert_same_gradients(changed, expected, rtol=0.0, atol=0.0)


@REPEATS
def test_dropout_is_repeated_though_the_model_is_in_eval_mode_by_then(mode: str) -> None:
    """With all inputs one, the gradient is where the output is not zero."""
    model = on_cpu(
        nn.Sequential(nn.Dropout(0.5), nn.Identity()), [1, 1], chunks=3, checkpoint=mode
    )
    input = torch.ones(9, 8, requires_grad=True)
    output = model(input)
    model.eval()
    output.sum().backward()
    assert input.grad is not None and torch.equal(input.grad, output.detach())
    assert (output == 0).any()


def test_a_module_of_two_partitions_is_given_back_its_mode() -> None:
    shared = nn.Dropout(0.5)
    model = on_cpu(
        nn.Sequential(nn.Sequential(shared), nn.Sequential(nn.Linear(4, 4), shared)),
        [1, 1],
        chunks=2,
        checkpoint="always",
    )
    output = model(torch.ones(6, 4))
    model.eval()
    output.sum().backward()
    assert not any(part.training for part in model.modules())


def scale(model: GPipe) -> None:
    with torch.no_grad():
        model[3].weight.mul_(2)  # type: ignore[operator]


def load(model: GPipe) -> None:
    model.load_state_dict(layers().state_dict())


def step(model: GPipe) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def swap(model: GPipe) -> None:
    """Put other weights in, as those do that evaluate an average."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def replace(model: GPipe) -> None:
    model[3].bias = nn.Parameter(torch.ones(2, dtype=torch.float64))


@REPEATS
@pytest.mark.parametrize("change", [scale, load, step, swap, replace])
def test_weights_changed_before_the_backward_are_refused(
    mode: str, change: Callable[[GPipe], None]
) -> None:
    """The forward was repeated with the new weights, and gave the gradient of neither."""
    model = pipe(mode)
    output = model(ramp(6, 3))
    change(model)
    before = [parameter.grad for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="changed between the forward and the backward"):
        output.sum().backward()
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient


def test_the_changed_weight_is_named_as_in_the_state_dict() -> None:
    model = pipe("always")
    output = model(ramp(6, 3))
    scale(model)
    with pytest.raises(RuntimeError, match="'3.weight' changed"):
        output.sum().backward()
    output = model(ramp(6, 3))
    step(model)
    with pytest.raises(RuntimeError, match="'0.weight' and 3 more changed"):
        output.sum().backward()


@REPEATS
def test_statistics_of_a_norm_that_is_in_eval_mode_are_not_changed_unnoticed(mode: str) -> None:
    model = pipe(mode)
    norm = model[1].eval()
    output = model(ramp(6, 3))
    norm.running_mean.add_(1)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="'1.running_mean' changed"):
        output.sum().backward()


@REPEATS
@pytest.mark.parametrize("deferred", [False, True])
def test_what_forwards_change_themselves_is_not_refused(mode: str, deferred: bool) -> None:
    model, expected = (pipe(mode, deferred_batch_norm=deferred) for _ in range(2))
    outputs = [model(ramp(6, 3)), model(ramp(8, 3))]
    sum(output.sum() for output in outputs).backward()  # type: ignore[union-attr]
    for size in (6, 8):
        expected(ramp(size, 3)).sum().backward()
    assert_same_gradients(model, expected)


def test_weights_of_partitions_that_repeat_nothing_may_change() -> None:
    """Plain torch does not ask for a frozen bottom's weights in the backward either."""
    model = pipe("always")
    model.partitions[0].requires_grad_(False)
    output = model(ramp(6, 3))
    with torch.no_grad():
        model[0].weight.mul_(2)  # type: ignore[operator]
    output.sum().backward()
    assert model[3].weight.grad is not None


def test_weights_that_change_after_a_retained_backward_are_refused_at_the_next() -> None:
    model = pipe("always")
    loss = model(ramp(6, 3)).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    scale(model)
    with pytest.raises(RuntimeError, match="'3.weight' changed"):
        loss.backward()


def test_a_leaf_that_a_layer_holds_is_looked_at_as_well() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.ones(3, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    layer = Scale()
    model = on_cpu(nn.Sequential(layer, nn.Linear(3, 2)), [1, 1], checkpoint="always")
    output = model(torch.ones(4, 3))
    with torch.no_grad():
        layer.factor.mul_(2)
    with pytest.raises(RuntimeError, match="'held tensor 0' changed"):
        output.sum().backward()


def test_a_failed_check_leaves_the_module_as_it_was() -> None:
    model, expected = pipe("always"), copy.deepcopy(pipe("always"))
    output = model(ramp(6, 3))
    scale(model)
    model.eval()
    with pytest.raises(RuntimeError, match="changed"):
        output.sum().backward()
    assert not any(part.training for part in model.modules())
    model.train()
    model.load_state_dict(expected.state_dict())
    for one in (model, expected):
        one(ramp(6, 3)).sum().backward()
    assert_same_gradients(model, expected)
