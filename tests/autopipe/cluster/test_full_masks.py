"""Prove that forwards on the meta device hear yes where they ask for a truth, and no number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autopipe.cluster.full_masks import FullMasks


@pytest.fixture
def masks() -> Iterator[FullMasks]:
    with torch.device("meta"), FullMasks() as mode:
        yield mode


def test_a_mask_is_taken_to_be_full_and_the_question_is_noted(masks: FullMasks) -> None:
    mask = torch.ones(2, 3, dtype=torch.int64)
    assert not masks.asked
    assert mask.all() and (mask == 1).all() and masks.asked


def test_tensors_without_values_differ_in_nothing_but_their_shapes(masks: FullMasks) -> None:
    hidden = nn.Linear(4, 4)(torch.rand(2, 4))
    assert torch.equal(hidden, hidden + 1) and not torch.equal(hidden, hidden[:1])
    assert not masks.asked


def test_a_number_that_is_asked_for_is_an_error_as_ever(masks: FullMasks) -> None:
    with pytest.raises(RuntimeError, match="item.* cannot be called on meta tensors"):
        torch.arange(3).max().item()


def test_a_copy_to_the_host_stays_without_values(masks: FullMasks) -> None:
    assert torch.rand(2).cpu().is_meta and torch.rand(2).to(torch.bfloat16).is_meta


def test_gradients_flow_as_ever(masks: FullMasks) -> None:
    layer, mask = nn.Linear(4, 4), torch.arange(2)
    (layer(torch.rand(2, 4)) * mask[:, None]).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.shape == (4, 4)


def test_tensors_on_the_cpu_are_computed_as_ever(masks: FullMasks) -> None:
    product = torch.ones(2, device="cpu") * torch.arange(2, device="cpu")
    assert product.tolist() == [0.0, 1.0] and not (product > 0).all()
    assert not masks.asked
