"""Prove that the journal holds every executed decision, and only whole ones."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from pipetransformer.durable_files import check_plain
from pipetransformer.elastic.journal import Journal, read_journal

FIRST = {"step": 200, "num_frozen": 4, "length": 2}
SECOND = {"step": 400, "num_frozen": 6, "length": 1}


@contextmanager
def opened(path: Path, **settings: int) -> Iterator[Journal]:
    """Open a journal, and close it at the end."""
    with closing(Journal(path, **settings)) as journal:
        yield journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Hold the two decisions of a run that ended in the middle."""
    path = tmp_path / "run" / "journal.jsonl"
    with opened(path) as journal:
        journal.append(FIRST)
        journal.append(SECOND)
    return path


def test_entries_read_back_in_order(path: Path) -> None:
    assert read_journal(path) == [FIRST, SECOND]


def test_entry_is_on_disk_and_fsynced_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    sizes_at_fsync = []
    monkeypatch.setattr(os, "fsync", lambda fd: sizes_at_fsync.append(os.fstat(fd).st_size))
    with opened(path) as journal:
        for entry in (FIRST, SECOND):
            journal.append(entry)
            assert read_journal(path)[-1] == entry
            assert sizes_at_fsync[-1] == path.stat().st_size


def test_values_read_back_exactly_with_tuples_as_lists(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    values = [0.1, 1 / 3, 5e-324, -0.0, 1.7976931348623157e308, math.inf, -math.inf, math.nan]
    with opened(path) as journal:
        journal.append({"step": 0, "values": values, "balance": (3, 5)})
    # repr shows every bit of a float, and equal NaNs.
    assert repr(read_journal(path)) == repr([{"step": 0, "values": values, "balance": [3, 5]}])


@pytest.mark.parametrize("num_bytes", range(1, len(b'{"step": 400, "num_frozen": 6}\n')))
def test_kill_at_any_byte_of_the_last_line_drops_only_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_bytes: int
) -> None:
    path = tmp_path / "journal.jsonl"
    with opened(path) as journal:
        journal.append({"step": 200})
    line = b'{"step": 400, "num_frozen": 6}\n'
    path.write_bytes(path.read_bytes() + line[:num_bytes])
    assert read_journal(path) == [{"step": 200}]
    assert f"{path} ends in a torn line of {num_bytes} bytes" in caplog.text
    with opened(path, from_step=300) as journal:
        assert journal.recorded(400) is None
        journal.append(SECOND)
    assert read_journal(path) == [{"step": 200}, SECOND]


def test_torn_only_line_leaves_a_journal_that_a_new_run_can_start(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"step": 2')
    with opened(path) as journal:
        journal.append(FIRST)
    assert read_journal(path) == [FIRST]


def test_flip_of_any_bit_costs_only_the_decision_it_is_in_and_is_reported(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = path.read_bytes()
    first_line = data.index(b"\n")
    for offset in range(len(data) - 1):
        flipped = data[offset] ^ (1 << offset % 8)
        path.write_bytes(data[:offset] + bytes([flipped]) + data[offset + 1 :])
        caplog.clear()
        found = read_journal(path)
        if offset == first_line:  # Joined into one line, both are lost.
            assert found == []
        else:
            assert found == ([SECOND] if offset < first_line else [FIRST]), offset
        assert f"{path}, line {1 if offset <= first_line else 2} is damaged" in caplog.text


@pytest.mark.parametrize(
    "damaged", [b'{"step": 4', b"", b"\xff\xfe", b"[400]", b'{"num_frozen": 4}', b'{"step": true}']
)
def test_damaged_line_is_dropped_with_its_number_and_its_decision_taken_anew(
    path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first, damaged, second, b""]))
    with opened(path, from_step=200) as journal:
        assert journal.recorded(200) == FIRST and journal.recorded(400) == SECOND
        assert journal.recorded(300) is None
        journal.append({"step": 300})
    assert "journal.jsonl, line 2 is damaged" in caplog.text
    assert read_journal(path) == [FIRST, SECOND, {"step": 300}]


def test_missing_journal_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="journal.jsonl"):
        read_journal(tmp_path / "journal.jsonl")


def test_resume_offers_decisions_from_its_step_on_and_keeps_the_earlier(path: Path) -> None:
    with opened(path, from_step=400) as journal:
        assert journal.recorded(400) == SECOND
        assert journal.recorded(200) is None
        assert journal.recorded(300) is None
    assert read_journal(path) == [FIRST, SECOND]


def test_last_decision_of_a_step_wins(path: Path) -> None:
    changed = {**SECOND, "pipeline_length": 2}
    with opened(path, from_step=200) as journal:
        journal.append(changed)
        assert journal.recorded(400) == changed
    with opened(path, from_step=200) as journal:
        assert journal.recorded(400) == changed
        assert journal.recorded(200) == FIRST
    assert read_journal(path) == [FIRST, SECOND, changed]


def test_decision_taken_anew_ends_those_of_later_steps(path: Path) -> None:
    between = {"step": 300, "num_frozen": 5, "length": 2}
    with opened(path, from_step=200) as journal:
        journal.append(FIRST)
        journal.append(between)
        assert journal.recorded(400) is None
    with opened(path, from_step=200) as journal:
        assert [journal.recorded(step) for step in (200, 300, 400)] == [FIRST, between, None]
        journal.append(SECOND)
    assert read_journal(path) == [FIRST, SECOND, between, SECOND]


def test_decision_taken_anew_before_a_resume_ends_those_behind_it(path: Path) -> None:
    with opened(path, from_step=200) as journal:
        journal.append({**FIRST, "num_frozen": 3})
    with opened(path, from_step=300) as journal:
        assert journal.recorded(400) is None


def test_replayed_decision_is_not_written_twice(path: Path) -> None:
    before = path.read_bytes()
    with opened(path, from_step=200) as journal:
        journal.append(FIRST)
        journal.append(dict(SECOND))
    assert path.read_bytes() == before


def test_decision_with_nan_or_tuple_counts_as_replayed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    entry = {"step": 10, "loss": math.nan, "balance": (1, 2)}
    with opened(path) as journal:
        journal.append(entry)
    with opened(path, from_step=0) as journal:
        journal.append(entry)
    assert len(read_journal(path)) == 1


def test_missing_journal_is_reported_on_resume_but_not_at_the_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "first.jsonl", from_step=0) as journal:
        assert journal.recorded(0) is None
    assert caplog.text == ""
    with opened(tmp_path / "none.jsonl", from_step=40) as journal:
        assert journal.recorded(40) is None
    assert "none.jsonl is missing: decisions from step 40 on are taken anew" in caplog.text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"entry\['a'\]\[1\] is a set; allowed are dict"),
        ({"a": {1: 2}}, r"entry\['a'\] has the key 1 of type int, which JSON would turn into"),
        ({"a": b"x"}, r"entry\['a'\] is a bytes"),
    ],
)
def test_values_that_json_would_lose_are_refused(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_plain(value, "entry")


def test_a_full_disk_costs_the_decision_s_record_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.jsonl"
    with opened(path) as journal:
        journal.append({"step": 1, "frozen": 0})
        with monkeypatch.context() as context:
            context.setattr(os, "fsync", fail_with_a_full_disk)
            journal.append({"step": 2, "frozen": 1})
        journal.append({"step": 3, "frozen": 2})
    assert "the decision of step 2 is not in the journal" in caplog.text
    assert [entry["step"] for entry in read_journal(path)] == [1, 3]


def fail_with_a_full_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
