"""Prove that a step's loss joins from micro-batches as the Trainer's does, or is refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.gpipe import GPipe, StashedPipeline
from autopipe.loss import Loss
from tests.helpers.pipes import CLOSE, assert_same_gradients, linears, on_cpu, ramp

TARGET = torch.tensor([-100, 2, -100, -100, 1, 0, 3])
"""Of three micro-batches (3, 2, 2 samples) each ignores another share."""
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
LOSSES: dict[str, Any] = {
    "ignored": nn.CrossEntropyLoss(),
    "weighted": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
    "function": F.cross_entropy,
    "partial": partial(F.cross_entropy, ignore_index=2),
}
SCHEDULES = pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])


def pipe(**options: Any) -> GPipe:
    return on_cpu(linears(3, 5, 4), [2, 1, 1], chunks=3, **options)


@SCHEDULES
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("name", list(LOSSES))
def test_ignored_targets_and_class_weights_count_as_in_the_whole_batch(
    name: str, checkpoint: str, schedule: str
) -> None:
    """A mean over targets was weighted by samples, and gave other gradients."""
    plain, model = linears(3, 5, 4), pipe(checkpoint=checkpoint)
    target = TARGET.where(TARGET >= 0, 2) if name == "partial" else TARGET
    expected = LOSSES[name](plain(ramp(7, 3)), target)
    expected.backward()
    found = model.step(ramp(7, 3), target, LOSSES[name], schedule=schedule)
    torch.testing.assert_close(found, expected.detach(), **CLOSE)
    assert_same_gradients(model, plain)


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, weight=WEIGHTS)


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def of_a_pair(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0] + output[1], target)


@SCHEDULES
@pytest.mark.parametrize("loss_fn", [weighted, summed])
def test_a_function_that_depends_on_the_split_is_refused_before_gradients_are_added(
    loss_fn: Any, schedule: str
) -> None:
    model = pipe(schedule=schedule)
    with pytest.raises(ValueError, match=f"{loss_fn.__name__}' depends on how a batch is split"):
        model.step(ramp(7, 3), TARGET, loss_fn)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_function_of_several_outputs_is_compared_as_well() -> None:
    class Twice(nn.Module):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return hidden, hidden.tanh()

    layers = [*linears(3, 5, 4), Twice()]
    model = on_cpu(nn.Sequential(*layers), [3, 2], chunks=3)
    with pytest.raises(ValueError, match="of_a_pair' depends on how a batch is split"):
        model.step(ramp(7, 3), TARGET, of_a_pair)
    plain = nn.Sequential(*copy.deepcopy(layers))
    expected = of_a_pair(plain(ramp(7, 3)), TARGET.abs() % 4)
    expected.backward()
    found = model.step(ramp(7, 3), TARGET.abs() % 4, of_a_pair)
    torch.testing.assert_close(found, expected.detach(), **CLOSE)
    assert_same_gradients(model, plain)


def test_a_value_without_samples_beside_the_output_is_let_be() -> None:
    class Beside(nn.Module):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return hidden, hidden.square().mean()

    layers = [*linears(3, 4), Beside()]
    model = on_cpu(nn.Sequential(*layers), [2, 1], chunks=7)
    plain = nn.Sequential(*copy.deepcopy(layers))

    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output[0], target) + output[1]

    expected = loss_fn(plain(ramp(7, 3)), ramp(7, 4))
    expected.backward()
    found = model.step(ramp(7, 3), ramp(7, 4), loss_fn)
    torch.testing.assert_close(found, expected.detach(), **CLOSE)
    assert_same_gradients(model, plain)


def test_what_comes_up_later_is_found_by_a_later_step() -> None:
    model = pipe()
    for _ in range(16):
        model.step(ramp(7, 3), TARGET.abs() % 4, lambda *pair: F.cross_entropy(*pair))
    with pytest.raises(ValueError, match="depends on how a batch is split"):
        model.step(ramp(7, 3), TARGET, lambda *pair: F.cross_entropy(*pair))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_sum_is_refused_by_its_name(reduction: str) -> None:
    model, loss_fn = pipe(), nn.CrossEntropyLoss(reduction=reduction)
    with pytest.raises(ValueError, match=f"CrossEntropyLoss has reduction='{reduction}'"):
        model.step(ramp(7, 3), TARGET, loss_fn)


def test_a_loss_that_would_itself_be_trained_is_refused() -> None:
    class Temperature(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output * self.scale, target)

    with pytest.raises(ValueError, match="Temperature has parameters of its own"):
        pipe().step(ramp(7, 3), TARGET.abs() % 4, Temperature())


def test_a_count_that_has_a_gradient_is_refused() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return output.sum(), output.square().sum()

    with pytest.raises(ValueError, match="the count of the loss's .* has a gradient"):
        pipe().step(ramp(7, 3), TARGET, loss_fn)


@SCHEDULES
def test_a_batch_without_a_target_that_counts_has_a_loss_and_gradients_of_zero(
    schedule: str,
) -> None:
    model = pipe(schedule=schedule)
    found = model.step(ramp(7, 3), torch.full((7,), -100), nn.CrossEntropyLoss())
    assert found == 0
    for parameter in model.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_a_sum_over_nothing_that_is_not_zero_is_no_number() -> None:
    found = pipe().step(
        ramp(7, 3), TARGET, Loss(lambda output, _: (output.sum(), 0), is_exact=True)
    )
    assert found.isnan()


@SCHEDULES
def test_a_step_in_which_nothing_trains_is_refused(schedule: str) -> None:
    """It gave a loss that fell no more, where torch's backward refuses."""
    model = pipe(schedule=schedule).requires_grad_(False)
    with pytest.raises(ValueError, match="nothing would train: no parameter and no input"):
        model.step(ramp(7, 3), TARGET, nn.CrossEntropyLoss())
    input = ramp(7, 3).requires_grad_()
    model.step(input, TARGET, nn.CrossEntropyLoss())
    assert input.grad is not None and input.grad.any()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_loss_without_a_gradient_is_refused(checkpoint: str) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.detach(), target.abs() % 4)

    with pytest.raises(ValueError, match="has no gradient by the model's output"):
        pipe(checkpoint=checkpoint).step(ramp(7, 3), TARGET, loss_fn)


def test_a_mean_over_half_precision_is_added_up_in_single() -> None:
    model = on_cpu(nn.Sequential(nn.Linear(1, 1, bias=False)).bfloat16(), [1], chunks=4)
    nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
    input = torch.tensor([256.0, 1, 1, 1]).bfloat16()[:, None]
    found = model.step(input, input, lambda output, _: output.float().mean().bfloat16())
    assert found == 259 / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_corrected_gradient_has_its_parameter_s_dtype(dtype: torch.dtype) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=dtype))

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * self.scale

    model = on_cpu(nn.Sequential(Scale(), nn.Linear(3, 4, dtype=dtype)), [1, 1], chunks=3)
    found = model.step(ramp(7, 3).to(dtype), TARGET, nn.CrossEntropyLoss())
    assert found.dtype == torch.float32
    assert all(parameter.grad.dtype == dtype for parameter in model.parameters())  # type: ignore[union-attr]


def stream(**options: Any) -> StashedPipeline:
    build = partial(torch.optim.SGD, lr=0.1)
    return StashedPipeline(
        linears(3, 5, 4), [2, 2], optimizer=build, devices=["cpu"] * 2, chunks=3, **options
    )


def test_a_stream_joins_losses_by_the_same_rule() -> None:
    """One batch is ordinary training."""
    plain = linears(3, 5, 4)
    expected = F.cross_entropy(plain(ramp(7, 3)), TARGET)
    expected.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    model = stream()
    assert model.train_on([(ramp(7, 3), TARGET)], F.cross_entropy) == [
        pytest.approx(expected.item(), rel=1e-12)
    ]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_a_stream_refuses_what_a_step_refuses() -> None:
    batches = [(ramp(7, 3), TARGET)] * 2
    with pytest.raises(ValueError, match="weighted' depends on how a batch is split"):
        stream().train_on(batches, weighted)
    with pytest.raises(ValueError, match="reduction='sum'"):
        stream().train_on(batches, nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(ValueError, match="nothing would train"):
        stream().requires_grad_(False).train_on(batches, nn.CrossEntropyLoss())
