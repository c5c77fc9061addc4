"""Prove that a process finds its place and its device, and that a world which cannot train is
refused on every rank with one message."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from autodp import gather_json
from pipetransformer import FreezeSchedule, launch
from pipetransformer.processes import world as world_module
from pipetransformer.processes.meeting import Seat
from pipetransformer.processes.world import (
    World,
    _sit_down,
    choose_device,
    connect,
    likely_device,
    slots_of_a_node,
    world_size,
)
from tests.helpers.foreign_group import without_cpus
from tests.helpers.models import tiny_trainer
from tests.helpers.pool import Pool

CPU = torch.device("cpu")

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def nobody_launched_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what a launcher around the tests may have set."""
    for name in (*TORCHRUN, "PIPETRANSFORMER_STORE"):
        monkeypatch.delenv(name, raising=False)


def have_gpus(monkeypatch: pytest.MonkeyPatch, number: int, uuid: str = "GPU-0") -> None:
    """Pretend that this process sees so many GPUs, the first of them with this name."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: number > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: number)
    only = SimpleNamespace(uuid=uuid)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: only)


def test_a_process_started_plainly_is_a_world_of_its_own() -> None:
    world = connect("cpu", timeout_s=10.0)
    assert world == World(0, 1, 1, torch.device("cpu"), None, owned=False)
    assert world.is_main and not dist.is_initialized()
    world.close()


def test_sizes_come_from_the_launcher_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (world_size(), slots_of_a_node()) == (1, 1)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (world_size(), slots_of_a_node()) == (8, 4)


@pytest.mark.parametrize(
    "name", ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
def test_a_missing_variable_of_a_launcher_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable, value in TORCHRUN.items():
        if variable != name:
            monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=rf"variable {name} is not set; .* Start with torchrun"):
        connect("cpu", timeout_s=1.0)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("RANK", "8", "0 to 7"),
        ("RANK", "-1", "0 to 7"),
        ("RANK", "one", "0 to 7"),
        ("LOCAL_RANK", "4", "0 to 3"),
        ("LOCAL_WORLD_SIZE", "9", "1 to 8"),
        ("LOCAL_WORLD_SIZE", "0", "1 to 8"),
        ("WORLD_SIZE", "0", "1 to"),
        ("WORLD_SIZE", "", "1 to"),
        ("MASTER_PORT", "65536", "1 to 65535"),
    ],
)
def test_a_variable_out_of_range_is_refused_with_the_range(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    for variable, usual in TORCHRUN.items():
        monkeypatch.setenv(variable, value if variable == name else usual)
    with pytest.raises(ValueError, match=rf"{name} is '{value}'; .* whole number, {allowed}"):
        connect("cpu", timeout_s=1.0)


def test_a_rank_of_no_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")  # Four such processes would each train alone, in one folder.
    with pytest.raises(ValueError, match="RANK is '1'; it must be a whole number, 0 to 0"):
        connect("cpu", timeout_s=1.0)


def join_unevenly() -> str:
    """Join with rank 1 on a node of its own; return what is raised."""
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if os.environ["RANK"] == "1" else {}
    with (
        patch.dict(os.environ, alone),
        pytest.raises(ValueError, match="not spread evenly over nodes") as refused,
    ):
        connect("cpu", timeout_s=30.0)
    return str(refused.value)


def test_an_uneven_world_is_refused_on_every_rank_with_one_message(two_ranks: Pool) -> None:
    assert len(set(two_ranks.run(join_unevenly))) == 1


def lack_a_device() -> str:
    """Ask for a GPU on rank 1 alone, where there is none."""
    with (
        patch("torch.cuda.is_available", return_value=False),
        pytest.raises(ValueError, match="cuda") as refused,
    ):
        connect("cuda" if os.environ["RANK"] == "1" else "cpu", timeout_s=30.0)
    return str(refused.value)


def test_a_rank_without_its_device_is_named_on_every_rank(two_ranks: Pool) -> None:
    messages = two_ranks.run(lack_a_device)
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1 on ") and "needs a GPU for each" in messages[0]


@pytest.mark.parametrize(
    ("num_gpus", "device", "chosen"),
    [
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
        (1, "auto", "cpu"),
        (2, "auto", "cuda:1"),
        (4, "auto", "cuda:1"),
        (4, "cpu", "cpu"),
        (2, "cuda", "cuda:1"),
    ],
)
def test_a_slot_takes_a_gpu_where_there_is_one_for_each(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, device: str, chosen: str
) -> None:
    have_gpus(monkeypatch, num_gpus)
    assert choose_device(device, slots=2, local_rank=1) == torch.device(chosen)


@pytest.mark.parametrize(("num_gpus", "indices"), [(1, [0, 0, 0]), (2, [0, 1, 0]), (3, [0, 1, 2])])
def test_slots_that_may_share_take_the_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, indices: list[int]
) -> None:
    have_gpus(monkeypatch, num_gpus)
    chosen = [choose_device("cuda-shared", slots=3, local_rank=slot) for slot in range(3)]
    assert chosen == [torch.device("cuda", index) for index in indices]


def test_sharing_gpus_where_there_are_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 0)
    with pytest.raises(ValueError, match="'cuda-shared' needs a GPU on every node"):
        choose_device("cuda-shared", slots=2, local_rank=0)


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cuda-shared", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("cpu", "gloo")],
)
def test_ranks_that_share_gpus_talk_over_gloo_and_others_over_nccl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, backend: str
) -> None:
    places, backends = [], []
    for variable, value in {**TORCHRUN, "PIPETRANSFORMER_STORE": str(tmp_path / "store")}.items():
        monkeypatch.setenv(variable, value)

    def agree(store: Any, rank: int, size: int, place: Any, *, timeout_s: float) -> Any:
        places.append(place.device)
        return "world", [place] * size

    have_gpus(monkeypatch, 4)
    monkeypatch.setattr(world_module, "meet", agree)
    monkeypatch.setattr(world_module, "assign_gpus", lambda places: places)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: backends.append(name))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    connect(device, timeout_s=1.0)
    assert backends == [backend]
    assert places == [device], "a rank that shares cannot train with one that does not"


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_asking_for_more_gpus_than_there_are_is_refused(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    have_gpus(monkeypatch, num_gpus)
    with pytest.raises(ValueError, match=rf"each of the 2 slots of this node, .* {num_gpus};"):
        choose_device("cuda", slots=2, local_rank=0)


@pytest.mark.parametrize(
    ("num_gpus", "device", "num_warnings"),
    [(1, "auto", 1), (0, "auto", 0), (2, "auto", 0), (1, "cpu", 0)],
)
def test_a_gpu_left_idle_is_warned_of_once_a_node(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_gpus: int,
    device: str,
    num_warnings: int,
) -> None:
    have_gpus(monkeypatch, num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with caplog.at_level(logging.WARNING):
        for local_rank in range(2):
            world, seat = World(0, 2, 2, CPU, None, owned=False), Seat(local_rank, 2, "node0")
            kind = choose_device(device, slots=2, local_rank=local_rank).type
            asked = 0 if device == "cpu" else num_gpus
            _sit_down(world, dataclasses.replace(seat, device=kind), num_gpus=asked)
    assert [record.message for record in caplog.records] == num_warnings * [
        "this node has 1 GPU(s) for 2 slots, so training runs on the CPU; start 1 process(es) to "
        "use the GPU(s)"
    ]


def join_seeing_one_gpu(device: str, gpus: tuple[str, str], starts: bool) -> list[Any]:
    """Join where each process sees one GPU; return the device, the backend and the GPU's share."""
    rank = int(os.environ["RANK"])
    asked: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patching:
        have_gpus(patching, 1, gpus[rank])
        patching.setattr(torch.cuda, "set_device", lambda device: asked.update(set=device))
        if starts:  # As a process does that is in no world yet; the pool's is asked for seats.
            seats_of = partial(gather_json, group=dist.group.WORLD)

            def meet(store: Any, rank: int, size: int, seat: Seat, *, timeout_s: float) -> Any:
                return "world", [Seat(**one) for one in seats_of(dataclasses.asdict(seat))]

            patching.setattr(world_module, "meet", meet)
            patching.setattr(dist, "is_initialized", lambda: False)
            patching.setattr(dist, "init_process_group", lambda name, **_: asked.update(by=name))
            patching.setattr(world_module, "_JOINED", itertools.count(1000))
        try:
            world = connect(device, timeout_s=30.0)
        except ValueError as error:
            return [str(error)]
        return [str(world.device), asked, world.slots_per_gpu]


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("starts", [True, False])
def test_processes_that_see_one_gpu_each_train_on_these(
    two_ranks: Pool, device: str, starts: bool
) -> None:
    # srun and Ray show each process a GPU of its own as the first. "auto" trained on CPUs, and
    # "cuda" said that the node has one GPU.
    found = two_ranks.run(join_seeing_one_gpu, device, ("GPU-a", "GPU-b"), starts)
    asked = {"set": torch.device("cuda", 0)} | ({"by": "cpu:gloo,cuda:nccl"} if starts else {})
    assert found == [["cuda:0", asked, 1]] * 2


def test_processes_that_see_the_same_gpu_train_on_cpus_or_are_told_why_not(
    two_ranks: Pool,
) -> None:
    same = ("GPU-a", "GPU-a")
    assert two_ranks.run(join_seeing_one_gpu, "auto", same, False) == [["cpu", {}, 1]] * 2
    refusals = two_ranks.run(join_seeing_one_gpu, "cuda", same, False)
    assert refusals[0] == refusals[1]
    assert "this process sees 1; start fewer processes, let each see all" in refusals[0][0]


def test_processes_that_may_share_a_gpu_count_on_a_part_of_it(two_ranks: Pool) -> None:
    found = two_ranks.run(join_seeing_one_gpu, "cuda-shared", ("GPU-a", "GPU-a"), False)
    assert found == [["cuda:0", {"set": torch.device("cuda", 0)}, 2]] * 2


def join_again() -> dict[str, Any]:
    """Join a world that the process is part of already, leave it, and see what is left."""
    world = connect("cpu", timeout_s=30.0)
    found = {
        "rank": world.rank,
        "size": world.size,
        "slots": world.slots_per_node,
        "main": world.is_main,
        "owned": world.owned,
    }
    world.close()
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total, group=world.group)
    return {**found, "total": float(total)}


def made_groups(monkeypatch: pytest.MonkeyPatch, config: str) -> list[dict[str, Any]]:
    """Pretend that a script made a default group of a backend; return what is asked for then."""
    asked: list[dict[str, Any]] = []
    answers = {"is_initialized": True, "get_world_size": 8, "get_rank": 5}
    for name, answer in {**answers, "get_backend_config": config}.items():
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    for variable, value in TORCHRUN.items():
        monkeypatch.setenv(variable, value)

    def new_group(**settings: Any) -> dist.ProcessGroup:
        asked.append(settings)
        return dist.ProcessGroup(0, 1)

    have_gpus(monkeypatch, 4)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(world_module, "gather_json", lambda value, group: [value] * 8)
    monkeypatch.setattr(world_module, "assign_gpus", lambda seats: seats)
    return asked


@pytest.mark.parametrize(
    ("device", "backend"), [("cuda", "cpu:gloo,cuda:nccl"), ("cuda-shared", "gloo")]
)
def test_beside_a_group_of_others_that_lacks_a_backend_for_cpus_an_own_one_is_made(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    asked = made_groups(monkeypatch, "cuda:nccl")
    assert connect(device, timeout_s=7.0).owned
    assert asked == [{"backend": backend, "timeout": timedelta(seconds=7.0)}]


@pytest.mark.parametrize("config", ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
def test_a_group_of_others_that_has_a_backend_for_cpus_needs_no_other(
    monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    asked = made_groups(monkeypatch, config)
    assert not connect("cuda", timeout_s=7.0).owned and asked == []


def refused_beside_anothers_group() -> list[int]:
    """Ask for a GPU that is not there beside a group of others; return how many are left."""
    before = len(dist.distributed_c10d._world.pg_map)
    with without_cpus(), pytest.raises(ValueError, match="rank 0 on .* needs a GPU for each"):
        connect("cuda", timeout_s=30.0)
    return [before, len(dist.distributed_c10d._world.pg_map)]


def test_a_world_that_is_refused_leaves_no_group_of_its_own(two_ranks: Pool) -> None:
    assert two_ranks.run(refused_beside_anothers_group) == [[1, 1]] * 2


def find_link_devices() -> list[str]:
    """Return where messages of a CPU and of a GPU live in this world."""
    own = connect("cpu", timeout_s=30.0)
    on_gpu = dataclasses.replace(own, device=torch.device("cuda", 0))
    return [str(world.link_device) for world in (own, on_gpu)]


def test_over_gloo_messages_live_in_host_memory(two_ranks: Pool) -> None:
    assert two_ranks.run(find_link_devices) == [["cpu", "cpu"]] * 2


def test_a_group_that_somebody_else_initialised_is_used_and_not_destroyed(two_ranks: Pool) -> None:
    assert two_ranks.run(join_again) == [
        {"rank": rank, "size": 2, "slots": 2, "main": rank == 0, "owned": False, "total": 1.0}
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("device", "num_gpus", "chosen"),
    [
        ("auto", 2, "cuda:1"), ("auto", 1, "cpu"), ("auto", 0, "cpu"), ("cpu", 2, "cpu"),
        ("cuda", 2, "cuda:1"), ("cuda", 1, "cuda:0"), ("cuda-shared", 1, "cuda:0"),
    ],
)  # fmt: skip
def test_before_a_world_is_joined_each_process_looks_at_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, num_gpus: int, chosen: str
) -> None:
    for name, value in {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    have_gpus(monkeypatch, num_gpus)
    assert likely_device(device) == torch.device(chosen)


def thread_names() -> list[str]:
    """Name the threads of this process, native ones included."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def threads_after_a_run(folder: str) -> None:
    """Train, close, and note the names of this process's threads that are left."""
    with tiny_trainer(
        freeze=FreezeSchedule([0, 2]),
        epochs=2,
        global_batch_size=8,
        folder=Path(folder, "run"),
        checkpoint_every_epochs=1,
    ) as trainer:
        trainer.fit()
        assert "gloo" in " ".join(thread_names())
    Path(folder, f"rank{trainer.world.rank}").write_text("\n".join(thread_names()))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not name threads in /proc")
def test_no_thread_of_a_closed_world_is_left(tmp_path: Path) -> None:
    # The trainer kept the default group while it was alive itself, and torch._dynamo, which the
    # first optimizer imports, for good. One process in some hundred aborted at its end, when a
    # thread of gloo met an interpreter that was gone.
    launch(threads_after_a_run, (str(tmp_path),), num_slots=2)
    for rank in range(2):
        names = (tmp_path / f"rank{rank}").read_text()
        assert names and "gloo" not in names
