"""Claims about a prefix's stamps: when they differ, and when layers get theirs back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autocache.stamp import chain_hash


def test_hash_changes_with_name_dtype_shape_mode_value_and_order() -> None:
    one, two = torch.ones(4), torch.zeros(4)
    hashes = [
        chain_hash(0, [("a", one), ("b", two)], mode="eval"),
        chain_hash(1, [("a", one), ("b", two)], mode="eval"),
        chain_hash(0, [("a", one), ("b", two)], mode="train"),
        chain_hash(0, [("b", two), ("a", one)], mode="eval"),
        chain_hash(0, [("a", one), ("c", two)], mode="eval"),
        chain_hash(0, [("a", one.view(2, 2)), ("b", two)], mode="eval"),
        chain_hash(0, [("a", one.view(torch.int32)), ("b", two)], mode="eval"),
        chain_hash(0, [("a", one), ("b", two + 1)], mode="eval"),
        chain_hash(0, [("a", one)], mode="eval"),
        chain_hash(0, [], mode="eval"),
    ]
    assert len(set(hashes)) == len(hashes)
    assert all(0 < value < 2**64 for value in hashes)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 2, dtype=torch.bfloat16),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.ones(3, dtype=torch.bool),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(2, requires_grad=True),
    ],
)
def test_hash_takes_any_dtype_and_form_and_repeats(tensor: Tensor) -> None:
    first = chain_hash(7, [("w", tensor)], mode="eval")
    assert first == chain_hash(7, [("w", tensor.clone())], mode="eval")


def test_refrozen_layers_get_their_stamps_back_only_with_the_same_weights() -> None:
    layers = [[("w", torch.full((2,), float(index)))] for index in range(3)]
    first = chain_hash(0, layers[0], mode="eval")
    second = chain_hash(first, layers[1], mode="eval")
    third = chain_hash(second, layers[2], mode="eval")
    trained = chain_hash(first, [("w", torch.full((2,), 9.0))], mode="eval")
    # Layer 3 is unchanged, but what it is fed is not.
    above = chain_hash(trained, layers[2], mode="eval")
    assert len({first, second, third, trained, above}) == 5
    assert chain_hash(chain_hash(first, layers[1], mode="eval"), layers[2], mode="eval") == third
