"""Prove what a collate function is given, what it may return, and what is refused."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from pipetransformer.config import CollateFunction
from pipetransformer.feed import Collation, Samples, read_lengths

ROWS = [{"input_ids": [1] * n, "text": "left out", "label": n} for n in (2, 4, 3)]


def samples_of(function: CollateFunction | None, dataset: Any = ROWS, **options: Any) -> Samples:
    names = ("input_ids", "attention_mask", "labels")
    collation = Collation(names, ("input_ids",), ("labels",), function=function, **options)
    return Samples(dataset, collation, seed=0)


def padded(items: list[dict[str, Any]]) -> UserDict[str, Any]:
    """Pad with zeros; a UserDict, as transformers' tokenizers return."""
    most = max(len(item["input_ids"]) for item in items)
    ids = [item["input_ids"] + [0] * (most - len(item["input_ids"])) for item in items]
    return UserDict(
        input_ids=torch.tensor(ids),
        labels=np.array([item["label"] for item in items]),
        special="ignored",
    )


def test_items_are_padded_by_the_function_and_labels_go_by_any_name() -> None:
    batch = samples_of(padded).read([0, 1], view=0)
    assert batch["input_ids"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["labels"].tolist() == [2, 4] and batch.keys() == {"input_ids", "labels"}


@pytest.mark.parametrize("drops", [True, False])
def test_the_function_gets_the_columns_that_the_model_takes_or_all(drops: bool) -> None:
    seen: list[set[str]] = []

    def collate(items: list[dict[str, Any]]) -> Any:
        seen.extend(set(item) for item in items)
        return padded(items)

    samples = samples_of(collate, drops_unknown=drops)
    samples.read([0], view=0)
    assert seen == [{"input_ids", "label"} | ({"text"} if not drops else set())]
    assert samples.collation.unused(ROWS[0]) == ("text",)


@pytest.mark.parametrize("function", [None, default_collate], ids=["stacked", "collated"])
def test_what_a_forward_takes_but_the_first_samples_lacked_is_refused(function: Any) -> None:
    texts = [{"input_ids": torch.ones(2), "labels": index} for index in range(2)]
    texts.append({**texts[0], "token_type_ids": torch.ones(2)})
    samples = samples_of(function, texts, unseen=("token_type_ids", "position_ids"))
    assert samples.read([0, 1], view=0).keys() == {"input_ids", "labels"}
    with pytest.raises(ValueError, match="has 'token_type_ids', which the model's forward takes"):
        samples.read([2], view=0)


def test_tuples_in_and_out_keep_their_order() -> None:
    data = TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(3))
    batch = samples_of(default_collate, data).read([2, 0], view=0)
    assert batch["input_ids"].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert batch["labels"].tolist() == [2, 0]


def test_random_numbers_of_the_function_follow_from_seed_view_and_samples() -> None:
    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        return {"input_ids": torch.rand(len(items), 2), "labels": torch.zeros(len(items))}

    samples = samples_of(collate)
    one, again, other = (samples.read([0, 1], view=view)["input_ids"] for view in (4, 4, 5))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert not torch.equal(samples.read([0, 2], view=4)["input_ids"], one)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"labels": torch.zeros(2)}, r"collate_fn returns lacks \['input_ids'\].*=False"),
        (torch.zeros(2), "what collate_fn returns is a Tensor; give a mapping"),
        ({"input_ids": torch.zeros(3, 1), "labels": torch.zeros(2)}, r"\(3, 1\) for 2 samples"),
        ({"input_ids": "text", "labels": torch.zeros(2)}, "'input_ids' as str"),
        ({"input_ids": torch.tensor(1), "labels": torch.zeros(2)}, r"Tensor \(\) for 2 samples"),
    ],
)
def test_what_is_no_batch_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samples_of(lambda items: returned).read([0, 1], view=0)


def test_a_function_that_fails_is_named_with_its_samples_and_its_error() -> None:
    def collate(items: list[Any]) -> Any:
        raise KeyError("pixel_values")

    with pytest.raises(ValueError, match=r"collate_fn fails for the samples \[1, 2\].*pixel_v"):
        samples_of(collate).read([1, 2], view=0)


def test_rows_of_unequal_lengths_without_a_function_are_told_of_one() -> None:
    with pytest.raises(ValueError, match=r"'input_ids'.*cannot be stacked.*DataCollatorWithPad"):
        samples_of(None).read([0, 1], view=0)


def test_targets_may_be_left_out_where_none_are_needed() -> None:
    rows = [{"input_ids": torch.ones(2)}] * 2
    assert samples_of(None, rows, needs_targets=False).read([0, 1], view=0).keys() == {"input_ids"}
    only = TensorDataset(torch.ones(2, 3))
    batch = samples_of(None, only, needs_targets=False).read([0, 1], view=0)
    assert batch.keys() == {"input_ids"} and batch["input_ids"].shape == (2, 3)


def test_lengths_are_those_of_a_column_or_of_the_first_input() -> None:
    assert read_lengths(ROWS, "input_ids").tolist() == [2, 4, 3]
    assert read_lengths([{"length": 7}, {"length": 5}], "input_ids").tolist() == [7, 5]
    pairs: list[tuple[Tensor, int]] = [(torch.zeros(4), 0), (torch.zeros(6), 1)]
    assert read_lengths(pairs, "x").tolist() == [4, 6]
    with pytest.raises(ValueError, match="sample 0 has no length"):
        read_lengths([{"label": 1}], "input_ids")
