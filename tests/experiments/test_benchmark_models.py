"""Test the benchmarks' models: published parameter counts, and gradients on real tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn

from autopipe.gpipe.module import GPipe
from autopipe.skip.routes import verify_skippables
from experiments.benchmarks.gpipe import accuracy
from experiments.benchmarks.gpipe.amoebanet import amoebanet_d
from experiments.benchmarks.gpipe.resnet import resnet
from experiments.benchmarks.gpipe.runs import (
    Experiment,
    ModelFamily,
    Options,
    count_parameters,
    each_runnable,
    rounded,
)
from experiments.benchmarks.gpipe.unet import unet


def on_meta(build: Callable[..., nn.Sequential], *size: int) -> nn.Sequential:
    """Build a model without memory for its parameters."""
    with torch.device("meta"):
        return build(*size)


def gradients(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[int, Tensor | None]]:
    """Return the output and each parameter's gradient of its squares, by position.

    The seed makes dropout draw the same masks in models of the same layers.
    """
    torch.manual_seed(1)
    output = model(images)
    output.square().mean().backward()
    return output.detach(), {i: p.grad for i, p in enumerate(model.parameters())}


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


def test_unet_5_64_has_241_layers_and_maps_images_to_one_channel() -> None:
    model = on_meta(unet, 5, 64)
    assert len(model) == 241
    assert not any(isinstance(layer, nn.Sequential) for layer in model)
    assert model(torch.empty(2, 3, 192, 192, device="meta")).shape == (2, 1, 192, 192)


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


def test_amoebanet_d_18_256_has_24_layers_and_classifies_224_pixels() -> None:
    model = on_meta(amoebanet_d, 18, 256)
    assert len(model) == 24
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def test_resnet_101_has_370_layers_and_torchvisions_number_of_parameters() -> None:
    model = on_meta(resnet)
    assert len(model) == 370
    assert not any(isinstance(layer, nn.Sequential) for layer in model)
    assert count_parameters(model) == 44_549_160


@pytest.mark.slow
def test_resnet_101_computes_what_torchvisions_does() -> None:
    torch.manual_seed(0)
    peer = torchvision.models.resnet101()
    model = resnet()
    model.load_state_dict(dict(zip(model.state_dict(), peer.state_dict().values(), strict=True)))
    images = torch.rand(2, 3, 64, 64)
    output, ours = gradients(model, images)
    expected, theirs = gradients(peer, images)
    # The same operations in the same order; no tolerance beyond assert_close's for float32.
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_unet_gradients_are_equal_with_direct_skips_and_with_tuples(num_blocks: int) -> None:
    torch.manual_seed(0)
    direct = unet(num_blocks, 4)
    in_tuples = unet(num_blocks, 4, skips="tuple")
    state = direct.state_dict().values()
    in_tuples.load_state_dict(dict(zip(in_tuples.state_dict(), state, strict=True)))
    assert len(direct) == len(in_tuples)
    images = torch.rand(2, 3, 64, 64)
    output, ours = gradients(direct, images)
    expected, theirs = gradients(in_tuples, images)
    assert output.shape == (2, 1, 64, 64)
    assert all(gradient is not None for gradient in ours.values())
    # Bit for bit: the same operations, and each skip's two gradients are added in either model.
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_unet_with_tuples_carries_each_open_skip_through_every_layer_between() -> None:
    model = on_meta(lambda: unet(2, 4, skips="tuple"))
    value, most, open_skips = torch.empty(1, 3, 64, 64, device="meta"), 0, []
    for layer in model:
        value = layer(value)
        open_skips.append(len(value) - 1 if isinstance(value, tuple) else 0)
        most = max(most, open_skips[-1])
    assert most == 5
    assert isinstance(value, Tensor)
    # One more at each of five stashes, one less at each of five joins.
    changes = [after - before for before, after in zip(open_skips, open_skips[1:], strict=False)]
    assert [change for change in changes if change] == [1] * 5 + [-1] * 5


def test_amoebanet_d_gives_every_parameter_a_gradient() -> None:
    torch.manual_seed(0)
    model = amoebanet_d(6, 16, num_classes=10)
    output, found = gradients(model, torch.rand(2, 3, 64, 64))
    assert output.shape == (2, 10)
    assert all(g is not None and g.isfinite().all() and g.any() for g in found.values())


def test_amoebanet_d_cells_pass_the_last_output_on_beside_their_own() -> None:
    model = on_meta(amoebanet_d, 3, 16)
    last = model[0](torch.empty(1, 3, 64, 64, device="meta"))
    shapes = []
    for cell in model[1:-1]:
        pair = cell(last)
        assert pair[1] is last[0]
        shapes.append(tuple(pair[0].shape[1:]))
        last = pair
    # R, R, N, R, N, R, N: a reduction concatenates 3 states, a normal cell 4.
    assert shapes == [
        (3 * 8, 16, 16),
        (3 * 16, 8, 8),
        (4 * 16, 8, 8),
        (3 * 32, 4, 4),
        (4 * 32, 4, 4),
        (3 * 64, 2, 2),
        (4 * 64, 2, 2),
    ]


@pytest.mark.parametrize("build", [lambda: unet(2, 4), resnet])
def test_every_skip_is_stashed_and_popped_once(build: Callable[[], nn.Sequential]) -> None:
    verify_skippables(on_meta(build))


@pytest.mark.parametrize(
    ("build", "balance"),
    [
        # Cuts within both halves, so that skips cross one boundary and two.
        (lambda: unet(2, 4, dropout=0.0), [20, 60, 29]),
        (lambda: unet(2, 4, dropout=0.0, skips="tuple"), [20, 60, 29]),
        # Cuts between a stash and its addition.
        (lambda: resnet((1, 2, 1, 1), num_channels=4, num_classes=10), [8, 20, 34]),
        (lambda: amoebanet_d(3, 16, num_classes=10), [2, 3, 4]),
    ],
    ids=["unet", "unet with tuples", "resnet", "amoebanet"],
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


def test_an_experiment_that_cannot_run_is_named_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layers = ModelFamily(
        lambda num: nn.Sequential(*(nn.Identity() for _ in range(num))),
        lambda size, scale: size,
        image_side=64,
        segments=False,
    )
    experiments = [Experiment(f"n={n}", (4,), n, batch_size=1) for n in (2, 4, 8)]
    options = Options(scale=1.0, device="cpu", partitions=(4, 8), num_steps=1)
    ran = list(each_runnable(layers, experiments, options, lambda experiment: experiment.name))
    assert [name for _, name in ran] == ["n=4"]
    assert capsys.readouterr().out.splitlines() == [
        "  skipped n=2: --partitions leaves 2 out",
        "  skipped n=8: 4 layers for 8 partitions",
    ]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: unet(1, 64), "num_blocks is 1; the bottleneck needs at least 2"),
        (lambda: unet(2, 3), "num_channels is 3; give an even number"),
        (lambda: unet(2, 4, skips="portal"), "skips is 'portal'; give 'direct' or 'tuple'"),
        (lambda: amoebanet_d(4, 256), "num_normal_cells is 4; give a multiple of 3"),
        (lambda: amoebanet_d(3, 12), "num_filters is 12; give a multiple of 8"),
    ],
)
def test_a_size_that_no_model_has_is_refused(
    build: Callable[[], nn.Sequential], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_whole_batch_in_a_pipeline_learns_what_the_model_alone_does() -> None:
    chance = torch.Generator().manual_seed(0)
    data = torch.randn(128, 3, 32, 32, generator=chance), torch.arange(128) % 10
    found = {
        name: accuracy.train(data, data, row, seed=0, epochs=1)
        for name, row in accuracy.ROWS.items()
    }
    assert found["K = 2, M = 1"] == found["without a pipeline"]
    table = accuracy.table({n: [a] for n, a in found.items()}, {n: [1.0] for n in found})
    assert table.count("\n") == len(found) + 1
