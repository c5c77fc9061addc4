"""Send what is in host memory to a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor


def send_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor on the device of another."""
    return _sent(tensor, other.device)


def _sent(entry: Tensor, device: torch.device) -> Tensor:
    """Send a tensor on the current stream."""
    if device.type != "cuda" or entry.device.type == "cuda":
        return entry.to(device)
    # From pageable memory the copy would wait for all that the GPU has to do. torch reuses its
    # pinned memory only once the copies from it have ended.
    pinned = entry if entry.is_pinned() else entry.pin_memory()
    return pinned.to(device, non_blocking=True)


@final
class Uploader:
    """Send batches to a device; to a GPU on its own stream, beside what is computed.

    copies      | entries of t + 1 |                     | entries of t + 2 | ...
    computing   | step t .................. | step t + 1 .................. | ...
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._copied = torch.cuda.Event() if on_cuda else None

    def send(self, batch: Mapping[str, Tensor], *, wait: bool = False) -> dict[str, Tensor]:
        """Return a batch on the device, for the current stream.

        `wait` for the copies if the host memory is soon written to again.
        """
        if self._stream is None or self._copied is None:
            return {name: _sent(entry, self._device) for name, entry in batch.items()}
        # The copies of the batch before have long ended. Only to be sure: a reader of rows uses
        # the memory of two batches ago again.
        self._copied.synchronize()
        with torch.cuda.stream(self._stream):
            sent = {name: _sent(entry, self._device) for name, entry in batch.items()}
            self._copied.record()
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for name, entry in sent.items():
            # Memory of the copying stream; entries that were there already are not.
            if entry is not batch[name]:
                entry.record_stream(current)
        if wait:
            self._copied.synchronize()
        return sent
