"""Prove how much of a device's memory a process may count on."""

from __future__ import annotations

import pytest
import torch

from pipetransformer.processes.world import free_bytes


@pytest.mark.parametrize(
    ("slots", "num_gpus", "index", "free"),
    [(1, 1, 0, 1010), (2, 1, 0, 510), (3, 2, 0, 510), (3, 2, 1, 1010), (4, 4, 3, 1010)],
)
def test_slots_that_share_a_gpu_have_equal_parts_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, slots: int, num_gpus: int, index: int, free: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(slots))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(slots))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 4000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert free_bytes(torch.device("cuda", index)) == free
