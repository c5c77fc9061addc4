"""Prove that what the demo sets beside the elastic run trains the same model rightly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.demo import build_model
from pipetransformer.demo.by_hand import Blocks, PlainLoop, TorchPipeline
from pipetransformer.demo.settings import MAX_GRAD_NORM, NUM_BLOCKS
from pipetransformer.processes import connect
from tests.helpers.pool import Pool

FROZEN = (0, 3, 6)
SIZE = 8


def scans() -> tuple[Tensor, Tensor]:
    """Return two batches of random images and labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2 * SIZE, 1, 32, 32, generator=generator)
    return images, torch.randint(10, (2 * SIZE,), generator=generator)


def trained(loop: PlainLoop | TorchPipeline) -> dict[str, Tensor]:
    """Take two steps at each depth; return the gradients and the weights, by name."""
    found: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(loop.blocks.parameters(), lr=0.1)
    for num_frozen in FROZEN:
        loop.freeze(num_frozen)
        for start in (0, SIZE):
            optimizer.zero_grad()
            loop.set_gradients(list(range(start, start + SIZE)))
            optimizer.step()
        for name, parameter in loop.blocks.named_parameters():
            if parameter.grad is not None:
                found[f"{num_frozen} {name}"] = parameter.grad.clone()
    return found | {name: p.detach().clone() for name, p in loop.blocks.named_parameters()}


def as_anyone_would() -> dict[str, Tensor]:
    """Train timm's own model alike; names are those of Blocks."""
    model, (images, labels) = build_model(10, seed=0), scans()
    blocks, found = Blocks(model, 0, NUM_BLOCKS), dict[str, Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for num_frozen in FROZEN:
        if num_frozen:
            model.patch_embed.requires_grad_(False)
            model.pos_embed.requires_grad_(False)
        model.blocks[:num_frozen].requires_grad_(False)
        for start in (0, SIZE):
            optimizer.zero_grad()
            one = slice(start, start + SIZE)
            nn.functional.cross_entropy(model(images[one]), labels[one]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
        for name, parameter in blocks.named_parameters():
            if parameter.grad is not None:
                found[f"{num_frozen} {name}"] = parameter.grad.clone()
    return found | {name: p.detach().clone() for name, p in blocks.named_parameters()}


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return as_anyone_would()


def test_the_loop_with_kept_rows_trains_as_timm_s_own_model(expected: dict[str, Tensor]) -> None:
    found = trained(PlainLoop(build_model(10, seed=0), *scans()))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        # Rows are computed in other sizes than a batch's, which rounds differently.
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def half() -> dict[str, Tensor]:
    world = connect("cpu", timeout_s=60)
    try:
        return trained(TorchPipeline(world, build_model(10, seed=0), *scans()))
    finally:
        world.close()


def test_torch_s_pipeline_trains_as_timm_s_own_model(
    two_ranks: Pool, expected: dict[str, Tensor]
) -> None:
    below, above = two_ranks.run(half)
    named = {**below, **above}  # Halves keep the blocks' numbers.
    assert named.keys() == expected.keys()
    for name, tensor in named.items():
        # Micro-batches add up in another order.
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6, msg=name)
