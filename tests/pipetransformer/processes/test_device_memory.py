"""Prove how much of a device's memory a process may count on."""

from __future__ import annotations

import pytest
import torch

from pipetransformer.processes.world import free_bytes, plannable_bytes


@pytest.mark.parametrize(
    ("slots", "num_gpus", "index", "free"),
    [(1, 1, 0, 1010), (2, 1, 0, 510), (3, 2, 0, 510), (3, 2, 1, 1010), (4, 4, 3, 1010)],
)
def test_slots_that_share_a_gpu_have_equal_parts_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, slots: int, num_gpus: int, index: int, free: int
) -> None:
    have_memory(monkeypatch, slots, num_gpus, (1000, 4000))
    assert free_bytes(torch.device("cuda", index)) == free


def have_memory(
    monkeypatch: pytest.MonkeyPatch, slots: int, num_gpus: int, free_and_all: tuple[int, int]
) -> None:
    """Pretend that a node has so many slots and GPUs, each with so much memory."""
    monkeypatch.setenv("WORLD_SIZE", str(slots))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(slots))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: free_and_all)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)


@pytest.mark.parametrize(
    ("slots", "free_gib", "plannable_gib"),
    [(1, 79, 74.5), (2, 79, 37.0), (1, 5, 0.5), (1, 4, 0), (1, 0, 0)],
)
def test_a_plan_does_not_count_on_what_no_model_of_a_step_counts(
    monkeypatch: pytest.MonkeyPatch, slots: int, free_gib: int, plannable_gib: float
) -> None:
    # Of 80 GiB: half a GiB for each process, and a twentieth for those that share the GPU.
    have_memory(monkeypatch, slots, 1, (free_gib << 30, 80 << 30))
    found = plannable_bytes(torch.device("cuda", 0))
    assert found == pytest.approx(plannable_gib * (1 << 30), abs=100)


def test_a_plan_for_cpus_has_no_such_limit() -> None:
    assert free_bytes(torch.device("cpu")) is plannable_bytes(torch.device("cpu")) is None
