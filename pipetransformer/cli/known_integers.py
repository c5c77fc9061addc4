"""Follow whole numbers through a forward on the meta device, where tensors have no values.

    tokens, masks, positions    whole numbers and truths: computed beside, on the CPU
    weights, hidden states      shapes alone

So a forward may look whether a mask is all true, or how long a text is. It then goes the way that
it goes in a run. What it would look up of a hidden state stays unknown, and is an error as ever.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

_aten = torch.ops.aten
_META, _CPU = torch.device("meta"), torch.device("cpu")
_FILLED = {
    _aten.new_zeros, _aten.new_ones, _aten.new_full,
    _aten.zeros_like, _aten.ones_like, _aten.full_like,
}  # fmt: skip
"""They take only a shape from their tensor."""
_ALLOCATED = {_aten.empty, _aten.empty_strided}
_MOST_NUMBERS = 1 << 24
"""Of fractions that are kept. Whole numbers are few enough: a mask of a text's pairs of tokens."""


@final
class KnownIntegers(TorchDispatchMode):
    """Know the values of meta tensors that are computed from whole numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakTensorKeyDictionary()

    def tell(self, tensor: Tensor, value: Tensor) -> None:
        """State a meta tensor's value, a tensor on the CPU."""
        self._values[tensor] = value

    def value_of(self, tensor: Tensor) -> Tensor | None:
        value: Tensor | None = self._values.get(tensor) if tensor.is_meta else tensor
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        packet = func.overloadpacket
        unknown = packet not in _FILLED and any(self.value_of(t) is None for t in given)
        if unknown and packet is _aten.equal:
            # Two tensors without values differ in nothing but their shapes.
            return given[0].shape == given[1].shape
        if unknown and packet is _aten._to_copy:
            kwargs = {**kwargs, "device": _META}  # There is nothing to copy elsewhere.
        try:
            shaped = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            if unknown or not _are_on_meta(given, kwargs):
                raise
            shaped = None  # The operation looks at values; it fails below if it is wrong.
        if unknown:
            if func._schema.is_mutable:
                self._values.pop(given[0], None)
            return shaped
        outputs = _tensors(shaped)
        if not _are_on_meta(given, kwargs) or (outputs and not any(map(_is_kept, outputs))):
            return shaped
        if packet in _ALLOCATED or torch.Tag.nondeterministic_seeded in func.tags:
            return shaped
        return self._computed(func, args, kwargs, shaped)

    def _computed(self, func: Any, args: Any, kwargs: Any, shaped: Any) -> Any:
        """Compute an operation on the CPU; return what it gives on the meta device."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                known = self.value_of(leaf)
                return (
                    torch.zeros((), dtype=leaf.dtype).expand(leaf.shape)
                    if known is None
                    else known
                )
            return _CPU if leaf == _META else leaf

        # Out of sight of those who count what runs on the meta device.
        with _disable_current_modes():
            args, kwargs = tree_map(real, (args, kwargs))
            try:
                values = func(*args, **kwargs)
            except IndexError as error:  # A token, or its position, is beyond a table's end.
                raise RuntimeError(str(error)) from error
            if not _tensors(shaped):
                shaped = tree_map(
                    lambda leaf: leaf.to(_META) if isinstance(leaf, Tensor) else leaf, values
                )
        for tensor, value in zip(_tensors(shaped), _tensors(values), strict=True):
            if _is_kept(tensor):
                self.tell(tensor, value)
        return shaped


def _is_kept(output: Tensor) -> bool:
    return output.is_meta and (not output.is_floating_point() or output.numel() <= _MOST_NUMBERS)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _are_on_meta(given: list[Tensor], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return any(t.is_meta for t in given) or (device is not None and torch.device(device) == _META)
