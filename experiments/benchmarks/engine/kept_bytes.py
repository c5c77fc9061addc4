"""Count the bytes of activations that are alive, by the lifetime of their memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autopipe.engine import is_checkpointing


class KeptBytes:
    """Watch the memory of what layers take and of what autograd keeps for their backwards.

    Each piece of memory counts once, however many tensors share it, from when a layer first takes
    or saves it until it is freed. What is only needed within one kernel is not seen.

    Args:
        ignored: tensors that do not count: parameters, the mini-batch.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        self._ignored = {_address(tensor) for tensor in ignored}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._lock = threading.Lock()
        self._entered = threading.local()
        self.peak = 0

    @contextmanager
    def watching(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """Count, within the block, what these layers take and save; any thread may run them."""
        handles = []
        for layer in layers:
            handles.append(layer.register_forward_pre_hook(self._before))
            handles.append(layer.register_forward_hook(self._after, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        for value in inputs:
            for tensor in value if isinstance(value, tuple) else (value,):
                self._see(tensor)
        # A checkpointed forward has hooks of its own, which keep nothing: leave them on top.
        hooks = None if is_checkpointing() else saved_tensors_hooks(self._see, _same)
        if hooks is not None:
            hooks.__enter__()
        self._entered.hooks = [*getattr(self._entered, "hooks", ()), hooks]

    def _after(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        hooks = self._entered.hooks.pop()
        if hooks is not None:
            hooks.__exit__()

    def _see(self, tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in self._ignored:
            with self._lock:
                if address not in self._alive or self._alive[address][0].expired():
                    storage = tensor.untyped_storage()
                    self._alive[address] = StorageWeakRef(storage), storage.nbytes()
                    self._note_peak()
        return tensor

    def _note_peak(self) -> None:
        self._alive = {
            address: entry for address, entry in self._alive.items() if not entry[0].expired()
        }
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._alive.values()))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _same(tensor: Tensor) -> Tensor:
    return tensor


def peak_kept_bytes(step: Any, layers: Iterable[nn.Module], ignored: Iterable[Tensor]) -> int:
    """Return the most bytes of activations that were alive at once in a step."""
    kept = KeptBytes(ignored)
    with torch.enable_grad(), kept.watching(layers):
        step()
    return kept.peak
