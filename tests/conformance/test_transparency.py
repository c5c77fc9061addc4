"""Hold that a GPipe module is to autograd, to copies and to checkpoints what the plain one is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.pipes import (
    CLOSE,
    MODES,
    Call,
    assert_same_gradients,
    assert_transparent,
    every_mode,
    linears,
    mean_loss,
    on_cpu,
    ramp,
    wrapped,
)


class Square(torch.autograd.Function):
    """Square in Python, forward and backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return input * input

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (input,) = ctx.saved_tensors
        return 2 * input * gradients[0]


@every_mode
@pytest.mark.parametrize("balance", [[6], [1, 2, 3], [1] * 6])
@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_output_and_every_gradient_equal_the_plain_module_s(
    balance: list[int], chunks: int, mode: str
) -> None:
    input = ramp(7, 3).requires_grad_()
    assert_transparent(linears(3, 5, 4, 2), balance, input, chunks=chunks, checkpoint=mode)


@every_mode
@pytest.mark.parametrize("training", [True, False])
def test_one_micro_batch_draws_and_computes_bitwise_what_the_plain_module_does(
    mode: str, training: bool
) -> None:
    def run(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(11)
        input = ramp(8, 6).float().requires_grad_()
        output = model.train(training)(input)
        output.square().sum().backward()
        assert input.grad is not None
        return output, input.grad, torch.rand(3)

    plain = nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)
    )
    model = on_cpu(copy.deepcopy(plain), [2, 3], chunks=1, checkpoint=mode)
    for ours, expected in zip(run(model), run(plain), strict=True):
        assert torch.equal(ours, expected)
    assert_same_gradients(model, plain, rtol=0, atol=0)
    assert all(
        torch.equal(ours, expected)
        for ours, expected in zip(model.buffers(), plain.buffers(), strict=True)
    )


@every_mode
def test_training_for_several_steps_gives_the_plain_model_s_parameters(mode: str) -> None:
    plain, model = wrapped(mode)
    for module in (plain, model):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
        for step in range(4):
            optimizer.zero_grad()
            mean_loss(module(ramp(7, 3) + step), ramp(7, 2)).backward()
            optimizer.step()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        # Adam divides by the gradient's size, which magnifies the last digits of small ones.
        torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-9)


@every_mode
def test_several_forwards_before_one_backward_and_gradients_that_add_up(mode: str) -> None:
    for module in (pair := wrapped(mode)):
        first, second = module(ramp(5, 3)), module(ramp(4, 3) + 1)
        (first.sum() * second.square().sum()).backward()
        module(ramp(3, 3)).sum().backward()
    assert_same_gradients(pair[1], pair[0])


@every_mode
def test_a_retained_graph_gives_the_gradients_again_and_a_freed_one_refuses(mode: str) -> None:
    for module in (pair := wrapped(mode)):
        loss = module(ramp(5, 3)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert_same_gradients(pair[1], pair[0])


@every_mode
def test_autograd_grad_gives_the_gradients_of_parameters_and_fills_no_grad(mode: str) -> None:
    plain, model = wrapped(mode)
    found = []
    for module in (plain, model):
        input = ramp(5, 3).requires_grad_()
        loss = module(input).square().sum()
        found.append(torch.autograd.grad(loss, [input, *module.parameters()]))
        assert all(parameter.grad is None for parameter in module.parameters())
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_backward_to_some_parameters_leaves_the_others_alone() -> None:
    for module in (pair := wrapped()):
        module(ramp(5, 3)).sum().backward(inputs=list(module.parameters())[2:4])
    assert_same_gradients(pair[1], pair[0])


@every_mode
def test_hooks_of_parameters_fire_once_and_may_change_the_gradient(mode: str) -> None:
    calls: list[str] = []
    for module in (pair := wrapped(mode)):
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: (calls.append("hook"), grad * 2)[1])
            parameter.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
        module(ramp(6, 3)).square().sum().backward()
        assert (calls.count("hook"), calls.count("after")) == (6, 6)
        calls.clear()
    assert_same_gradients(pair[1], pair[0])
    pair[1].step(ramp(6, 3), ramp(6, 2), mean_loss)
    assert (calls.count("hook"), calls.count("after")) == (6, 6)


@every_mode
def test_double_backward_is_refused_with_its_reason(mode: str) -> None:
    model = wrapped(mode)[1]
    input = ramp(6, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(model(input).square().sum(), input, create_graph=True)
    with pytest.raises(RuntimeError, match="through a GPipe module cannot be differentiated"):
        gradient.square().sum().backward()


@every_mode
def test_no_grad_and_inference_give_outputs_without_a_graph(mode: str) -> None:
    plain, model = wrapped(mode)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            output = model(ramp(5, 3).requires_grad_())
            torch.testing.assert_close(output, plain(ramp(5, 3)), **CLOSE)
        assert not output.requires_grad and output.grad_fn is None


@every_mode
def test_frozen_layers_unused_parameters_and_detached_outputs_get_no_gradient(mode: str) -> None:
    plain, _ = wrapped()
    plain[0].requires_grad_(False)
    plain[2].register_parameter("unused", nn.Parameter(torch.ones(1)))
    assert_transparent(plain, [1, 3, 2], ramp(5, 3), chunks=3, checkpoint=mode)
    cut = nn.Sequential(nn.Linear(3, 3), Call(Tensor.detach), nn.Linear(3, 2)).double()
    assert_transparent(cut, [1, 1, 1], ramp(5, 3), chunks=2, checkpoint=mode)
    frozen = on_cpu(linears(3, 2).requires_grad_(False), [1, 1], chunks=2, checkpoint=mode)
    assert not frozen(ramp(4, 3)).requires_grad


@every_mode
def test_an_input_that_needs_no_gradient_gets_none_and_a_computed_one_passes_it_on(
    mode: str,
) -> None:
    assert_transparent(linears(3, 4), [1, 1], ramp(5, 3), chunks=2, checkpoint=mode)
    plain, model = wrapped(mode)
    found = []
    for module in (plain, model):
        leaf = ramp(5, 3).requires_grad_()
        module(leaf.exp() * 2).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0], **CLOSE)


@every_mode
def test_sparse_gradients_and_a_parameter_shared_by_partitions_add_up(mode: str) -> None:
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    shared = nn.Sequential(first, nn.Tanh(), last).double()
    assert_transparent(shared, [2, 1], ramp(5, 3), chunks=2, checkpoint=mode)
    table = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2)).double()
    plain, model = table, on_cpu(copy.deepcopy(table), [1, 1], chunks=3, checkpoint=mode)
    for module in (plain, model):
        module(torch.tensor([1, 5, 1, 2, 2])).square().sum().backward()
    ours, expected = next(model.parameters()).grad, next(plain.parameters()).grad
    assert ours is not None and expected is not None and ours.is_sparse
    torch.testing.assert_close(ours.to_dense(), expected.to_dense(), **CLOSE)


def test_gradients_of_two_parameters_never_share_memory() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.zeros(2)) for _ in range(2))

        def forward(self, input: Tensor) -> Tensor:
            return input + self.a + self.b

    for chunks in (1, 2):
        for train in (
            lambda model: model(torch.ones(4, 2)).sum().backward(),
            lambda model: model.step(torch.ones(4, 2), torch.ones(4, 2), mean_loss),
        ):
            model = on_cpu(nn.Sequential(Sum(), nn.Identity()), [1, 1], chunks=chunks)
            train(model)
            pointers = {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
            assert len(pointers) == 2


class Scaled(nn.Module):
    """Hold a tensor as a plain attribute."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@every_mode
def test_an_attribute_that_is_no_parameter_gets_its_gradient_too(mode: str) -> None:
    found = []
    for wrap in (lambda module: module, lambda m: on_cpu(m, [1, 1], chunks=2, checkpoint=mode)):
        leaf = torch.full((3,), 2.0, requires_grad=True)
        module = wrap(nn.Sequential(Scaled(leaf), Scaled(leaf)))
        module(torch.ones(4, 3)).sum().backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    assert torch.equal(*found)


@every_mode
def test_python_autograd_functions_work(mode: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Call(Square.apply), nn.Linear(3, 2)).double()
    assert_transparent(model, [1, 1, 1], ramp(5, 3).requires_grad_(), chunks=2, checkpoint=mode)


@every_mode
def test_a_layer_that_differentiates_inside_its_forward_works(mode: str) -> None:
    def slope(input: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = input.detach().requires_grad_()
            return torch.autograd.grad(leaf.pow(3).sum(), leaf)[0] * input

    model = nn.Sequential(nn.Linear(3, 3), Call(slope), nn.Linear(3, 2)).double()
    assert_transparent(model, [1, 1, 1], ramp(5, 3).requires_grad_(), chunks=2, checkpoint=mode)


@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 1, 2]])
def test_in_place_layers_work_inside_of_a_partition(balance: list[int]) -> None:
    model = nn.Sequential(
        nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), nn.Linear(3, 3),
        nn.Sequential(nn.Linear(3, 3), nn.Hardtanh(inplace=True)),
    ).double()  # fmt: skip
    for mode in MODES:
        assert_transparent(model, balance, ramp(5, 3), chunks=2, checkpoint=mode)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_in_place_work_on_a_partition_s_input_is_right_or_refused(mode: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    if mode == "never":
        assert_transparent(model, [1, 2], ramp(5, 3), chunks=2, checkpoint=mode)
        return
    output = on_cpu(model, [1, 2], chunks=2, checkpoint=mode)(ramp(5, 3))
    with pytest.raises(RuntimeError, match="was changed in place"):
        output.sum().backward()


def test_in_place_work_that_the_plain_module_refuses_is_refused() -> None:
    # Tanh needs its output for its backward.
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.ReLU(inplace=True)).double()
    for module in (model, on_cpu(copy.deepcopy(model), [2, 1], chunks=2, checkpoint="never")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            module(ramp(5, 3)).sum().backward()


@every_mode
def test_an_output_may_be_changed_in_place_by_the_caller(mode: str) -> None:
    for chunks in (1, 2):
        for module in (
            pair := (
                linears(3, 4)[:1],
                on_cpu(linears(3, 4)[:1], [1], chunks=chunks, checkpoint=mode),
            )
        ):
            module(ramp(4, 3)).add_(1).square_().sum().backward()
        assert_same_gradients(pair[1], pair[0])
