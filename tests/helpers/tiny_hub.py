"""Stand for the hub of models and data sets, so that the pages' programs download nothing.

`python tiny_hub.py PROGRAM` runs a program so, and needs no other file of the tests.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from datasets import Dataset, DatasetDict
from transformers import BertConfig, BertForSequenceClassification


def tiny_bert(*arguments: Any, **options: Any) -> Any:
    """Stand for a pretrained model."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=100, intermediate_size=16, **sizes, **options)
    )


def tiny_tokenizer(name: str) -> Any:
    """Stand for its tokenizer: a letter is a token."""

    def tokenize(text: str, *, padding: str, truncation: bool, max_length: int) -> dict[str, Any]:
        ids = [ord(letter) % 90 for letter in text[:max_length]]
        gap = [0] * (max_length - len(ids))
        return {"input_ids": ids + gap, "attention_mask": [1] * len(ids) + gap}

    return tokenize


def tiny_glue(*names: str, num_samples: int) -> dict[str, Dataset]:
    """Stand for a data set."""
    sizes = {"train": num_samples, "validation": 40}
    return DatasetDict(
        {
            split: Dataset.from_dict(
                {"sentence": ["fine", "dull"] * (num // 2), "label": [1, 0] * (num // 2)}
            )
            for split, num in sizes.items()
        }
    )


_select = Dataset.select


def select_of_few(data: Dataset, indices: Iterable[int]) -> Dataset:
    """Select of those that are here: pages ask for some of many samples."""
    return _select(data, [index for index in indices if index < len(data)])


@contextmanager
def tiny_hub(num_samples: int = 200) -> Iterator[None]:
    """Answer from here what would be asked of the hub."""
    classifiers = "transformers.AutoModelForSequenceClassification.from_pretrained"
    glue = partial(tiny_glue, num_samples=num_samples)
    with ExitStack() as patches:
        patches.enter_context(patch("datasets.load_dataset", glue))
        patches.enter_context(patch("datasets.Dataset.select", select_of_few))
        patches.enter_context(patch("transformers.AutoTokenizer.from_pretrained", tiny_tokenizer))
        patches.enter_context(patch(classifiers, tiny_bert))
        yield


if __name__ == "__main__":
    with tiny_hub():
        runpy.run_path(sys.argv[1], run_name="__main__")
