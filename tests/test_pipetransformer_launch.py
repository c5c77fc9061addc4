"""Prove that launched ranks find their place, that a failed one is named, and that none stays."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipetransformer import launch as start
from pipetransformer.launch import WorkerFailedError, _end, _first_cause
from pipetransformer.world import connect

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
DEADLINE_S = 60.0
MODULE = sys.modules["pipetransformer.launch"]  # The attribute of that name is the function.


def note_place(folder: str) -> None:
    """Join worlds one after the other, and write down what this process found."""
    sums = []
    for number in (1, 10, 100, 1000):
        world = connect("cpu", timeout_s=DEADLINE_S)
        total = torch.tensor([number * (world.rank + 1)])
        dist.all_reduce(total)
        sums.append(int(total))
        world.close()
    found = {**{name: os.environ[name] for name in VARIABLES}, "sums": sums,
             "threads": torch.get_num_threads()}
    Path(folder, f"rank{world.rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Launch two ranks of one core each, and return what they found."""
    folder, before = tmp_path_factory.mktemp("places"), dict(os.environ)
    start(note_place, (str(folder),), num_slots=2)
    assert dict(os.environ) == before
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_every_rank_finds_its_place_in_the_environment(places: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(places):
        assert [found[name] for name in VARIABLES] == [str(rank), str(rank), "2", "2", "1"]
        assert found["threads"] == 1


def test_ranks_can_join_one_world_after_another(places: list[dict[str, Any]]) -> None:
    assert [found["sums"] for found in places] == [[3, 30, 300, 3000]] * 2


def fail(folder: str, how: str) -> None:
    """Join the world; rank 1 goes down, and rank 0 fails because of it."""
    world = connect("cpu", timeout_s=DEADLINE_S)
    Path(folder, f"rank{world.rank}").write_text(str(os.getpid()))
    dist.barrier()
    if world.rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1:
        raise LookupError("rank one lost its way")
    dist.recv(torch.zeros(1), 1)


@pytest.mark.parametrize(("how", "message"), [
    ("raise", r"^rank 1 of 2 \(process \d+\) failed \(exit status 1; .*resume=True"),
    ("kill", r"^rank 1 of 2 \(process \d+\) was killed by SIGKILL; .*resume=True"),
], ids=["raise", "kill"])
def test_the_rank_that_failed_first_is_named_and_no_process_is_left(
        tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, message: str) -> None:
    with pytest.raises(WorkerFailedError, match=message) as caught:
        start(fail, (str(tmp_path), how), num_slots=2)
    pids = [int((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert f"(process {pids[1]})" in str(caught.value)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    if how == "raise":
        assert "[rank 1] Traceback" in (errors := capfd.readouterr().err)
        assert "LookupError: rank one lost its way" in errors


# Exit codes of ranks 0 and 1, the rank that noted its failure first, the one seen to end first.
@pytest.mark.parametrize(("codes", "noted", "seen", "named"), [
    ((1, 1), 1, 0, 1), ((1, 1), 0, 1, 0), ((1, -9), 0, 0, 1), ((-11, 1), 1, 1, 0),
    ((-6, 1), 1, 0, 1), ((3, None), None, 0, 0), ((None, -6), None, 1, 1), ((1, None), 1, 0, 0)])
def test_a_killed_rank_is_blamed_before_a_failed_one_and_an_abort_last(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: tuple[int | None, ...],
        noted: int | None, seen: int, named: int) -> None:
    monkeypatch.setattr(MODULE, "_NEIGHBOURS_S", 0.0)
    if noted is not None:
        (tmp_path / "first-failure").symlink_to(str(noted))
    processes: list[Any] = [SimpleNamespace(exitcode=code, join=lambda timeout: None)
                            for code in codes]
    assert _first_cause(processes, seen, tmp_path) == named


def stay(fifo: str) -> None:
    """Say that this process is up, and stay until it is ended; its end closes the pipe."""
    with open(fifo, "w") as pipe:
        pipe.write(f"{os.environ['RANK']}\n")
        pipe.flush()
        signal.pause()


def read_until(pipe: int, enough: Callable[[bytes], bool]) -> bytes:
    """Read a pipe until there is enough or all its writers are gone, within the deadline."""
    text = b""
    while not enough(text):
        assert select.select([pipe], [], [], DEADLINE_S)[0], f"after {text!r} nothing came"
        part = os.read(pipe, 64)
        text += part
        if not part:
            break
    return text


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    fifo = tmp_path / "up"
    os.mkfifo(fifo)
    script = ("from pipetransformer import launch; from tests.test_pipetransformer_launch import "
              f"stay; launch(stay, ({str(fifo)!r},), num_slots=2)")
    pipe = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[1],
                              env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        up = read_until(pipe, lambda text: text.count(b"\n") == 2)
        assert sorted(up.split()) == [b"0", b"1"]
    finally:
        parent.kill()
        parent.wait()
    assert read_until(pipe, lambda text: False) == b""
    os.close(pipe)


class Stubborn:
    """A process that leaves only when it is killed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def is_alive(self) -> bool:
        return "kill" not in self.calls

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.calls.append(name)


def test_a_rank_that_ignores_the_request_to_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_GRACE_S", 0.0)
    process: Any = Stubborn()
    _end([process])
    assert process.calls == ["terminate", "join", "kill", "join"]


@pytest.mark.parametrize("counts", [{"num_slots": 0}, {"num_slots": 2, "cores_per_slot": 0},
                                    {"num_slots": -1}], ids=str)
def test_a_launch_without_slots_or_cores_is_refused_before_any_process(
        monkeypatch: pytest.MonkeyPatch, counts: dict[str, int]) -> None:
    monkeypatch.setattr("multiprocessing.get_context",
                        lambda *_: pytest.fail("processes were started"))
    with pytest.raises(ValueError, match="both must be at least 1"):
        start(note_place, num_slots=counts["num_slots"],
              cores_per_slot=counts.get("cores_per_slot", 1))
