"""Prove that a process finds its place and its device, and says so where a GPU stays idle."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipetransformer.world import World, choose_device, connect, slots_of_a_node, world_size
from tests.pool import Pool


@pytest.fixture(autouse=True)
def nobody_launched_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what a launcher around the tests may have set."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PIPETRANSFORMER_STORE"):
        monkeypatch.delenv(name, raising=False)


def have_gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Pretend that this node has so many GPUs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: number > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: number)


def test_a_process_started_plainly_is_a_world_of_its_own() -> None:
    world = connect("cpu", timeout_s=10.0)
    assert world == World(0, 1, 1, torch.device("cpu"), None, owned=False)
    assert world.is_main and not dist.is_initialized()
    world.close()


def test_sizes_come_from_the_launcher_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (world_size(), slots_of_a_node()) == (1, 1)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (world_size(), slots_of_a_node()) == (8, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (world_size(), slots_of_a_node()) == (8, 4)


@pytest.mark.parametrize(("num_gpus", "device", "chosen"), [
    (0, "auto", "cpu"), (0, "cpu", "cpu"), (1, "auto", "cpu"), (2, "auto", "cuda:1"),
    (4, "auto", "cuda:1"), (4, "cpu", "cpu"), (2, "cuda", "cuda:1")])
def test_a_slot_takes_a_gpu_where_there_is_one_for_each(
        monkeypatch: pytest.MonkeyPatch, num_gpus: int, device: str, chosen: str) -> None:
    have_gpus(monkeypatch, num_gpus)
    assert choose_device(device, slots=2, local_rank=1) == torch.device(chosen)


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_asking_for_more_gpus_than_there_are_is_refused(
        monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    have_gpus(monkeypatch, num_gpus)
    with pytest.raises(ValueError, match=rf"each of the 2 slots of this node, .* {num_gpus};"):
        choose_device("cuda", slots=2, local_rank=0)


@pytest.mark.parametrize(("num_gpus", "device", "num_warnings"), [
    (1, "auto", 1), (0, "auto", 0), (2, "auto", 0), (1, "cpu", 0)])
def test_a_gpu_left_idle_is_warned_of_once_a_node(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_gpus: int,
        device: str, num_warnings: int) -> None:
    have_gpus(monkeypatch, num_gpus)
    with caplog.at_level(logging.WARNING):
        for local_rank in range(2):
            choose_device(device, slots=2, local_rank=local_rank)
    assert [record.message for record in caplog.records] == num_warnings * [
        "this node has 1 GPU(s) for 2 slots, so training runs on the CPU; start 1 process(es) to "
        "use the GPU(s)"]


def join_again() -> dict[str, Any]:
    """Join a world that the process is part of already, leave it, and see what is left."""
    world = connect("cpu", timeout_s=30.0)
    found = {"rank": world.rank, "size": world.size, "slots": world.slots_per_node,
             "main": world.is_main, "owned": world.owned}
    world.close()
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total, group=world.group)
    return {**found, "total": float(total)}


def test_a_group_that_somebody_else_initialised_is_used_and_not_destroyed(two_ranks: Pool) -> None:
    assert two_ranks.run(join_again) == [
        {"rank": rank, "size": 2, "slots": 2, "main": rank == 0, "owned": False, "total": 1.0}
        for rank in range(2)]
