"""Prove that whole numbers keep their values on the meta device, and hidden states have none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from pipetransformer.cli.known_integers import KnownIntegers


@pytest.fixture
def known() -> Iterator[KnownIntegers]:
    with torch.device("meta"), KnownIntegers() as mode:
        yield mode


def test_a_mask_of_whole_numbers_can_be_looked_at(known: KnownIntegers) -> None:
    ids = torch.arange(6).view(2, 3)
    mask = torch.ones_like(ids)
    mask[1, 2] = 0
    assert ids.is_meta and mask.is_meta
    assert not mask.all() and mask[0].all() and int(ids.max()) == 5
    assert torch.equal(mask.sum(1), 3 - torch.arange(2)) and not torch.equal(ids, mask)
    # Fractions that are computed of it are known, too.
    assert ((1.0 - mask.float()) * -2.0).min().item() == -2.0


def test_shapes_that_depend_on_known_values_are_found(known: KnownIntegers) -> None:
    places = (torch.arange(4).view(2, 2) % 3 == 0).nonzero()
    assert places.is_meta and places.shape == (2, 2)
    value = known.value_of(places)
    assert value is not None and value.tolist() == [[0, 0], [1, 1]]


def test_what_is_computed_of_weights_has_no_value(known: KnownIntegers) -> None:
    hidden = nn.Linear(4, 4)(torch.rand(2, 4))
    assert hidden.is_meta and known.value_of(hidden) is None
    with pytest.raises(RuntimeError, match="item.* cannot be called on meta tensors"):
        bool((hidden > 0).any())
    # Of two hidden states only the shapes are known, and these are equal.
    assert torch.equal(hidden, hidden + 1) and not torch.equal(hidden, hidden[:1])


def test_whole_numbers_that_weights_are_written_into_are_forgotten(known: KnownIntegers) -> None:
    ids, scores = torch.zeros(2, dtype=torch.int64), nn.Linear(4, 4).weight
    ids.copy_(scores[:2].argmax(-1))
    with pytest.raises(RuntimeError, match="item.* cannot be called on meta tensors"):
        bool(ids.any())


def test_gradients_flow_as_without_known_values(known: KnownIntegers) -> None:
    layer, mask = nn.Linear(4, 4), torch.arange(2)
    (layer(torch.rand(2, 4)) * mask[:, None]).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.shape == (4, 4)


def test_a_token_beyond_its_table_is_an_error_as_on_a_cpu(known: KnownIntegers) -> None:
    with pytest.raises(RuntimeError, match="index 3 is out of bounds"):
        torch.arange(3)[torch.arange(8)]


def test_tensors_on_the_cpu_are_computed_as_ever(known: KnownIntegers) -> None:
    product = torch.ones(2, device="cpu") * torch.arange(2, device="cpu")
    assert product.tolist() == [0.0, 1.0]
