"""Prove that rows of unequal lengths take their own length, whoever writes and whatever fails."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from autocache import store as store_module
from autocache.layout import TAKEN, RowField, RowLayout
from autocache.rooms import EXTENT_BYTES
from autocache.row_pool import RowPool
from autocache.store import RowStore
from tests.helpers.pool import another_process

MOST, WIDTH, NUM_ROWS = 64, 96, 1200
TEXTS = RowLayout(
    (
        RowField("hidden", (MOST, WIDTH), torch.float32, varies=True),
        RowField("mask", (MOST,), torch.int64),
        RowField("y", (), torch.int32),
    ),
    mean_length=13.0,
)
BESIDE_BYTES = MOST * 8 + 64
"""What a row holds beside its hidden states."""


def lengths_of(ids: Tensor) -> Tensor:
    """Return lengths as short texts have them: 13 of 64 on average."""
    drawn = torch.from_numpy(np.random.default_rng(0).gamma(2.0, 6.5, size=NUM_ROWS)).long()
    return drawn.clamp(1, MOST)[ids]


def rows_of(ids: Tensor, lengths: Tensor, *, seed: int = 0) -> dict[str, Tensor]:
    """Return rows that are the same wherever they are made."""
    behind = torch.arange(MOST) >= lengths[:, None]
    hidden = (
        ids[:, None, None] * 31 + torch.arange(MOST)[:, None] * 7 + torch.arange(WIDTH)
    ).sin()
    return {
        "hidden": (hidden + seed).float().masked_fill(behind[..., None], 0.0),
        "mask": (~behind).long(),
        "y": (ids + seed).int(),
    }


def write(store: RowStore, ids: Tensor, stamp: int = 1, *, seed: int = 0) -> None:
    for some in ids.split(32):
        lengths = lengths_of(some)
        store.write(some, stamp, rows_of(some, lengths, seed=seed), lengths)


def assert_served(store: RowStore, ids: Tensor, stamp: int = 1, *, seed: int = 0) -> None:
    """Check that all of these rows are there, and right."""
    found = assert_right(store, ids, stamp, seed=seed)
    assert found.all(), ids[~found]


def assert_right(store: RowStore, ids: Tensor, stamp: int = 1, *, seed: int = 0) -> Tensor:
    """Check that rows which are there are right; return which are."""
    there = []
    for some in ids.split(32):
        read = store.read(some, [stamp])
        found = read.depth > 0
        for name, expected in rows_of(some, lengths_of(some), seed=seed).items():
            assert torch.equal(read.rows[name][found], expected[found]), name
        there.append(found)
    return torch.cat(there)


def own_bytes(ids: Tensor) -> int:
    return int((lengths_of(ids) * WIDTH * 4 + BESIDE_BYTES).sum())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RowStore]:
    with RowStore.create(tmp_path / "rows", TEXTS, NUM_ROWS) as made:
        yield made


def on_disk(store: RowStore) -> int:
    return store.path.stat().st_blocks * 512


def test_rows_take_their_own_length_and_are_read_back_bitwise(store: RowStore) -> None:
    ids = torch.from_numpy(np.random.default_rng(1).permutation(NUM_ROWS))
    write(store, ids)
    assert_served(store, torch.arange(NUM_ROWS))
    assert 0 <= store.num_bytes - own_bytes(ids) <= 0.1 * own_bytes(ids) + EXTENT_BYTES
    assert abs(on_disk(store) - store.num_bytes) <= 4096 * 4
    assert 3 * store.num_bytes < NUM_ROWS * TEXTS.row_bytes


def test_an_empty_store_takes_no_room_for_rows(store: RowStore) -> None:
    assert store.num_bytes == on_disk(store) < 40 * NUM_ROWS


def test_rows_in_memory_are_packed_too() -> None:
    ids = torch.arange(500)
    with RowStore.in_memory(TEXTS, NUM_ROWS) as store:
        write(store, ids)
        assert_served(store, ids)
        assert store.num_bytes <= own_bytes(ids) * 1.1 + EXTENT_BYTES + 40 * NUM_ROWS


def test_rows_without_an_entry_and_of_all_are_read_back(store: RowStore) -> None:
    ids, lengths = torch.arange(3), torch.tensor([0, MOST, 1])
    rows = rows_of(ids, lengths)
    store.write(ids, 1, rows, lengths)
    store.write(ids + 3, 1, rows)
    for first in (0, 3):
        read = store.read(ids + first, [1])
        assert read.depth.tolist() == [1, 1, 1]
        assert all(torch.equal(read.rows[name], row) for name, row in rows.items())


def test_several_fields_may_vary_in_any_order_beside_others() -> None:
    layout = RowLayout(
        (
            RowField("a", (7, 3), torch.float16, varies=True),
            RowField("flag", (5,), torch.bool),
            RowField("b", (7, 40), torch.float64, varies=True),
        )
    )
    ids, lengths = torch.arange(8), torch.arange(8)
    behind = torch.arange(7) >= lengths[:, None]
    rows = {
        "a": torch.rand(8, 7, 3).half().masked_fill(behind[..., None], 0),
        "flag": torch.rand(8, 5) > 0.5,
        "b": torch.rand(8, 7, 40).double().masked_fill(behind[..., None], 0),
    }
    with RowStore.in_memory(layout, 8) as store:
        store.write(ids, 1, rows, lengths)
        for pool in (None, RowPool(1)):
            read = store.read(ids, [1], pool=pool)
            assert read.depth.all()
            assert all(torch.equal(read.rows[name], row) for name, row in rows.items())


def test_a_row_that_fits_its_room_stays_there_and_a_longer_one_gets_another(
    store: RowStore,
) -> None:
    ids = torch.arange(200)
    write(store, ids, 1)
    rooms, taken = store._tags[:200, 3].copy(), store.num_bytes
    write(store, ids, 2, seed=1)  # Deeper rows of the same samples.
    assert (store._tags[:200, 3] == rooms).all() and store.num_bytes == taken
    assert_served(store, ids, 2, seed=1)
    longest = torch.full((200,), MOST)
    store.write(ids[:1], 3, rows_of(ids[:1], longest[:1]), longest[:1])
    moved = store._tags[:200, 3] != rooms
    assert moved.tolist() == [True] + [False] * 199
    assert store.read(ids[:1], [3]).depth.all()
    assert_served(store, ids[1:], 2, seed=1)
    shorter = torch.ones(1, dtype=torch.int64)
    store.write(ids[:1], 4, rows_of(ids[:1], shorter), shorter)
    write(store, ids[:1], 5)
    assert (store._tags[:200, 3] != rooms).sum() == 1
    assert_served(store, ids[:1], 5)


def work(path: Path, first: int, num: int, told: Connection) -> None:
    """Write every `num`-th row, and read what others write meanwhile."""
    ids, seen = torch.arange(first, NUM_ROWS, num), 0
    with RowStore.open(path, TEXTS, NUM_ROWS) as store:
        for some in ids.split(16):
            lengths = lengths_of(some)
            store.write(some, 1, rows_of(some, lengths), lengths)
            others = (some + 1) % NUM_ROWS
            seen += int(assert_right(store, others).sum())
        told.send(seen)


def test_processes_write_and_read_at_once(store: RowStore) -> None:
    num = 3
    pipes = [multiprocessing.Pipe() for _ in range(num)]
    workers = [
        another_process(work, store.path, first, num, pipe[1]) for first, pipe in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    try:
        for pipe in pipes:
            assert pipe[0].poll(60) and pipe[0].recv() >= 0
    finally:
        for worker in workers:
            worker.kill()
    ids = torch.arange(NUM_ROWS)
    assert_served(store, ids)
    assert store.num_bytes <= 1.1 * own_bytes(ids) + num * EXTENT_BYTES + 40 * NUM_ROWS


def drawn_rows(ids: Tensor, stamp: int, lengths: Tensor) -> dict[str, Tensor]:
    """Return rows by which it is known what was written: `y` is the length."""
    rows = rows_of(ids, lengths, seed=stamp + 7 * int(lengths[0]))
    return {**rows, "y": lengths.int()}


def write_others_rows(path: Path, seed: int, told: Connection) -> None:
    """Write few rows again and again, each time of another length; check all that is served."""
    rng, num_served = np.random.default_rng(seed), 0
    with RowStore.open(path, TEXTS, NUM_ROWS) as store:
        for _ in range(200):
            ids, stamp = torch.from_numpy(rng.integers(0, 6, size=1)), int(rng.integers(1, 3))
            if rng.random() < 0.5:
                lengths = torch.from_numpy(rng.integers(0, MOST + 1, size=1))
                store.write(ids, stamp, drawn_rows(ids, stamp, lengths), lengths)
            read = store.read(ids, [stamp], pool=RowPool(1) if rng.random() < 0.5 else None)
            if read.depth.all():
                wanted = drawn_rows(ids, stamp, read.rows["y"].long())
                assert all(torch.equal(read.rows[name], row) for name, row in wanted.items())
                num_served += 1
    told.send(num_served)


def test_a_row_that_processes_write_at_once_is_one_of_theirs_or_a_miss(store: RowStore) -> None:
    ours, theirs = multiprocessing.Pipe()
    workers = [another_process(write_others_rows, store.path, n, theirs) for n in range(3)]
    for worker in workers:
        worker.start()
    try:
        for _ in workers:
            assert ours.poll(60) and ours.recv() > 0
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def write_for_ever(path: Path, told: Connection) -> None:
    with RowStore.open(path, TEXTS, NUM_ROWS) as store:
        stamp = 2
        while True:
            write(store, torch.arange(100, 200), stamp)
            stamp += 1
            told.send(stamp)


def test_a_writer_that_is_killed_leaves_others_rows_and_a_file_to_use(store: RowStore) -> None:
    ids = torch.arange(100)
    write(store, ids)
    ours, theirs = multiprocessing.Pipe()
    for extra in range(3):
        child = another_process(write_for_ever, store.path, theirs)
        child.start()
        try:
            assert ours.poll(60)
            for _ in range(extra):
                ours.recv()
        finally:
            os.kill(child.pid or 0, signal.SIGKILL)
            child.join()
        assert_served(store, ids)
        more = torch.arange(200 + extra * 50, 250 + extra * 50)
        write(store, more)
        assert_served(store, more)
    for stamp in range(2, 40):
        assert_right(store, torch.arange(100, 200), stamp)


def hold_the_lock(path: Path, told: Connection) -> None:
    with RowStore.open(path, TEXTS, NUM_ROWS) as store:
        assert store._rooms is not None
        with store._rooms._locked():
            told.send(True)
            threading.Event().wait()


def test_a_process_that_dies_while_it_takes_room_keeps_nobody_out(store: RowStore) -> None:
    ours, theirs = multiprocessing.Pipe()
    child = another_process(hold_the_lock, store.path, theirs)
    child.start()
    try:
        assert ours.poll(60)
        thread = threading.Thread(target=write, args=(store, torch.arange(50)))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()  # It waits for the other process.
    finally:
        child.kill()
    thread.join(60)
    assert not thread.is_alive()
    assert_served(store, torch.arange(50))


def test_a_limit_of_files_bounds_what_rows_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, limit = resource.getrlimit(resource.RLIMIT_FSIZE), 2 * NUM_ROWS * TEXTS.expected_bytes
    longest = torch.full((NUM_ROWS,), MOST)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with RowStore.create(tmp_path / "rows", TEXTS, NUM_ROWS) as store:
            write(store, torch.arange(300))
            for some in torch.arange(300, NUM_ROWS).split(32):
                store.write(some, 1, rows_of(some, longest[some]), longest[some])
            assert_served(store, torch.arange(300))
            found = store.find(torch.arange(NUM_ROWS), [1]) > 0
            assert 300 < found.sum() < NUM_ROWS and on_disk(store) <= limit
            write(store, torch.arange(300), 2)  # Rows that have a room are still written.
            assert_served(store, torch.arange(300), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (message,) = caplog.messages
    assert "takes no more rows, as it is full" in message


def test_a_full_file_system_means_rows_that_are_not_kept_and_one_warning_of_all_processes(
    store: RowStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reserve, room = os.posix_fallocate, store.num_bytes + own_bytes(torch.arange(500))

    def reserve_within(descriptor: int, start: int, num_bytes: int) -> None:
        if start + num_bytes > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", reserve_within)
    with RowStore.open(store.path, TEXTS, NUM_ROWS) as other:
        write(store, torch.arange(600))
        write(other, torch.arange(600, NUM_ROWS))
        for one in (store, other):
            found = assert_right(one, torch.arange(NUM_ROWS))
            assert 450 < found.sum() < 550
    assert store.num_bytes <= room and on_disk(store) <= room + 4 * 4096
    (message,) = caplog.messages
    assert "No space left on device" in message and "cache_limit_bytes=" in message


def test_a_limit_bounds_what_rows_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit = own_bytes(torch.arange(500))
    path = tmp_path / "rows"
    with RowStore.create(path, TEXTS, NUM_ROWS, limit_bytes=limit) as store:
        empty = store.num_bytes
        write(store, torch.arange(NUM_ROWS))
        assert 450 < assert_right(store, torch.arange(NUM_ROWS)).sum() < 550
        assert limit - TEXTS.row_bytes <= store.num_bytes - empty <= limit
    (message,) = caplog.messages
    assert "it is full" in message


def test_a_file_system_without_room_for_the_expected_rows_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = NUM_ROWS * TEXTS.expected_bytes
    assert 0.9 < expected / own_bytes(torch.arange(NUM_ROWS)) < 1.1
    found = os.statvfs(tmp_path)

    class Little:
        f_bavail, f_frsize = (expected - 1) // found.f_frsize, found.f_frsize

    monkeypatch.setattr(os, "fstatvfs", lambda _: Little)
    with pytest.raises(OSError, match="No space left on device; .* cache fewer rows"):
        RowStore.create(tmp_path / "rows", TEXTS, NUM_ROWS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("word", [2, 3])
def test_a_damaged_length_or_room_is_a_counted_miss_wherever_it_leads(
    store: RowStore, word: int
) -> None:
    ids = torch.arange(40)
    write(store, ids)
    tag = store._tags[7].copy()
    for bit in range(64):
        if word == 3 and bit < 26:
            continue  # The room's size, which no reader asks for.
        store._tags[7] = tag
        store._tags[7, word] ^= np.uint64(1 << bit)
        read = store.read(ids, [1])
        if word == 2 and read.depth[7]:
            raise AssertionError(bit)
        assert read.num_corrupt == 1 and read.depth.tolist() == [1] * 7 + [0] + [1] * 32
    assert store.num_bytes == on_disk(store) or on_disk(store) <= store.num_bytes + 4096


def test_a_damaged_room_is_not_written_to_where_it_leads_behind_what_is_taken(
    store: RowStore,
) -> None:
    ids = torch.arange(40)
    write(store, ids)
    for bit in range(64):
        store._tags[7, 3] ^= np.uint64(1 << bit)
        write(store, ids[7:8])
        assert_served(store, ids[7:8])
        write(store, ids[~assert_right(store, ids)])
        assert_served(store, ids)
    assert on_disk(store) <= store.num_bytes + 4096


def test_a_row_of_zeros_is_a_miss_where_its_room_is_damaged() -> None:
    layout = RowLayout((RowField("hidden", (5, 4), torch.float32, varies=True),))
    ids = torch.zeros(1, dtype=torch.int64)
    with RowStore.in_memory(layout, 3) as store:
        store.write(ids, 1, {"hidden": torch.zeros(1, 5, 4)}, torch.tensor([0]))
        assert store.read(ids, [1]).depth.all()
        store._tags[0, 3] = 2**63
        assert not store.read(ids, [1]).depth.any()


def test_the_disk_is_asked_for_rows_that_are_there_alone(
    store: RowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(4)
    write(store, ids)
    store._tags[3, 3] = 2**64 - 1  # Damaged: it leads behind the file.
    asked: list[tuple[int, int]] = []

    class Mapping:
        def madvise(self, _: int, start: int, size: int) -> None:
            asked.append((start, start + size))

    monkeypatch.setattr(store, "_mapping", Mapping())
    store.expect(torch.arange(4))
    store.expect(ids[:0])
    assert len(asked) == 3 and all(0 <= start < end <= store.num_bytes for start, end in asked)


def test_rows_that_share_a_room_are_misses_until_they_have_one_each(store: RowStore) -> None:
    ids = torch.arange(100)
    write(store, ids)
    store._header[TAKEN] = 0  # As a machine's crash may leave it: it is behind rows' tags.
    with RowStore.open(store.path, TEXTS, NUM_ROWS) as later:
        write(later, ids + 100)
        for some in (ids, ids + 100, ids):
            found = assert_right(later, some)
            write(later, some[~found])
        assert_served(later, torch.arange(200))


def test_a_file_system_without_holes_is_asked_for_what_is_expected_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(descriptor: int, size: int) -> None:
        os.pwrite(descriptor, bytes(size), 0)

    monkeypatch.setattr(os, "ftruncate", fill)
    expected = NUM_ROWS * TEXTS.expected_bytes
    with RowStore.create(tmp_path / "rows", TEXTS, NUM_ROWS) as store:
        assert expected < store.path.stat().st_size < 1.05 * expected + 40 * NUM_ROWS
        write(store, torch.arange(NUM_ROWS))
        assert assert_right(store, torch.arange(NUM_ROWS)).float().mean() > 0.9


def test_rows_of_nothing_but_what_varies_may_have_no_entry() -> None:
    layout = RowLayout((RowField("hidden", (5, 3), torch.float16, varies=True),))
    ids, lengths = torch.arange(12), torch.arange(12) % 6
    rows = {"hidden": torch.rand(12, 5, 3).half()}
    rows["hidden"][torch.arange(5) >= lengths[:, None]] = 0
    with RowStore.in_memory(layout, 12) as store:
        for stamp in (1, 2):
            store.write(ids, stamp, rows, lengths)
            read = store.read(ids, [stamp])
            assert read.depth.all() and torch.equal(read.rows["hidden"], rows["hidden"])


def test_a_damaged_cursor_costs_rows_but_none_is_wrong(store: RowStore) -> None:
    ids = torch.arange(100)
    write(store, ids)
    for value in (0, 5, 1 << 40, 2**64 - 1):
        store._header[TAKEN] = value
        with RowStore.open(store.path, TEXTS, NUM_ROWS) as other:
            write(other, torch.arange(100, 200))
            assert_right(other, torch.arange(200))
    assert_right(store, torch.arange(NUM_ROWS))


def test_a_write_that_dies_half_way_leaves_misses_and_its_room(
    store: RowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(64)
    write(store, ids)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "copy_in", die)
        with pytest.raises(KeyboardInterrupt):
            write(store, ids[:32], 2)
    assert not store.read(ids[:32], [1, 2]).depth.any()
    assert_served(store, ids[32:])
    taken = store.num_bytes
    write(store, ids[:32], 2)
    assert_served(store, ids[:32], 2)
    assert store.num_bytes == taken


def test_a_file_that_was_cut_short_is_not_opened(store: RowStore) -> None:
    write(store, torch.arange(10))
    os.truncate(store.path, store.path.stat().st_size - 4096)
    with pytest.raises(ValueError, match="another layout"):
        RowStore.open(store.path, TEXTS, NUM_ROWS)


def test_the_expected_length_makes_no_other_layout() -> None:
    unknown = RowLayout(TEXTS.fields)
    assert unknown == TEXTS and repr(unknown) == repr(TEXTS)
    assert unknown.expected_bytes == unknown.row_bytes
    assert TEXTS.expected_bytes == 13 * WIDTH * 4 + BESIDE_BYTES


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with RowStore.create_nameless(tmp_path, TEXTS, NUM_ROWS) as store:
        with RowStore.open(store.path, TEXTS, NUM_ROWS) as other:
            write(other, torch.arange(5))
        store.unlink()
        write(store, torch.arange(5, 10))
        assert_served(store, torch.arange(10))
    del store, other
    assert os.listdir("/proc/self/fd") == before
