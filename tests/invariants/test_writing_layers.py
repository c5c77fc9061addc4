"""Prove that layers which write into their own tensors or into given ones are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipetransformer import LayeredModel, Sublayer
from tests.helpers.loops import TINY, make_trainer
from tests.helpers.models import tiny_data
from tests.helpers.unusual import Bounded, Layer, Running, around


class Counting(nn.Module):
    """Scale by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls.data += 1
        return hidden / self.calls.sqrt()


@pytest.mark.parametrize(
    ("layer", "tensor"),
    [
        (Counting, "calls"),
        (Running, "norm.running_mean"),
        (lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), "weight_u"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), "weight.0._u"),
        (Bounded, "table.weight"),
    ],
)
def test_a_forward_that_writes_into_its_own_tensors_is_refused(layer: Any, tensor: str) -> None:
    # Each replica kept statistics of its own samples; frozen layers gave other activations to who
    # had computed more of them.
    model = nn.Sequential(nn.Linear(8, 8), layer(), nn.Linear(8, 3)).double()
    before = {name: t.clone() for name, t in model.named_buffers()}
    with (
        make_trainer(replace(TINY, build=lambda: model)) as trainer,
        pytest.raises(ValueError, match=rf"sublayer '1' writes into its own '.*{tensor}'"),
    ):
        trainer.step()
    for name, now in model.named_buffers():
        assert torch.equal(now, before[name]), name


class LateWriter(nn.Module):
    """Write into its buffer for some samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        if len(hidden) > 2:
            self.seen.add_(1)
        return hidden + self.seen


def test_a_forward_that_writes_later_ends_the_run_before_the_weights_change() -> None:
    model = nn.Sequential(nn.Linear(8, 8), LateWriter(), nn.Linear(8, 3)).double()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with (
        make_trainer(replace(TINY, build=lambda: model)) as trainer,
        pytest.raises(ValueError, match=r"sublayer '1' writes into its own '1.seen'"),
    ):
        trainer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


class Masked(nn.Module):
    """Overwrite the mask that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        mask[:, 0] = 1
        return self.linear(hidden) * mask


def writes_into_a_side() -> LayeredModel:
    parts = [nn.Linear(8, 8), Masked(), nn.Linear(8, 3)]
    sublayers = [
        Sublayer(str(i), i, part, ("mask",) if i == 1 else ()) for i, part in enumerate(parts)
    ]
    model = nn.Sequential(*parts).double()
    return LayeredModel(model, sublayers, inputs=("x",), targets=("y",))


def test_a_layer_that_writes_into_what_others_are_given_is_refused() -> None:
    # Other stages, and rows of the cache, had the mask as it was (loss off by 0.04).
    x, y = tiny_data().tensors
    mask = torch.rand(8).double()
    pairs = zip(x.unbind(), y.unbind(), strict=True)
    rows = [{"x": a.repeat(2)[:8], "y": b, "mask": mask} for a, b in pairs]
    job = replace(TINY, build=writes_into_a_side, data=lambda: rows)
    with pytest.raises(ValueError, match="'1' writes into 'mask', which other stages and the"):
        with make_trainer(job) as trainer:
            trainer.step()


def mean_so_far(layer: Layer, hidden: Tensor) -> Tensor:
    """Take off a running mean of what came while training."""
    if layer.training:
        layer.mean = 0.5 * layer.mean + 0.5 * hidden.detach().mean(0)
    return hidden - layer.mean


def shown(layer: Layer, hidden: Tensor) -> Tensor:
    """Keep what was computed for others to look at."""
    layer.mean = hidden.detach()
    return hidden


def test_a_layer_that_remembers_in_plain_tensors_while_it_trains_is_refused() -> None:
    # Each replica had its own mean, and a freeze lost it.
    start = torch.zeros(8).double()
    job = replace(TINY, build=lambda: around(Layer(mean_so_far, mean=start)))
    with make_trainer(job) as trainer:
        with pytest.raises(ValueError, match="output in training once other samples have run"):
            trainer.step()
    model = around(Layer(shown, mean=start))
    with torch.inference_mode():  # Its tensors have no version.
        model(torch.zeros(2, 8).double())
    with make_trainer(replace(TINY, build=lambda: model)) as trainer:
        trainer.step()
