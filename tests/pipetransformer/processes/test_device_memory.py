"""Prove how much of a device's memory a process may count on."""

from __future__ import annotations

import pytest
import torch

from pipetransformer.processes.meeting import Seat
from pipetransformer.processes.world import World, _sit_down, free_bytes, plannable_bytes


@pytest.mark.parametrize(("slots", "free"), [(1, 1010), (2, 510), (3, 343)])
def test_slots_that_share_a_gpu_have_equal_parts_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, slots: int, free: int
) -> None:
    assert free_bytes(world_with_memory(monkeypatch, slots, (1000, 4000))) == free


@pytest.mark.parametrize(
    ("slots", "num_gpus", "local_rank", "sharing"),
    [(2, 1, 0, 2), (3, 2, 0, 2), (3, 2, 1, 1), (3, 2, 2, 2), (4, 4, 3, 1)],
)
def test_slots_that_take_gpus_in_turn_know_how_many_share_theirs(
    monkeypatch: pytest.MonkeyPatch, slots: int, num_gpus: int, local_rank: int, sharing: int
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    world = World(0, slots, slots, torch.device("cpu"), None, owned=False)
    _sit_down(world, Seat(local_rank, slots, "node0", "cuda-shared"), num_gpus=num_gpus)
    assert world.slots_per_gpu == sharing


def world_with_memory(
    monkeypatch: pytest.MonkeyPatch, slots: int, free_and_all: tuple[int, int]
) -> World:
    """Pretend that so many slots share a GPU, with so much memory; return one's world."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: free_and_all)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    gpu = torch.device("cuda", 0)
    return World(0, slots, slots, gpu, None, owned=False, slots_per_gpu=slots)


@pytest.mark.parametrize(
    ("slots", "free_gib", "plannable_gib"),
    [(1, 79, 74.5), (2, 79, 37.0), (1, 5, 0.5), (1, 4, 0), (1, 0, 0)],
)
def test_a_plan_does_not_count_on_what_no_model_of_a_step_counts(
    monkeypatch: pytest.MonkeyPatch, slots: int, free_gib: int, plannable_gib: float
) -> None:
    # Of 80 GiB: half a GiB for each process, and a twentieth for those that share the GPU.
    world = world_with_memory(monkeypatch, slots, (free_gib << 30, 80 << 30))
    found = plannable_bytes(world)
    assert found == pytest.approx(plannable_gib * (1 << 30), abs=100)


def test_a_plan_for_cpus_has_no_such_limit() -> None:
    world = World(0, 1, 1, torch.device("cpu"), None, owned=False)
    assert free_bytes(world) is plannable_bytes(world) is None
