"""Test the benchmarks' models: published parameter counts, and gradients on real tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopipe.gpipe.module import GPipe
from autopipe.skip.routes import verify_skippables
from experiments.benchmarks.gpipe.amoebanet import amoebanet_d
from experiments.benchmarks.gpipe.resnet import resnet
from experiments.benchmarks.gpipe.runs import count_parameters, rounded
from experiments.benchmarks.gpipe.unet import unet


def on_meta(build: Callable[..., nn.Sequential], *size: int) -> nn.Sequential:
    """Build a model without memory for its parameters."""
    with torch.device("meta"):
        return build(*size)


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ((5, 64), "232.7M"),
        ((6, 72), "362.2M"),
        ((11, 128), "2.21B"),
        ((24, 128), "4.99B"),
        ((24, 160), "7.80B"),
        ((48, 160), "15.82B"),
    ],
)
def test_unet_has_the_published_number_of_parameters(
    size: tuple[int, int], parameters: str
) -> None:
    assert rounded(count_parameters(on_meta(unet, *size))) == parameters


@pytest.mark.parametrize(
    ("size", "parameters", "model_gib"),
    [
        ((18, 208), "81.5M", 0.91),
        ((18, 256), "122.5M", None),
        ((18, 416), "319.0M", 3.57),
        ((18, 544), "542.7M", 6.07),
        ((36, 544), "1.06B", 11.80),
        ((72, 512), "1.84B", 20.62),
    ],
)
def test_amoebanet_d_has_the_published_number_of_parameters(
    size: tuple[int, int], parameters: str, model_gib: float | None
) -> None:
    count = count_parameters(on_meta(amoebanet_d, *size))
    assert rounded(count) == parameters
    # The published model memory, 12 bytes a parameter, has two more digits of the large counts.
    assert model_gib is None or round(12 * count / 2**30, 2) == model_gib


def test_resnet_101_has_370_layers_and_torchvisions_number_of_parameters() -> None:
    model = on_meta(resnet)
    assert len(model) == 370
    assert not any(isinstance(layer, nn.Sequential) for layer in model)
    assert count_parameters(model) == 44_549_160


@pytest.mark.parametrize("build", [lambda: unet(2, 4), resnet])
def test_every_skip_is_stashed_and_popped_once(build: Callable[[], nn.Sequential]) -> None:
    verify_skippables(on_meta(build))


@pytest.mark.parametrize(
    ("build", "balance"),
    [
        # Cuts within both halves, so that skips cross one boundary and two.
        (lambda: unet(2, 4, dropout=0.0), [20, 60, 29]),
        # Cuts between a stash and its addition.
        (lambda: resnet((1, 2, 1, 1), num_channels=4, num_classes=10), [8, 20, 34]),
        (lambda: amoebanet_d(3, 16, num_classes=10), [2, 3, 4]),
    ],
    ids=["unet", "resnet", "amoebanet"],
)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_gpipe_gives_every_parameter_the_gradient_of_the_plain_model(
    build: Callable[[], nn.Sequential], balance: list[int], checkpoint: str
) -> None:
    torch.manual_seed(0)
    plain = build()
    split = copy.deepcopy(plain)
    images = torch.rand(4, 3, 64, 64)
    # Batch norm sees a micro-batch at a time, so the plain model is given them one by one.
    torch.cat([plain(part) for part in images.chunk(2)]).square().mean().backward()
    pipeline = GPipe(
        split, balance, devices=["cpu"] * len(balance), chunks=2, checkpoint=checkpoint
    )
    pipeline(images).square().mean().backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    # Micro-batches add up in another order: float32's rounding, grown by the depth.
    for ours, theirs in zip(pipeline.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-3, atol=1e-6)
