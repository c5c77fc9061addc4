"""Tell whether a forward is given a batch whose rows are at hand, as it was yielded.

the loop                                     the forward
takes a batch, and gives it                  may use its rows
changes it, or gives another, or a part      runs from its start
does so with an image that was not read      is refused: there is nothing to run on

An image that was not read is NaN, but for its first number. That, and the bits that a NaN leaves
free, tell samples and batches apart, also where a part of one image is put into another. So
whatever a loop computes of it is seen to be wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from pipetransformer.model import forward_parameters, unwrapped

_HARMLESS = ("return_dict", "num_items_in_batch", "logits_to_keep", "fused_lm_head")
"""Arguments that change nothing below the last block; the last one is TRL's."""

_TELLS_APART = 256
"""Whole numbers up to this one are exact in all dtypes of images."""

_NANS = {
    torch.float64: (torch.int64, 0x7FF8 << 48, 1 << 51),
    torch.float32: (torch.int32, 0x7FC0 << 16, 1 << 22),
    torch.float16: (torch.int16, 0x7E00, 1 << 9),
    torch.bfloat16: (torch.int16, 0x7FC0, 1 << 6),
}
"""By dtype: whole numbers as wide, a NaN as one of them, and how many NaNs begin like it."""

_MOST_APART = 1 << 12
"""Samples of a batch that have codes of their own, beside those of the batch before."""


def marks() -> Iterator[int]:
    """Yield the numbers by which batches that were not read are told apart."""
    return itertools.count(1)


def unread(example: Tensor, num: int, mark: int) -> Tensor:
    """Return what stands for entries of samples that were not read, (num, ...).

    Each is NaN, with its own number in the bits that a NaN leaves free.
    """
    kind, nan, num_codes = _NANS[example.dtype]
    codes = (mark * _MOST_APART + torch.arange(num)) % num_codes
    numbers = (codes + nan).to(kind).view(example.dtype)
    entry = numbers.view(num, *(1 for _ in example.shape[1:])).repeat(1, *example.shape[1:])
    # A loop that casts loses the codes, but not these.
    entry.view(num, -1)[:, 0] = (mark * 37 + torch.arange(num)) % _TELLS_APART + 1
    return entry


@final
@dataclass(frozen=True, eq=False)
class GivenBatch:
    """Hold a batch's inputs as they were yielded, and its rows.

    Args:
        ids: (B,) int64, the samples; `epoch` is that in which they were asked for.
        depth: number of blocks that the rows have passed; 0 without rows.
        inputs: by the names of the model's arguments; not those that the loop has, which it may
            change in place.
        not_read: names of those that are not read.
        rows: what the last frozen block returns, (B, ...); None at depth 0.
        read: by the names of `not_read`, once they are read after all: at depth 0.
    """

    ids: Tensor
    epoch: int
    depth: int
    inputs: Mapping[str, Tensor]
    not_read: frozenset[str]
    rows: Tensor | None
    read: Mapping[str, Tensor] = field(default_factory=dict)

    def is_in(self, given: Mapping[str, Any]) -> bool:
        """Tell whether a forward's arguments are these inputs, and no others."""
        return given.keys() == self.inputs.keys() and all(
            self._is_same(name, value) for name, value in given.items()
        )

    def _is_same(self, name: str, value: Any) -> bool:
        own = self.inputs[name]
        if not isinstance(value, Tensor) or value.shape != own.shape:
            return False
        if name in self.not_read and value.dtype == own.dtype:
            # Bit by bit, as no NaN equals another: a part of another image may be within this one.
            kind = _NANS[own.dtype][0]
            return torch.equal(value.view(kind), own.to(value.device).view(kind))
        if name in self.not_read:
            flat, marked = value.reshape(len(value), -1), own.reshape(len(own), -1)[:, 0]
            is_marked = torch.equal(flat[:, 0].cpu(), marked.to(value.dtype))
            return is_marked and bool(flat[:, 1:].isnan().all())
        if value.is_floating_point() != own.is_floating_point():
            return False
        return torch.equal(value, own.to(value.device, value.dtype))

    def filled_in(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a forward's arguments with what is read by now in its place."""
        places, own = list(args), dict(kwargs)
        for name, value in self.read.items():
            if name in own:
                own[name] = value.to(own[name].device, own[name].dtype)
            else:
                place = forward_parameters(model).index(name)
                places[place] = value.to(places[place].device, places[place].dtype)
        return tuple(places), own


def inputs_of(
    model: Any, targets: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return by name what a forward is given that may change hidden states."""
    named = {**dict(zip(forward_parameters(model), args, strict=False)), **kwargs}
    config = getattr(unwrapped(model), "config", None)
    # Rows are what the last frozen block returns: others' outputs are not at hand.
    asked = {
        name: True
        for name in ("output_hidden_states", "output_attentions")
        if getattr(config, name, None) is True and named.get(name) is None
    }
    return {
        name: value
        for name, value in {**named, **asked}.items()
        if value is not None and value is not False and name not in (*targets, *_HARMLESS)
    }


def refuse_unread(given: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise a ValueError for what was not read, or was computed of that, but is to be run on."""
    for name in names:
        value = given.get(name)
        if isinstance(value, Tensor) and value.is_floating_point() and value.isnan().any():
            raise ValueError(
                f"the forward was given {name!r} of shape {tuple(value.shape)} with NaN: those of "
                "a cached batch are not read. Give the model itself each batch whole and as it "
                "is, with nothing beside it, before you take the next; change images in the data "
                "set"
            )
