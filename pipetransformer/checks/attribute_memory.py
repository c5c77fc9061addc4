"""Notice what modules and functions keep in attributes from call to call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipetransformer.model import attributes_of, held

Place: TypeAlias = tuple[nn.Module | None, str]
"""The module that holds something, however deep, and the attribute's name."""
Copies: TypeAlias = dict[Place, tuple[tuple[float, ...], list[Tensor]]]


@dataclass(frozen=True)
class AttributeMemory:
    """Hold the numbers, and the tensors with their versions, that a module and its parts keep."""

    numbers: dict[Place, tuple[float, ...]]
    tensors: list[tuple[Place, Tensor, int]]

    @staticmethod
    def of(holder: Any, *, with_buffers: bool = False) -> AttributeMemory:
        """Return what a module and its parts keep in attributes, or what a function holds."""
        values: list[tuple[Place, Any]] = [((None, ""), holder)]
        if isinstance(holder, nn.Module):
            values = [
                ((part, name), value)
                for part in holder.modules()
                for name, value in {
                    **attributes_of(part),
                    **(part._buffers if with_buffers else {}),
                }.items()
            ]
        numbers: dict[Place, tuple[float, ...]] = {}
        tensors: list[tuple[Place, Tensor, int]] = []
        for place, value in values:
            several = [*held(value)]
            # A NaN equals nothing, and is left out.
            if plain_numbers := tuple(
                x for x in several if isinstance(x, (int, float)) and x == x
            ):
                numbers[place] = plain_numbers
            # Reading the version of an inference tensor is an error.
            tensors += [
                (place, one, -1 if one.is_inference() else one._version)
                for one in several
                if isinstance(one, Tensor)
            ]
        return AttributeMemory(numbers, tensors)

    def is_as(self, other: AttributeMemory) -> bool:
        """Return whether both hold the same, with nothing written into tensors in between."""
        # By identity: `==` would compare the tensors' elements.
        mine, its = ([(id(t), version) for _, t, version in one.tensors] for one in (self, other))
        return mine == its and self.numbers == other.numbers

    def copy(self) -> Copies:
        """Copy numbers and tensors as they are now; tensors without plain memory are left out.

        Parameters are, too: whoever keeps one in an attribute does not own it.
        """
        copies: Copies = {place: (numbers, []) for place, numbers in self.numbers.items()}
        for place, tensor, _ in self.tensors:
            if _is_plain(tensor) and not isinstance(tensor, nn.Parameter):
                copies.setdefault(place, ((), []))[1].append(tensor.detach().clone())
        return copies

    def put_numbers_back(self) -> None:
        """Give plain attributes of modules the numbers that they had."""
        for (module, name), (number, *_) in self.numbers.items():
            if module is not None and isinstance(vars(module).get(name), (int, float)):
                setattr(module, name, number)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own for each element."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return False
    # A number that stands for many cannot be written, and a copy would spell it out.
    return tensor.numel() < 2 or any(tensor.stride())


def find_change(now: Copies, before: Copies) -> tuple[Place, str] | None:
    """Return where a number or one of as many tensors has another value, and which it is."""
    for place in now.keys() | before.keys():
        (numbers, tensors), (had, old) = now.get(place, ((), [])), before.get(place, ((), []))
        if numbers != had:
            return place, "number"
        # A list that grows, as a history does, counts no calls.
        if len(tensors) == len(old) and any(map(_is_other, tensors, old)):
            return place, "tensor"
    return None


def _is_other(now: Tensor, old: Tensor) -> bool:
    """Return whether a tensor of the same shape has other values, but for rounding."""
    if now.shape != old.shape or now.dtype != old.dtype or old.numel() == 0:
        return False
    if not old.is_floating_point():
        return not torch.equal(now, old)
    allowed = 64 * torch.finfo(old.dtype).eps * float(old.nan_to_num().abs().max())
    return float((now - old).nan_to_num().abs().max()) > allowed
