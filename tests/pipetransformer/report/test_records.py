"""Records survive kills and resumes, and hold what was logged."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import signal
import threading
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipetransformer.report.records import Records, read_records


def read_board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read all TensorBoard scalars of a run as {tag: [(step, value)]}."""
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {
        tag: [(event.step, event.value) for event in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
    }


def test_records_are_read_back_as_logged_in_order(tmp_path: Path) -> None:
    breakdown = {"compute": 1.5, "bubble": 0.25}
    with closing(Records(tmp_path)) as records:
        records.log("step", 1, loss=0.5, frozen=3)
        records.log("transition", 1, boundaries=(0, 4))
        records.log("epoch", 2, breakdown=breakdown)
    step, transition, epoch = read_records(tmp_path / "records.jsonl")
    elapsed = [record.pop("elapsed_s") for record in (step, transition, epoch)]
    assert step == {"kind": "step", "step": 1, "loss": 0.5, "frozen": 3}
    assert transition == {"kind": "transition", "step": 1, "boundaries": [0, 4]}
    assert epoch == {"kind": "epoch", "step": 2, "breakdown": breakdown}
    assert elapsed == sorted(elapsed) and elapsed[0] >= 0


def test_a_line_is_in_the_file_before_the_records_are_closed(tmp_path: Path) -> None:
    with closing(Records(tmp_path)) as records:
        records.log("step", 1, loss=0.5)
        assert [record["loss"] for record in read_records(tmp_path / "records.jsonl")] == [0.5]


def test_numbers_that_are_not_finite_become_null_at_any_depth(tmp_path: Path) -> None:
    with closing(Records(tmp_path)) as records:
        records.log("epoch", 1, loss=math.nan, parts={"compute": math.inf}, costs=[1.0, -math.inf])
    (line,) = (tmp_path / "records.jsonl").read_text().splitlines()
    assert "NaN" not in line and "Infinity" not in line
    record = json.loads(line)
    assert record["loss"] is None
    assert record["parts"] == {"compute": None}
    assert record["costs"] == [1.0, None]


def test_tensorboard_holds_every_finite_number_under_kind_and_field(tmp_path: Path) -> None:
    with closing(Records(tmp_path)) as records:
        records.log("step", 1, loss=0.5, frozen=3, reason="text", capped=True)
        records.log("step", 2, loss=math.nan, frozen=3)
        records.log("epoch", 2, breakdown={"compute": 1.5})
    assert read_board(tmp_path) == {
        "step/loss": [(1, 0.5)],
        "step/frozen": [(1, 3.0), (2, 3.0)],
        "epoch/breakdown/compute": [(2, 1.5)],
    }


def test_a_resumed_run_appends_and_its_clock_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"kind": "step", "step": 7, "elapsed_s": 1000.5}\n')
    with closing(Records(tmp_path)) as records:
        records.log("step", 8)
    before, after = read_records(path)
    assert (before["step"], after["step"]) == (7, 8)
    assert after["elapsed_s"] >= 1000.5


def test_a_torn_last_line_is_left_out_and_cut_off_by_the_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"kind": "step", "step": 7, "elapsed_s": 1.0}\n{"kind": "step", "st')
    assert [record["step"] for record in read_records(path)] == [7]
    with closing(Records(tmp_path)) as records:
        records.log("step", 8)
    assert [record["step"] for record in read_records(path)] == [7, 8]


@pytest.mark.parametrize("line", ["", "nonsense", "[1, 2]", '{"kind": "step", "step": 1}'])
def test_a_broken_line_before_the_last_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "records.jsonl"
    whole = '{"kind": "step", "step": 7, "elapsed_s": 1.0}'
    path.write_text(f"{whole}\n{line}\n{whole}\n")
    with pytest.raises(ValueError, match="records.jsonl, line 2: .* is not a record"):
        read_records(path)
    path.write_text(f"{line}\n")  # Another program's.
    with pytest.raises(ValueError, match="line 1"):
        Records(tmp_path)
    assert path.read_text() == f"{line}\n"


def test_a_run_goes_on_beside_a_damaged_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Records are not written durably: after a power cut a block of zeros may be among them.
    path = tmp_path / "records.jsonl"
    whole = '{"kind": "step", "step": 7, "elapsed_s": 1.0}'
    path.write_text(f"{whole}\n\0\0\0\n{whole}\n")
    Records(tmp_path).close()
    assert [record["step"] for record in read_records(path)] == [7, 7]
    assert "1 damaged lines are left out" in caplog.text


def test_tensorboard_is_left_out_where_it_is_not_asked_for(tmp_path: Path) -> None:
    with closing(Records(tmp_path, tensorboard=False)) as records:
        records.log("step", 1, loss=0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


@pytest.mark.parametrize("full", ["board", "lines"])
def test_a_disk_that_is_full_at_the_start_costs_records_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, full: str
) -> None:
    def refuse(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    places = {
        "board": "torch.utils.tensorboard.SummaryWriter",
        "lines": "pipetransformer.report.records.LineFile",
    }
    with mock.patch(places[full], refuse):
        records = Records(tmp_path)
    with closing(records):
        records.log("step", 1, loss=0.5)
    texts = [text for text in caplog.messages if "records are lost" in text]
    assert texts == [
        f"records are lost in {tmp_path}: [Errno 28] No space left on device; training goes on"
    ]
    assert (tmp_path / "records.jsonl").exists() is (full == "board")


def test_closing_twice_does_nothing(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.close()
    records.close()
    assert read_records(tmp_path / "records.jsonl") == []


def limit_files(num_bytes: int) -> None:
    """Let no file grow beyond a size, as a full disk does; the signal that tells is ignored."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


# TensorBoard's own thread ends with the error that its writer then raises.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_costs_records_and_one_warning_and_leaves_whole_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler, threads = signal.getsignal(signal.SIGXFSZ), {*threading.enumerate()}
    with closing(Records(tmp_path)) as records:
        records.log("step", 1, loss=0.5)
        records.log("step", 2, loss=0.5)
        size = (tmp_path / "records.jsonl").stat().st_size
        try:
            # Half a line fits.
            limit_files(size + size // 4)
            for step in range(3, 60):
                records.log("step", step, loss=0.5)
            assert (tmp_path / "records.jsonl").stat().st_size == size
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            signal.signal(signal.SIGXFSZ, handler)
        records.log("step", 60, loss=0.5)
    # The thread's error belongs to this test, not to the next.
    for thread in {*threading.enumerate()} - threads:
        thread.join(timeout=30.0)
    assert [record["step"] for record in read_records(tmp_path / "records.jsonl")] == [1, 2, 60]
    lost = [text for text in caplog.messages if "records are lost" in text]
    assert len(lost) == 1 and "training goes on" in lost[0]
    Records(tmp_path).close()
