"""Prove what digests of samples and stamps of weights tell apart, and what does not enter them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from autocache import digests as digests_module
from autocache.digests import add_entry
from autocache.row_content import Positions, RowContent
from autocache.stamp import chain_hash

CONTENT = RowContent(())


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool)


def batch(dtype: torch.dtype = torch.float32, num: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 200, (num, 7, 3), generator=generator)
    return {"x": (values - 100).to(dtype), "y": torch.arange(num)}


def _one_bit(values: Tensor) -> Tensor:
    changed = values.clone()
    changed.view(torch.uint8)[:, -1, -1] ^= 128
    return changed


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one top bit": _one_bit,
    "all signs": torch.neg,
    "two signs": lambda x: torch.cat((-x[:, :2], x[:, 2:]), 1),
    "two places": lambda x: x[:, [1, 0, *range(2, 7)]],
    "another shape": lambda x: x.transpose(1, 2).contiguous(),
    "the same bytes in another shape": lambda x: x.reshape(5, 3, 7),
    "the same bytes of another dtype": lambda x: x.view(torch.int32),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_changed_sample_has_another_digest(change: Callable[[Tensor], Tensor]) -> None:
    before = batch()
    after = {**before, "x": change(before["x"])}
    assert (CONTENT.digests(before) != CONTENT.digests(after)).all()


def test_entries_that_change_names_change_the_digest() -> None:
    entries = {"a": torch.randn(4, 6), "b": torch.randn(4, 6)}
    swapped = {"a": entries["b"], "b": entries["a"]}
    assert (CONTENT.digests(entries) != CONTENT.digests(swapped)).all()
    renamed = {"c": entries["a"], "b": entries["b"]}
    assert (CONTENT.digests(entries) != CONTENT.digests(renamed)).all()
    fewer = {"a": entries["a"]}
    assert (CONTENT.digests(entries) != CONTENT.digests(fewer)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_has_its_digest_whichever_others_it_comes_with(dtype: torch.dtype) -> None:
    whole = batch(dtype)
    singly = [
        CONTENT.digests({name: entry[i : i + 1] for name, entry in whole.items()})
        for i in range(5)
    ]
    assert torch.equal(CONTENT.digests(whole), torch.cat(singly))
    reordered = {name: entry.flip(0) for name, entry in reversed(whole.items())}
    assert torch.equal(CONTENT.digests(whole), CONTENT.digests(reordered).flip(0))


def test_rows_longer_than_a_block_have_the_sum_that_the_definition_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.randint(-(2**31), 2**31 - 1, (3, 1000), dtype=torch.int32)
    factors = [int(one) for one in digests_module._factors(1024)]
    wanted = [
        sum((word % 2**32) * factor for word, factor in zip(row, factors, strict=False)) % 2**64
        for row in values.tolist()
    ]
    words = values.numpy().view(np.uint32)
    assert digests_module._sums(words).tolist() == wanted
    monkeypatch.setattr(digests_module, "_BLOCK_WORDS", 96)
    assert digests_module._sums(words).tolist() == wanted


def test_padding_that_depends_on_the_batch_does_not_enter_but_lengths_do() -> None:
    positions = Positions("mask", ("hidden", "ids", "mask"), most=9)
    content = RowContent(("mask",), positions=positions)
    ids = torch.tensor([[4, 5, 6], [7, 8, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    short = content.digests({"ids": ids, "mask": mask})
    padded = {name: torch.nn.functional.pad(t, (0, 4), value=9 * (name == "ids"))
              for name, t in {"ids": ids, "mask": mask}.items()}  # fmt: skip
    assert torch.equal(content.digests(padded), short)
    longer = content.digests({"ids": ids, "mask": torch.ones_like(mask)})
    assert longer[0] == short[0] and longer[1] != short[1]


def test_of_random_flips_none_is_missed() -> None:
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.integers(256, size=(2000, 40), dtype=np.uint8))
    before = add_entry(np.zeros(2000, np.uint64), "x", values)
    changed = values.clone()
    for row in changed.numpy():
        places = rng.integers(40, size=rng.integers(1, 5))
        row[places] ^= np.uint8(1 << rng.integers(8))
    is_changed = (changed != values).any(1).numpy()
    after = add_entry(np.zeros(2000, np.uint64), "x", changed)
    assert ((before != after) == is_changed).all() and is_changed.sum() > 1900


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
