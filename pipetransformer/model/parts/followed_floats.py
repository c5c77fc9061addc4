"""Follow floats through torch's operators, to see whether their values decide what is computed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipetransformer.model.parts.part_record import Lists


@final
class FollowedFloats(TorchDispatchMode):
    """Follow some floats, and all that is computed from them, within the block.

    Attributes:
        decide: whether integers or masks that were made of them were used, as by a sort, a
            comparison or a branch.
    """

    def __init__(self, floats: Iterable[Tensor]) -> None:
        super().__init__()
        # By memory, as a view is another tensor; a weak reference keeps its address from others.
        self._memory = dict[int, StorageWeakRef]()
        self.decide, self._stack = False, ExitStack()
        self._follow(floats)

    def __enter__(self) -> FollowedFloats:
        self._stack.enter_context(Lists(self._note_list))
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._stack.close()

    def has(self, one: Tensor) -> bool:
        """Return whether a tensor was computed from them."""
        return one.layout == torch.strided and _memory(one).cdata in self._memory

    def _follow(self, tensors: Iterable[Tensor]) -> None:
        for one in tensors:
            if one.layout == torch.strided:
                self._memory.setdefault((memory := _memory(one)).cdata, memory)
            else:
                self.decide = True  # It has no memory of its own.

    def _note_list(self, one: Tensor) -> None:
        self.decide |= self.has(one)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [one for one in _tensors((args, kwargs)) if self.has(one)]
        answer = func(*args, **(kwargs or {}))
        if given:
            made = _tensors(answer)
            # A number, as of `item`, may decide anything.
            self.decide |= not made or not all(one.is_floating_point() for one in given)
            self._follow(made)
        return answer


def _memory(one: Tensor) -> StorageWeakRef:
    return StorageWeakRef(one.untyped_storage())


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
