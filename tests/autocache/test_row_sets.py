"""Rows are found again by what they were made from, by any number of processes at once."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import logging
import math
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autocache import KeptRows, KeptStore, RowField, RowLayout, RowSets
from autocache.layout import FileShape
from autocache.row_sets import OpenSet

LAYOUT = RowLayout((RowField("hidden", (4, 6), torch.float32), RowField("y", (), torch.int64)))
NUM, STAMP = 12, 0x1234
IDS = torch.arange(NUM)
MADE_FROM = {"data": "words", "stamp": f"{STAMP:016x}"}


def rows_of(ids: Tensor, shift: float = 0.0) -> dict[str, Tensor]:
    hidden = torch.arange(24.0).view(4, 6) + 100.0 * ids[:, None, None] + shift
    return {"hidden": hidden, "y": ids + 7}


def open_set(folder: Path, limit_bytes: int | None = None, **made_from: Any) -> OpenSet:
    sets = RowSets(folder, limit_bytes=limit_bytes)
    return sets.obtain({**MADE_FROM, **made_from}, LAYOUT, NUM, {"model": "Tiny"})


TEXTS = RowLayout((RowField("hidden", (200, 64), torch.float32, varies=True),), mean_length=50.0)


def texts_of(ids: Tensor, length: int) -> dict[str, Tensor]:
    hidden = torch.arange(200.0 * 64).view(200, 64) + ids[:, None, None]
    hidden[:, length:] = 0
    return {"hidden": hidden}


def open_texts(folder: Path, limit_bytes: int | None = None, **made_from: Any) -> OpenSet:
    sets = RowSets(folder, limit_bytes=limit_bytes)
    return sets.obtain({**MADE_FROM, **made_from}, TEXTS, NUM, {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def assert_holds(one: OpenSet, ids: Tensor = IDS) -> None:
    read = one.store.read(ids, (STAMP,))
    assert read.depth.tolist() == [1] * len(ids)
    for name, row in rows_of(ids).items():
        assert torch.equal(read.rows[name], row)


def test_rows_outlive_the_process_that_wrote_them(folder: Path) -> None:
    first = open_set(folder)
    first.store.write(IDS, STAMP, rows_of(IDS))
    first.close()
    again = open_set(folder)
    assert_holds(again)
    again.close()


@pytest.mark.parametrize("other", [{"data": "others"}, {"stamp": "0" * 16}, {"threads": 2}])
def test_rows_that_were_made_from_anything_else_are_not_found(
    folder: Path, other: dict[str, Any]
) -> None:
    first = open_set(folder)
    first.store.write(IDS, STAMP, rows_of(IDS))
    second = open_set(folder, **other)
    assert second.folder != first.folder
    assert not second.store.find(IDS, (STAMP,)).any()
    first.close()
    second.close()


def test_a_row_of_another_layout_is_in_another_set(folder: Path) -> None:
    first, sets = open_set(folder), RowSets(folder)
    half = RowLayout((RowField("hidden", (4, 6), torch.bfloat16), LAYOUT.fields[1]))
    second = sets.obtain(MADE_FROM, half, NUM, {})
    assert second.folder != first.folder
    first.close()
    second.close()


def test_the_least_recently_used_set_makes_room(folder: Path) -> None:
    size = sized()
    for name in ("a", "b", "c"):
        open_set(folder, 3 * size, data=name).close()
    used_at(folder, a=1, b=2, c=3)
    open_set(folder, 3 * size, data="a").close()  # Now b was not used for longest.
    open_set(folder, 3 * size, data="d").close()
    kept = {made_from(one)["data"] for one in folder.glob("rows-*")}
    assert kept == {"a", "c", "d"}


def test_a_set_in_use_is_never_thrown_out(folder: Path) -> None:
    size = sized()
    used = open_set(folder, 2 * size, data="used")
    used.store.write(IDS, STAMP, rows_of(IDS))
    other = open_set(folder, 2 * size - 300, data="other")
    assert 0 < other.store.num_rows < NUM
    assert_holds(used)
    other.close()
    with pytest.raises(OSError, match="leaves no room for a row of"):
        open_set(folder, size, data="a third")
    used.close()


def test_a_set_keeps_its_rows_when_the_limit_grows(folder: Path) -> None:
    size = sized()
    small = open_set(folder, size - 300)
    num = small.store.num_rows
    assert 0 < num < NUM
    small.close()
    again = open_set(folder, 5 * size)
    assert again.store.num_rows == num
    again.close()


def test_a_maker_that_was_killed_leaves_no_set(folder: Path) -> None:
    whole = open_set(folder, data="whole")
    torn = open_set(folder, data="torn").folder
    (torn / "about.json").unlink()
    open_set(folder, data="another").close()
    assert not torn.exists()
    whole.close()
    assert len(RowSets(folder).facts()) == 2


@pytest.mark.parametrize("how", ["text", "hash", "rows", "short", "header", "condemned"])
def test_a_damaged_set_is_removed_with_a_warning_and_made_anew(
    folder: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_set(folder)
    first.store.write(IDS, STAMP, rows_of(IDS))
    if how == "condemned":
        first.store.condemn()
    first.close()
    about, rows = first.folder / "about.json", first.folder / "rows"
    if how == "text":
        about.write_text(about.read_text()[:-9])
    elif how == "hash":
        facts = json.loads(about.read_text())
        facts["made_from"]["data"] = "another"
        about.write_text(json.dumps(facts))
    elif how == "rows":
        rows.unlink()
    elif how == "short":
        os.truncate(rows, 100)
    elif how == "header":
        data = bytearray(rows.read_bytes())
        data[0] ^= 1
        rows.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        again = open_set(folder)
    assert "are not used, and removed" in caplog.text
    assert not again.store.find(IDS, (STAMP,)).any()
    again.close()


def test_sets_are_described_and_removed_by_name(folder: Path) -> None:
    one = open_set(folder)
    one.store.write(IDS[:5], STAMP, rows_of(IDS[:5]))
    sets = RowSets(folder)
    facts = sets.facts()[0]
    assert (facts.num_rows, facts.num_whole, facts.about) == (NUM, 5, {"model": "Tiny"})
    assert facts.num_bytes == sized() and facts.is_used
    assert not sets.remove(facts.name)
    one.close()
    assert not sets.facts()[0].is_used
    assert sets.remove(facts.name)
    assert sets.facts() == []
    with pytest.raises(FileNotFoundError, match="holds no set of rows named 'rows-0'"):
        sets.remove("rows-0")


def test_a_set_of_unequal_rows_is_said_to_take_what_it_takes(folder: Path) -> None:
    with closing(open_texts(folder)) as one:
        empty = RowSets(folder).facts()[0].num_bytes
        assert empty < 8192 < NUM * TEXTS.row_bytes
        lengths = torch.full((NUM,), 50)
        one.store.write(IDS, STAMP, texts_of(IDS, 50), lengths)
        found, file = RowSets(folder).facts()[0], one.folder / "rows"
        assert found.num_whole == NUM
        assert found.num_bytes == file.stat().st_blocks * 512 < file.stat().st_size
        assert NUM * 50 * 256 <= found.num_bytes <= 1.1 * NUM * 50 * 256 + 8192
    # A later run may know of other lengths, and read and write the same rows.
    longer = RowLayout(TEXTS.fields, mean_length=170.0)
    with closing(RowSets(folder).obtain(MADE_FROM, longer, NUM, {})) as again:
        read = again.store.read(IDS, (STAMP,))
        assert read.depth.all() and torch.equal(read.rows["hidden"], texts_of(IDS, 50)["hidden"])
        again.store.write(IDS, STAMP, texts_of(IDS, 170), torch.full((NUM,), 170))
    with closing(open_texts(folder)) as last:
        read = last.store.read(IDS, (STAMP,))
        assert read.depth.all() and torch.equal(read.rows["hidden"], texts_of(IDS, 170)["hidden"])


def test_a_limit_counts_unequal_rows_by_their_expected_length(folder: Path) -> None:
    limit_bytes = 4096 + 6 * math.ceil(1.1 * TEXTS.expected_bytes)
    assert limit_bytes < 4096 + NUM * TEXTS.row_bytes // 2
    with closing(open_texts(folder, limit_bytes)) as one:
        assert one.store.num_rows == 6
        one.store.write(IDS, STAMP, texts_of(IDS, 100))  # Rows of 200, four times the expected.
        assert RowSets(folder).facts()[0].num_bytes < limit_bytes + 4096
        assert 0 < one.store.find(IDS, (STAMP,)).sum() < 6
        # What it has claimed counts, whether it is used yet or not.
        with pytest.raises(OSError, match="leaves no room for a row"):
            open_texts(folder, limit_bytes, data="another")


def test_a_set_of_unequal_rows_in_slots_of_an_earlier_version_is_replaced(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_texts(folder)) as one:
        one.store.write(IDS, STAMP, texts_of(IDS, 50))
        rows = one.folder / "rows"
    before = hashlib.blake2b(repr((TEXTS, NUM)).encode(), digest_size=8).digest()
    with open(rows, "rb+") as file:
        file.write(before)
        file.truncate(4096 + NUM * TEXTS.row_bytes)
    assert RowSets(folder).facts() == [] and "another layout" in caplog.text
    with closing(open_texts(folder)) as again:
        assert "are not used, and removed" in caplog.text
        assert not again.store.find(IDS, (STAMP,)).any()


def test_rows_of_each_depth_stay_when_the_prefix_grows(folder: Path) -> None:
    kept = KeptRows(RowSets(folder), {"data": "words"}, {}, run=1)
    stamps = (0x11, 0x22)
    with closing(KeptStore(kept, LAYOUT, NUM, stamp=stamps[0])) as store:
        store.write(IDS, stamps[0], rows_of(IDS))
    with closing(KeptStore(kept, LAYOUT, NUM, stamp=stamps[1])) as store:
        assert store.find(IDS, stamps).tolist() == [0] * NUM
        store.trust(stamps[0])
        assert store.find(IDS, stamps).tolist() == [1] * NUM
        store.write(IDS[:4], stamps[1], rows_of(IDS[:4], 0.5))
        read = store.read(IDS, stamps)
        assert read.depth.tolist() == [2] * 4 + [1] * (NUM - 4)
        assert torch.equal(read.rows["hidden"][:4], rows_of(IDS[:4], 0.5)["hidden"])
        assert torch.equal(read.rows["hidden"][4:], rows_of(IDS[4:])["hidden"])
    with closing(KeptStore(kept, LAYOUT, NUM, stamp=stamps[0])) as store:
        store.trust(stamps[0])
        assert store.find(IDS, stamps[:1]).tolist() == [1] * NUM


def kept_store(folder: Path, run: int) -> KeptStore:
    kept = KeptRows(RowSets(folder), {"data": "words"}, {}, run)
    return KeptStore(kept, LAYOUT, NUM, stamp=STAMP)


def holds_all(store: KeptStore) -> bool:
    read = store.read(IDS, (STAMP,))
    equal = [torch.equal(read.rows[name], row) for name, row in rows_of(IDS).items()]
    return bool(read.depth.all()) and all(equal)


def test_a_second_run_writes_nothing_and_reads_what_it_trusts(folder: Path) -> None:
    with closing(kept_store(folder, 1)) as first, closing(kept_store(folder, 2)) as second:
        assert first.is_writable and not second.is_writable
        second.write(IDS, STAMP, rows_of(IDS, shift=1.0))
        second.clear(IDS)
        assert not first.find(IDS, (STAMP,)).any()
        first.write(IDS[:5], STAMP, rows_of(IDS[:5]))
        second.clear(IDS)
        assert not second.find(IDS, (STAMP,)).any()
        assert second.find_unproven(IDS, (STAMP,)).tolist() == [1] * 5 + [0] * (NUM - 5)
        second.trust(STAMP)
        assert second.find(IDS, (STAMP,)).tolist() == [1] * 5 + [0] * (NUM - 5)
        second.write(IDS[5:], STAMP, rows_of(IDS[5:], shift=1.0))
        assert first.find(IDS, (STAMP,)).tolist() == [1] * 5 + [0] * (NUM - 5)
        first.write(IDS[5:], STAMP, rows_of(IDS[5:]))
        assert holds_all(first) and holds_all(second)


def test_all_processes_of_a_run_write_until_the_last_has_closed(folder: Path) -> None:
    with closing(kept_store(folder, 1)) as rank_0, closing(kept_store(folder, 1)) as rank_1:
        rank_0.write(IDS[:5], STAMP, rows_of(IDS[:5]))
        rank_1.write(IDS[5:], STAMP, rows_of(IDS[5:]))
        assert holds_all(rank_0) and holds_all(rank_1)
        rank_0.close()
        with closing(kept_store(folder, 2)) as other:
            assert not other.is_writable
    with closing(kept_store(folder, 2)) as other:
        assert other.is_writable


def test_a_run_goes_on_to_write_when_the_one_before_it_ends(folder: Path) -> None:
    first = kept_store(folder, 1)
    first.write(IDS[:5], STAMP, rows_of(IDS[:5]))
    with closing(kept_store(folder, 2)) as second:
        first.close()
        # Beside rows of another run none are written before it has compared them.
        second.write(IDS[5:], STAMP, rows_of(IDS[5:]))
        assert second.is_writable and not second.find(IDS, (STAMP,)).any()
        second.trust(STAMP)
        second.write(IDS[5:], STAMP, rows_of(IDS[5:]))
        assert holds_all(second)


def test_only_the_run_that_writes_a_set_removes_it(folder: Path) -> None:
    with closing(kept_store(folder, 1)) as first, closing(kept_store(folder, 2)) as second:
        first.write(IDS, STAMP, rows_of(IDS))
        assert second.condemn() and second.is_condemned()
        assert holds_all(first) and not first.is_condemned()
        first.close()
        second.condemn()
        assert [*folder.glob("rows-*")] == []


def test_a_kill_of_the_process_that_writes_frees_the_lock(folder: Path) -> None:
    (reading, writing), (waiting, _) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        store = kept_store(folder, 1)
        store.write(IDS[:5], STAMP, rows_of(IDS[:5]))
        os.write(writing, b"1")
        os.read(waiting, 1)  # Until it is killed.
        os._exit(1)
    os.read(reading, 1)
    with closing(kept_store(folder, 2)) as other:
        assert not other.is_writable
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        other.trust(STAMP)
        other.write(IDS[5:], STAMP, rows_of(IDS[5:]))
        assert holds_all(other)


def test_condemned_rows_are_gone_for_every_process_at_once(folder: Path) -> None:
    one, two = kept_store(folder, 1), kept_store(folder, 1)
    one.write(IDS, STAMP, rows_of(IDS))
    assert one.condemn()
    assert not two.condemn()
    assert two.is_condemned() and not two.find(IDS, (STAMP,)).any()
    assert [*folder.glob("rows-*")] == []
    one.close()
    two.close()


def sized() -> int:
    """Return the bytes of one set."""
    return FileShape(LAYOUT, NUM).num_bytes


def made_from(folder: Path) -> Any:
    return json.loads((folder / "about.json").read_text())["made_from"]


def used_at(folder: Path, **seconds: int) -> None:
    """Say when sets were last used, by their data."""
    for one in folder.glob("rows-*"):
        at = seconds[made_from(one)["data"]]
        os.utime(one / "about.json", (at, at))


def test_a_set_of_few_rows_is_made_anew_where_there_is_room_by_now(folder: Path) -> None:
    small = open_set(folder, sized() - 7 * LAYOUT.row_bytes)
    assert small.store.num_rows <= NUM // 2
    again = open_set(folder)
    assert again.store.num_rows == small.store.num_rows  # It is in use.
    again.close()
    small.close()
    again = open_set(folder)
    assert again.store.num_rows == NUM
    again.close()


def test_files_that_are_not_ours_are_left_alone(folder: Path, tmp_path: Path) -> None:
    one = open_set(folder)
    one.close()
    (one.folder / "notes").write_text("mine")
    (folder / "rows-file").write_text("mine")
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "about.json").write_text("mine")
    (folder / "rows-link").symlink_to(other)
    sets = RowSets(folder)
    assert [facts.name for facts in sets.facts()] == [one.folder.name]
    assert sets.remove(one.folder.name)
    again = open_set(folder)
    again.store.write(IDS, STAMP, rows_of(IDS))
    again.close()
    assert (one.folder / "notes").read_text() == (other / "about.json").read_text() == "mine"


def test_descriptors_are_given_back_where_nobody_closes_a_set(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        open_set(folder)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_process_does_not_keep_a_set_in_use(folder: Path) -> None:
    one, (reading, writing) = open_set(folder), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)  # It lives until the test is over.
        os._exit(0)
    one.close()
    assert RowSets(folder).remove(one.folder.name)
    os.write(writing, b"1")
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)


def test_a_whole_set_outlives_an_error_that_passes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_set(folder)) as one:
        one.store.write(IDS, STAMP, rows_of(IDS))
    with monkeypatch.context() as patch:
        patch.setattr("autocache.row_sets.RowStore", _fails)
        with pytest.raises(OSError, match="too many"):
            open_set(folder)
    with closing(open_set(folder)) as again:
        assert_holds(again)


def _fails(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, "too many open files")


def test_a_process_that_was_forked_within_the_lock_does_not_keep_it(folder: Path) -> None:
    sets, (reading, writing) = RowSets(folder), os.pipe()
    with sets._locked():
        pid = os.fork()
        if pid == 0:
            os.read(reading, 1)  # It lives until the test is over.
            os._exit(0)
    try:
        start = time.monotonic()
        open_set(folder).close()
        assert time.monotonic() - start < 30
    finally:
        os.write(writing, b"1")
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
