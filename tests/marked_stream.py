"""Stand for a GPU's current stream, and note on which device its events are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class MarkedStream:
    """Take the place of torch.cuda's devices and events.

    Attributes:
        current: the current device's index.
        calls: what events were asked, and on which device.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, device: int) -> None:
        self.current, self.calls = device, list[str]()
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "current_stream", lambda: self)
        patch.setattr(torch.cuda, "device", self._on)

    def record_event(self) -> MarkedStream:
        return self

    def query(self) -> bool:
        self.calls.append(f"query on {self.current}")
        return True

    def synchronize(self) -> None:
        self.calls.append(f"synchronize on {self.current}")

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before
