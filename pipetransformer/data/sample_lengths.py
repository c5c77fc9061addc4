"""Find out how long samples are, where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipetransformer.data.samples import SizedDataset

LENGTH = "length"
"""An entry of a mapping that holds the sample's length, as transformers' tokenizers give it."""


def read_lengths(dataset: SizedDataset, name: str) -> Tensor:
    """Return every sample's length, (N,) int64: its "length", or that of an entry.

    All samples are read once.

    Args:
        dataset: items are mappings, or tuples that begin with the entry.
        name: the entry: a sequence of numbers, (S,) or (S, ...).
    Raises:
        ValueError: a sample has neither.
    """
    return torch.tensor([_length(dataset[index], name, index) for index in range(len(dataset))])


def _length(item: Any, name: str, index: int) -> int:
    if isinstance(item, Mapping):
        if LENGTH in item:
            return int(item[LENGTH])
        item = item.get(name)
    elif isinstance(item, (tuple, list)) and item:
        item = item[0]
    try:
        return len(item)
    except TypeError:
        raise ValueError(
            f"sample {index} has no length: neither an entry {LENGTH!r} nor a sequence "
            f"{name!r}; leave group_by_length out, or give one of them"
        ) from None
