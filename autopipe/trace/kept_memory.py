"""Count the bytes of activations that a stage keeps, while they are kept."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class _View(NamedTuple):
    """Name a part of a storage, by addresses; views of the same part are the same memory."""

    storage: int
    start: int
    num_bytes: int


@dataclass
class _Storage:
    """Count the holders of a storage's parts, which may overlap."""

    total_bytes: int
    holders: Counter[_View] = field(default_factory=Counter)

    def num_bytes(self) -> int:
        return min(self.total_bytes, sum(view.num_bytes for view in self.holders))


class KeptMemory:
    """Count the activations of one stage that graphs saved or that wait as inputs.

    Each memory counts once, however many graphs and views hold it. Parameters and their views
    do not count: they are there anyway. Not seen are tensors that a layer keeps in its own
    saved-tensor hooks, or in an autograd.Function without `save_for_backward`.

    Attributes:
        peak_bytes: the most kept since it was last set.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._num_bytes = 0
        self._storages: dict[int, _Storage] = {}
        self._inputs: list[_View] = []
        # A graph may be freed by any thread, and amid a count: what it lets go of waits here.
        self._released: deque[_View] = deque()

    @property
    def num_bytes(self) -> int:
        while self._released:
            self._let_go(self._released.popleft())
        return self._num_bytes

    def counting(self) -> AbstractContextManager[Any]:
        """Count what graphs built inside save, until they let go of it."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def set_inputs(self, tensors: Sequence[Tensor | None]) -> None:
        """Count these tensors, too, until the next call; they are not kept from being freed."""
        self._released.extend(self._inputs)
        self._inputs = [self._keep(tensor) for tensor in tensors if tensor is not None]

    def _pack(self, tensor: Tensor) -> _Saved:
        # Detached, because a graph must not hold its own output.
        saved = _Saved(tensor.detach(), tensor._version)
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, nn.Parameter):
            weakref.finalize(saved, self._released.append, self._keep(tensor))
        return saved

    def _keep(self, tensor: Tensor) -> _View:
        if tensor.layout is torch.strided:
            whole = tensor.untyped_storage()
            view = _View(whole.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            total_bytes = whole.nbytes()
        else:
            # Other layouts have several storages; the tensor stands for them.
            view, total_bytes = _View(id(tensor), 0, tensor.nbytes), tensor.nbytes
        kept_bytes = self.num_bytes
        storage = self._storages.setdefault(view.storage, _Storage(total_bytes))
        before = storage.num_bytes()
        storage.holders[view] += 1
        self._num_bytes = kept_bytes + storage.num_bytes() - before
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)
        return view

    def _let_go(self, view: _View) -> None:
        storage = self._storages[view.storage]
        before = storage.num_bytes()
        storage.holders[view] -= 1
        if not storage.holders[view]:
            del storage.holders[view]
        self._num_bytes += storage.num_bytes() - before
        if not storage.holders:
            del self._storages[view.storage]


@dataclass(eq=False)
class _Saved:
    """Hold a saved tensor in a graph; its end tells that the graph let go of it."""

    tensor: Tensor
    version: int


def _unpack(saved: _Saved) -> Tensor:
    # torch leaves this check to the hooks where there are any.
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a {tuple(saved.tensor.shape)} tensor is at version "
            f"{saved.tensor._version}; expected version {saved.version}"
        )
    return saved.tensor
