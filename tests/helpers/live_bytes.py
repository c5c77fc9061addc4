"""Count the memory of living tensors, to prove what a peak is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@final
class LiveBytes(TorchDispatchMode):
    """Count the memory of all tensors that live, at every operation, from some known ones on."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        for tensor in tensors:
            self._note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._note(value)
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Return the bytes that live."""
        alive = {k: v for k, v in self._storages.items() if not v[0].expired()}
        self._storages = alive
        return sum(size for _, size in alive.values())

    def _note(self, tensor: Tensor) -> None:
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self._storages[reference.cdata] = (reference, storage.nbytes())
