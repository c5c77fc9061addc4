"""Bring a step's entries from host memory to the device, while it still computes the step before.

copies      | entries of t + 1 |                     | entries of t + 2 | ...
computing   | step t .................. | step t + 1 .................. | ...
"""

from __future__ import annotations

from typing import final

import torch

from pipetransformer.data import Batch


@final
class Uploads:
    """Copy entries to a device, on a stream of their own where it is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def bring(self, batch: Batch, *, wait: bool = False) -> Batch:
        """Return a batch's entries on the device; those that are there are left alone.

        Nothing waits for what the device computes: from unpinned memory a copy would.

        Args:
            wait: for the copies, as the memory they are made from is soon written to again.
        """
        if self._stream is None or self._copied is None:
            return batch
        # By now these copies are done. That is to be sure: a reader of rows uses the memory that
        # it gave two batches ago again.
        self._copied.synchronize()
        away = {name: t for name, t in batch.items() if t.device != self._device}
        with torch.cuda.stream(self._stream):
            # torch's pinned memory is used again only once what was copied from it is done.
            pinned = {name: t if t.is_pinned() else t.pin_memory() for name, t in away.items()}
            brought = {n: t.to(self._device, non_blocking=True) for n, t in pinned.items()}
            self._copied.record()
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in brought.values():  # Whose memory is the copying stream's.
            tensor.record_stream(current)
        if wait:
            self._stream.synchronize()
        return {**batch, **brought}
