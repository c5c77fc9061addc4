"""Prove that launched ranks find their place, that a failed one is named, and that none stays."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from autodp.messages import PeerError, gather_json
from pipetransformer import launch as start
from pipetransformer.errors import WorkerFailedError
from pipetransformer.processes.launcher import _end, _first_cause
from pipetransformer.processes.world import STORE_VARIABLE, connect
from tests.helpers.marks import slow

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "OMP_NUM_THREADS",
    "PIPETRANSFORMER_RESTART_COUNT",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
DEADLINE_S = 60.0
MODULE = sys.modules["pipetransformer.processes.launcher"]


def note_place(folder: str) -> None:
    """Join worlds one after the other, and write down what this process found."""
    sums = []
    for number in (1, 10, 100, 1000):
        world = connect("cpu", timeout_s=DEADLINE_S)
        total = torch.tensor([number * (world.rank + 1)])
        dist.all_reduce(total)
        sums.append(int(total))
        world.close()
    found = {
        **{name: os.environ[name] for name in VARIABLES},
        "sums": sums,
        "threads": torch.get_num_threads(),
    }
    Path(folder, f"rank{world.rank}.json").write_text(json.dumps(found))


# A spawned world that fails has a test below.
@pytest.fixture(scope="module", params=[slow("spawn"), "forkserver"])
def places(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Launch two ranks of one core each, and return what they found."""
    folder, before = tmp_path_factory.mktemp("places"), dict(os.environ)
    start(note_place, (str(folder),), num_slots=2, start_method=request.param)
    assert dict(os.environ) == before
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_every_rank_finds_its_place_in_the_environment(places: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(places):
        assert [found[name] for name in VARIABLES] == [
            str(rank), str(rank), "2", "2", "1", "0", "32",
        ]  # fmt: skip
        assert found["threads"] == 1


def test_ranks_can_join_one_world_after_another(places: list[dict[str, Any]]) -> None:
    assert [found["sums"] for found in places] == [[3, 30, 300, 3000]] * 2


def fail(folder: str, how: str) -> None:
    """Join the world; rank 1 goes down, and rank 0 fails because of it."""
    world = connect("cpu", timeout_s=DEADLINE_S)
    Path(folder, f"rank{world.rank}").write_text(str(os.getpid()))
    dist.barrier()
    if world.rank == 1 and how.isdecimal():
        os.kill(os.getpid(), int(how))
    if world.rank == 1:
        raise LookupError("rank one lost its way")
    dist.recv(torch.zeros(1), 1)


@pytest.mark.parametrize(
    ("how", "start_method", "message"),
    [
        slow(
            "raise",
            "spawn",
            r"^rank 1 of 2 \(process \d+\) failed \(exit status 1; .*resume='auto'",
        ),
        (
            "9",
            "forkserver",
            r"^rank 1 of 2 \(process \d+\) was killed by SIGKILL; .*resume='auto'",
        ),
        slow(
            "40",
            "forkserver",
            r"^rank 1 of 2 \(process \d+\) was killed by signal 40; .*resume='auto'",
        ),
    ],
    ids=["raise", "kill", "real-time"],
)
def test_the_rank_that_failed_first_is_named_and_no_process_is_left(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    how: str,
    start_method: Literal["spawn", "forkserver"],
    message: str,
) -> None:
    with pytest.raises(WorkerFailedError, match=message) as caught:
        start(fail, (str(tmp_path), how), num_slots=2, start_method=start_method)
    pids = [int((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert f"(process {pids[1]})" in str(caught.value)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    if how == "raise":
        assert "[rank 1] Traceback" in (errors := capfd.readouterr().err)
        assert "LookupError: rank one lost its way" in errors


BY_ITSELF, BECAUSE_OF_OTHERS = "first-failure", "first-consequence"


# Exit codes of ranks 0 and 1, what they noted of their failures, the one seen to end first.
@pytest.mark.parametrize(
    ("codes", "noted", "seen", "named"),
    [
        ((1, 1), {BY_ITSELF: 1}, 0, 1),
        ((1, 1), {BY_ITSELF: 0}, 1, 0),
        ((1, 1), {BY_ITSELF: 1, BECAUSE_OF_OTHERS: 0}, 0, 1),
        ((1, 1), {BECAUSE_OF_OTHERS: 0}, 1, 0),
        ((1, -9), {BY_ITSELF: 0}, 0, 1),
        ((-11, 1), {BY_ITSELF: 1}, 1, 0),
        ((-6, 1), {BY_ITSELF: 1}, 0, 1),
        ((3, None), {}, 0, 0),
        ((None, -6), {}, 1, 1),
        ((1, None), {BY_ITSELF: 1}, 0, 0),
    ],
)
def test_a_killed_rank_is_blamed_before_a_failed_one_and_an_abort_last(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codes: tuple[int | None, ...],
    noted: dict[str, int],
    seen: int,
    named: int,
) -> None:
    monkeypatch.setattr(MODULE, "_NEIGHBOURS_S", 0.0)
    for name, rank in noted.items():
        (tmp_path / name).symlink_to(str(rank))
    processes: list[Any] = [
        SimpleNamespace(exitcode=code, pid=os.getpid(), join=lambda timeout: None)
        for code in codes
    ]
    assert _first_cause(processes, seen, tmp_path) == named


def fail_twice(folder: str) -> None:
    """Note where the ranks meet; rank 1 is killed, then rank 0 raises, then all end well."""
    rank, restarts = int(os.environ["RANK"]), int(os.environ["PIPETRANSFORMER_RESTART_COUNT"])
    Path(folder, f"attempt{restarts}-rank{rank}").write_text(os.environ[STORE_VARIABLE])
    world = connect("cpu", timeout_s=DEADLINE_S)
    dist.barrier()
    if (rank, restarts) == (1, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if (rank, restarts) == (0, 1):
        raise LookupError("rank zero lost its way")
    dist.barrier()
    world.close()


def test_all_start_again_after_a_failure_and_one_warning_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pipetransformer"):
        start(fail_twice, (str(tmp_path),), num_slots=2, max_restarts=3, start_method="forkserver")
    killed, failed = [record.getMessage() for record in caplog.records]
    assert "rank 1 of 2" in killed and "was killed by SIGKILL" in killed
    assert "rank 0 of 2" in failed and "failed (exit status 1" in failed
    assert killed.endswith("(restart 1 of 3)") and failed.endswith("(restart 2 of 3)")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(found) == [f"attempt{n}-rank{r}" for n in range(3) for r in range(2)]
    assert len(set(found.values())) == 3, "each attempt meets in a file of its own"


def test_after_the_last_restart_the_failure_is_raised(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match=r"^rank 0 of 2 .* failed .* after 1 restart\(s\)"):
        start(fail_twice, (str(tmp_path),), num_slots=2, max_restarts=1, start_method="forkserver")


def note_launch(folder: str) -> None:
    """Note the launch's name; the first attempt fails."""
    rank, restarts = os.environ["RANK"], os.environ["PIPETRANSFORMER_RESTART_COUNT"]
    Path(folder, f"{restarts}-{rank}").write_text(os.environ["PIPETRANSFORMER_LAUNCH"])
    if restarts == "0":
        raise LookupError("first attempt")


def test_restarts_have_the_launch_s_name_in_common_and_launches_differ(tmp_path: Path) -> None:
    names = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        start(note_launch, (str(folder),), num_slots=1, max_restarts=1, start_method="forkserver")
        names.append({path.read_text() for path in folder.iterdir()})
        assert len(list(folder.iterdir())) == 2
    assert [len(found) for found in names] == [1, 1] and names[0] != names[1]


def stop(folder: str) -> None:
    """Rank 1 is stopped by a signal; rank 0 waits for it until its patience ends."""
    world = connect("cpu", timeout_s=1.0)
    Path(folder, f"rank{world.rank}").write_text(str(os.getpid()))
    dist.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(PeerError, match=r"^rank 0 waited for rank 1 \(answers\): ") as caught:
        gather_json(None, group=world.group)
    raise caught.value


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells that a process is stopped")
def test_a_stopped_rank_is_named_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "_GRACE_S", 0.2)  # It heeds no request to end.
    with pytest.raises(WorkerFailedError, match=r"^rank 1 of 2 .* was stopped by a signal, and"):
        start(stop, (str(tmp_path),), num_slots=2, start_method="forkserver")
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"rank{rank}").read_text()), 0)


def stay(fifo: str, how: str) -> None:
    """Say that this process is up, and stay until it is ended; its end closes the pipe."""
    world = connect("cpu", timeout_s=10 * DEADLINE_S)
    with open(fifo, "w") as pipe:
        pipe.write(f"{world.rank}\n")
        pipe.flush()
        if world.rank == 1 and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.recv(torch.zeros(1), 1 - world.rank)


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


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Give a folder in which a fork server's socket has a name of under 108 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("ending", "how", "start_method"),
    [
        slow(signal.SIGTERM, "stopped", "forkserver"),
        slow(signal.SIGKILL, "waiting", "forkserver"),
        pytest.param(
            signal.SIGKILL,
            "stopped",
            "spawn",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    sys.platform != "linux", reason="only Linux's kernel ends a stopped process"
                ),
            ],
        ),
    ],
)
def test_ranks_end_with_the_launcher(
    tmp_path: Path,
    short_folder: Path,
    ending: signal.Signals,
    how: str,
    start_method: Literal["spawn", "forkserver"],
) -> None:
    fifo = tmp_path / "up"
    os.mkfifo(fifo)
    script = (
        "from pipetransformer import launch; "
        "from tests.pipetransformer.processes.test_launcher import stay; "
        f"launch(stay, ({str(fifo)!r}, {how!r}), num_slots=2, "
        f"start_method={start_method!r})"
    )
    pipe = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TMPDIR": str(short_folder)},
    )
    try:
        up = read_until(pipe, lambda text: text.count(b"\n") == 2)
        assert sorted(up.split()) == [b"0", b"1"]
    finally:
        parent.send_signal(ending)
        parent.wait()
    assert read_until(pipe, lambda text: False) == b""
    os.close(pipe)
    if ending == signal.SIGTERM:
        assert parent.returncode == 128 + ending
        assert not list(short_folder.glob("pipetransformer-*"))


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


@pytest.mark.parametrize(
    "counts",
    [
        {"num_slots": 0},
        {"num_slots": 2, "cores_per_slot": 0},
        {"num_slots": -1},
        {"num_slots": 2, "max_restarts": -1},
    ],
    ids=str,
)
def test_a_launch_without_slots_or_cores_is_refused_before_any_process(
    monkeypatch: pytest.MonkeyPatch, counts: dict[str, int]
) -> None:
    monkeypatch.setattr(
        "multiprocessing.get_context", lambda *_: pytest.fail("processes were started")
    )
    with pytest.raises(ValueError, match="slots and cores must be at least 1, restarts at least"):
        start(note_place, **counts)


def wait_for_ctrl_c() -> None:
    """Wait for Ctrl-C, which the second rank presses; the first says where it was."""
    world = connect("cpu", timeout_s=DEADLINE_S)
    try:
        dist.barrier()
        if world.rank == 1:
            os.killpg(0, signal.SIGINT)
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            # In slices: a signal just before the call would not end it.
            time.sleep(0.05)
    except KeyboardInterrupt as error:
        error.args = ("stopped at step 7",) if world.rank == 0 else ()
        raise


@pytest.mark.parametrize("start_method", [slow("spawn"), "forkserver"])
def test_ctrl_c_ends_all_ranks_and_says_last_what_rank_0_said(
    tmp_path: Path, start_method: str
) -> None:
    program = (
        "import os, signal\n"
        "from pipetransformer import launch\n"
        "from tests.pipetransformer.processes.test_launcher import wait_for_ctrl_c\n"
        "if __name__ == '__main__':\n"
        # A job in the background starts without it.
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"    launch(wait_for_ctrl_c, num_slots=2, start_method={start_method!r})\n"
    )
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, tmp_path / "program.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 2,
        start_new_session=True,
    )
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.strip().splitlines()[-1] == "KeyboardInterrupt: stopped at step 7"
    assert ended.stderr.count("Traceback") == 1
