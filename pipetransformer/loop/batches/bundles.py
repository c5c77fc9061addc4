"""Name what samples have any number of, such as patches and tiles, by the samples themselves.

    pixel_values    (patches of all samples, D)    ─►    (N, 2) int64: a sample's index, and a hash

Rows are made, and samples compared, by tensors of one entry a sample. So a bundle is that, until a
model runs: then the loader's function joins these samples once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pipetransformer.feed import spread

_NUM_COMPARED = 16
"""Samples that are collated alone, from all over the data set."""


@final
@dataclass(frozen=True)
class Bundles:
    """Give a model the bundles of samples.

    Args:
        names: by parameters, of entries of the loader's batches.
        alone: of samples that were read last, by index and name.
        read: returns these of samples, by names, as the loader joins them.
    """

    names: Mapping[str, str]
    alone: Mapping[int, Mapping[str, Tensor]]
    read: Callable[[list[int]], Mapping[str, Tensor]]

    def opened(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return entries with bundles, (N, 2), as a model takes them.

        Raises:
            ValueError: a sample is another one than was read before.
        """
        signs = {self.names[name]: entries[name] for name in self.names if name in entries}
        if not signs:
            return dict(entries)
        first = next(iter(signs.values()))
        ids = first[:, 0].tolist()
        values = self.alone.get(ids[0]) if len(ids) == 1 else None
        if values is None or not _are_signed(values, signs):
            values = self.read(ids)
            if len(ids) == 1 and not _are_signed(values, signs):
                raise ValueError(
                    f"sample {ids[0]} is another one when it is read again: the data set draws "
                    "random numbers that no seed of torch, numpy or random sets"
                )
        opened = {
            name: values[own].to(first.device)
            for name, own in self.names.items()
            if name in entries
        }
        return {**entries, **opened}


def _are_signed(values: Mapping[str, Tensor], signs: Mapping[str, Tensor]) -> bool:
    pairs = ((signed(int(sign[0, 0]), values[name]), sign[0]) for name, sign in signs.items())
    return all(torch.equal(one, sign.cpu()) for one, sign in pairs)


def signed(index: int, value: Tensor) -> Tensor:
    """Return (2,) int64: a sample's index, and a hash of its bundle."""
    hashed = hashlib.blake2b(repr((value.dtype, value.shape)).encode(), digest_size=8)
    hashed.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return torch.tensor([index, int.from_bytes(hashed.digest(), "little", signed=True)])


def bundles_of(
    base: DataLoader[Any], leaves_of: Callable[[Any], Mapping[str, Any]], names: Sequence[str]
) -> frozenset[str]:
    """Name the entries of a loader's batches that have other shapes for some samples alone.

    Texts are none of them: they are padded, and a mask says how long they are.
    """
    dataset: Any = base.dataset
    chosen = spread(len(dataset), _NUM_COMPARED)
    try:
        alone = [leaves_of(base.collate_fn([dataset[index]])) for index in chosen]
    except Exception:  # Any: a function may take even numbers of samples alone.
        return frozenset()
    found = set[str]()
    for name in names:
        several = [one[name] for one in alone if isinstance(one.get(name), Tensor)]
        if len(several) < len(alone) or not all(one.ndim for one in several):
            continue
        first = several[0]
        is_image = first.is_floating_point() and first.ndim > 2
        shapes = {one.shape if is_image else one.shape[:1] for one in several}
        if len(shapes) > 1:
            found.add(name)
    return frozenset(found)
