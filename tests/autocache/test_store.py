"""Claims about the row store: what it returns, what it refuses, and what it leaves behind."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autocache import ActivationStore, DeviceStore, TieredStore
from autocache import store as store_module
from autocache.layout import RowField, RowLayout
from autocache.store import NamelessFilesError, RowStore
from tests.helpers.cached import CPU, LAYOUT, NUM_ROWS, assert_rows_equal, make_rows
from tests.helpers.pool import another_process

SHM = Path("/dev/shm")


LINUX_ONLY = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has files without a name"
)


def flip_a_bit(path: Path, at: int) -> None:
    with open(path, "rb+") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.fixture(params=["rows", pytest.param("", marks=LINUX_ONLY)], ids=["named", "nameless"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RowStore]:
    """Make a store in a file with a name, or without one, which every tmpfs can hold."""
    create = RowStore.create if request.param else RowStore.create_nameless
    with create(tmp_path / "rows" if request.param else SHM, LAYOUT, NUM_ROWS) as made:
        yield made


@pytest.fixture(params=["named", "nameless", "device", "tiers"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ActivationStore]:
    """Make a store in a file, on a device, which here is the host's memory, or in both."""
    if request.param == "device":
        made: ActivationStore = DeviceStore(LAYOUT, NUM_ROWS, device=CPU)
    elif request.param == "tiers":
        made = TieredStore(
            {
                "cpu": DeviceStore(LAYOUT, 5, device=CPU),
                str(tmp_path): RowStore.create(tmp_path / "rows", LAYOUT, NUM_ROWS - 5),
            }
        )
    elif request.param == "named":
        made = RowStore.create(tmp_path / "rows", LAYOUT, NUM_ROWS)
    elif sys.platform == "linux":
        made = RowStore.create_nameless(SHM, LAYOUT, NUM_ROWS)
    else:
        pytest.skip("only Linux has files without a name")
    yield made
    made.close()


def test_rows_written_are_read_back_bitwise_in_any_order_and_repeated(
    any_store: ActivationStore,
) -> None:
    ids = torch.tensor([7, 0, 11, 3])
    any_store.write(ids, 5, make_rows(ids))
    asked = torch.tensor([3, 11, 11, 7, 0])
    read = any_store.read(asked, [5])
    assert read.depth.tolist() == [1, 1, 1, 1, 1]
    assert_rows_equal(read.rows, make_rows(asked))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.uint8])
def test_every_dtype_is_read_back_bitwise(
    tmp_path: Path, dtype: torch.dtype, on_device: bool
) -> None:
    layout = RowLayout((RowField("hidden", (3, 3), dtype), *LAYOUT.fields[1:]))
    ids = torch.arange(4)
    store: ActivationStore = (
        DeviceStore(layout, 4, device=CPU)
        if on_device
        else RowStore.create(tmp_path / "rows", layout, 4)
    )
    store.write(ids, 1, make_rows(ids, layout))
    assert_rows_equal(store.read(ids, [1]).rows, make_rows(ids, layout))
    store.close()


def test_depth_tells_which_stamp_a_row_has_and_hits_survive_beside_misses(
    any_store: ActivationStore,
) -> None:
    store = any_store
    old, new = torch.tensor([1, 2]), torch.tensor([4])
    store.write(old, 100, make_rows(old))
    store.write(new, 2**64 - 1, make_rows(new))
    asked = torch.tensor([4, 9, 1, 2])
    read = store.read(asked, [100, 2**64 - 1])
    assert read.depth.tolist() == [2, 0, 1, 1]
    hit = read.depth > 0
    assert_rows_equal({k: v[hit] for k, v in read.rows.items()}, make_rows(asked[hit]))


def test_unknown_stamps_and_empty_rows_and_an_empty_batch_miss(any_store: ActivationStore) -> None:
    ids, store = torch.arange(3), any_store
    store.write(ids, 6, make_rows(ids))
    assert not store.read(ids, [5, 7]).depth.any()
    assert not store.read(ids, []).depth.any()
    assert not store.read(ids + 3, [6]).depth.any()
    empty = store.read(ids[:0], [6])
    assert empty.depth.shape == (0,)
    assert empty.rows["hidden"].shape == (0, 3, 5)


def test_a_rewritten_row_answers_to_its_new_stamp_only(any_store: ActivationStore) -> None:
    ids, store = torch.arange(3), any_store
    store.write(ids, 6, make_rows(ids))
    store.write(ids, 7, make_rows(ids + 20))
    assert not store.read(ids, [6]).depth.any()
    assert_rows_equal(store.read(ids, [7]).rows, make_rows(ids + 20))


def test_ids_beyond_the_capacity_are_not_stored_and_miss(any_store: ActivationStore) -> None:
    ids = torch.tensor([NUM_ROWS, 2, NUM_ROWS + 5, 0])
    any_store.write(ids, 3, make_rows(ids))
    read = any_store.read(ids, [3])
    assert read.depth.tolist() == [0, 1, 0, 1]
    assert_rows_equal({k: v[1::2] for k, v in read.rows.items()}, make_rows(ids[1::2]))


@pytest.mark.parametrize("name", ["hidden", "mask", "y"])
def test_one_flipped_byte_in_any_field_is_a_counted_miss(
    store: RowStore, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.arange(4)
    store.write(ids, 3, make_rows(ids))
    field = [field.name for field in LAYOUT.fields].index(name)
    rows_start = store.path.stat().st_size - NUM_ROWS * LAYOUT.row_bytes
    flip_a_bit(store.path, rows_start + 2 * LAYOUT.row_bytes + LAYOUT.offsets[field])
    with caplog.at_level(logging.WARNING):
        read = store.read(ids, [3])
        store.warn_of_damage(read)
    assert read.depth.tolist() == [1, 1, 0, 1]
    assert read.num_corrupt == 1
    assert "fail their check" in caplog.text
    intact = read.depth > 0
    assert_rows_equal({k: v[intact] for k, v in read.rows.items()}, make_rows(ids[intact]))


def test_a_write_that_dies_half_way_leaves_misses(
    store: RowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(4)
    store.write(ids, 3, make_rows(ids))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "copy_in", die)
        with pytest.raises(KeyboardInterrupt):
            store.write(ids[:2], 4, make_rows(ids[:2]))
    read = store.read(ids, [3, 4])
    assert read.depth.tolist() == [0, 0, 1, 1] and read.num_corrupt == 0


def test_a_row_overwritten_while_it_is_read_is_a_miss_but_no_damage(
    store: RowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(4)
    store.write(ids, 3, make_rows(ids))
    gather = store._gather

    def gather_then_lose_a_race(
        *arguments: Any, **settings: Any
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        result = gather(*arguments, **settings)
        store.write(ids[1:2], 4, make_rows(ids[1:2] + 20))
        return result

    monkeypatch.setattr(store, "_gather", gather_then_lose_a_race)
    read = store.read(ids, [3, 4])
    assert read.depth.tolist() == [1, 0, 1, 1] and read.num_corrupt == 0


def read_and_write(path: Path, results: Connection) -> None:
    with RowStore.open(path, LAYOUT, NUM_ROWS) as store:
        ids = torch.arange(5)
        read = store.read(ids, [3])
        equal = all(torch.equal(read.rows[k], v) for k, v in make_rows(ids).items())
        store.write(ids + 5, 4, make_rows(ids + 5))
        results.send((read.depth.tolist(), equal))


def test_two_processes_see_each_others_rows(store: RowStore) -> None:
    ids = torch.arange(5)
    store.write(ids, 3, make_rows(ids))
    results, theirs = multiprocessing.Pipe()
    child = another_process(read_and_write, store.path, theirs)
    child.start()
    try:
        assert results.poll(60) and results.recv() == ([1] * 5, True)
        child.join(timeout=60)
    finally:
        child.kill()
    read = store.read(ids + 5, [4])
    assert read.depth.tolist() == [1] * 5
    assert_rows_equal(read.rows, make_rows(ids + 5))


def test_the_file_is_gone_after_unlink_and_open_mappings_live_on(store: RowStore) -> None:
    ids = torch.arange(4)
    with RowStore.open(store.path, LAYOUT, NUM_ROWS) as other:
        store.unlink()
        assert not store.path.exists()
        store.write(ids, 3, make_rows(ids))
        assert_rows_equal(other.read(ids, [3]).rows, make_rows(ids))
    with pytest.raises(FileNotFoundError, match=str(store.path)):
        RowStore.open(store.path, LAYOUT, NUM_ROWS)


def test_the_creator_removes_its_file_on_exit_and_another_process_does_not(tmp_path: Path) -> None:
    with RowStore.create(tmp_path / "rows", LAYOUT, NUM_ROWS) as store:
        RowStore.open(store.path, LAYOUT, NUM_ROWS).close()
        assert store.path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_creator_that_unlinked_leaves_a_later_file_of_that_name_alone(tmp_path: Path) -> None:
    first = RowStore.create(tmp_path / "rows", LAYOUT, NUM_ROWS)
    first.unlink()
    with RowStore.create(tmp_path / "rows", LAYOUT, NUM_ROWS) as second:
        first.close()
        assert second.path.exists()


def test_create_refuses_a_file_that_exists_and_leaves_it_alone(store: RowStore) -> None:
    ids = torch.arange(4)
    store.write(ids, 3, make_rows(ids))
    with pytest.raises(FileExistsError, match=str(store.path)):
        RowStore.create(store.path, LAYOUT, NUM_ROWS)
    assert store.read(ids, [3]).depth.all()


def test_open_refuses_another_layout_even_of_the_same_size(store: RowStore) -> None:
    hidden, *others = LAYOUT.fields
    same_size = RowLayout((RowField("hidden", (3, 5), torch.int32), *others))
    larger = RowLayout((RowField("hidden", (30, 5), torch.float32), *others))
    assert same_size.row_bytes == LAYOUT.row_bytes < larger.row_bytes
    for layout, num_rows in ((same_size, NUM_ROWS), (larger, NUM_ROWS), (LAYOUT, NUM_ROWS + 1)):
        with pytest.raises(ValueError, match="another layout"):
            RowStore.open(store.path, layout, num_rows)


def test_too_little_space_is_an_error_at_create_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left on device; .* cache fewer rows") as caught:
        RowStore.create(tmp_path / "rows", LAYOUT, NUM_ROWS)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@LINUX_ONLY
def test_a_nameless_file_is_in_no_folder_and_gives_its_descriptor_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    descriptors = os.listdir("/proc/self/fd")
    with RowStore.create_nameless(SHM, LAYOUT, NUM_ROWS) as store:
        assert store.path.stat().st_nlink == 0
        with RowStore.open(store.path, LAYOUT, NUM_ROWS):
            store.unlink()
    del store
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division"):
        RowStore.create_nameless(SHM, LAYOUT, NUM_ROWS)
    assert os.listdir("/proc/self/fd") == descriptors


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR], ids=["fs", "kernel"])
def test_where_nameless_files_cannot_be_made_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(NamelessFilesError, match=os.strerror(number)):
        RowStore.create_nameless(tmp_path, LAYOUT, NUM_ROWS)


def test_rows_that_do_not_fit_the_layout_are_refused_before_anything_is_written(
    store: RowStore,
) -> None:
    ids = torch.arange(4)
    store.write(ids, 3, make_rows(ids))
    rows = make_rows(ids)
    wrong = [
        {**rows, "hidden": rows["hidden"][:, :2]},
        {**rows, "hidden": rows["hidden"].half()},
        {**rows, "hidden": rows["hidden"][:3]},
        {**rows, "extra": rows["y"]},
        {"hidden": rows["hidden"]},
    ]
    for given in wrong:
        with pytest.raises(ValueError, match="do not match the store"):
            store.write(ids, 4, given)
    assert store.read(ids, [3]).depth.all()


@pytest.mark.parametrize(
    "ids", [torch.tensor([-1]), torch.tensor([1.0]), torch.tensor(1), torch.tensor([1]).int()]
)
def test_ids_that_are_no_dataset_indices_are_refused(store: RowStore, ids: Tensor) -> None:
    with pytest.raises(ValueError, match="give dataset indices"):
        store.read(ids, [3])


@pytest.mark.parametrize("stamp", [0, -1, 2**64])
def test_a_stamp_out_of_range_is_refused(store: RowStore, stamp: int) -> None:
    ids = torch.arange(2)
    with pytest.raises(ValueError, match="out of range"):
        store.write(ids, stamp, make_rows(ids))
    with pytest.raises(ValueError, match="out of range"):
        store.read(ids, [stamp])


def test_bad_layouts_and_sizes_and_a_closed_store_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="each name once"):
        RowLayout((LAYOUT.fields[0], LAYOUT.fields[0]))
    with pytest.raises(ValueError, match="at least one"):
        RowLayout(())
    with pytest.raises(ValueError, match="at least 1"):
        RowStore.create(tmp_path / "rows", LAYOUT, 0)
    with RowStore.create(tmp_path / "rows", LAYOUT, 2) as store:
        pass
    with pytest.raises(ValueError, match="is closed"):
        store.read(torch.arange(2), [3])


def test_layout_aligns_every_field_to_64_bytes() -> None:
    assert LAYOUT.offsets == (0, 64, 128, 192)
    assert LAYOUT.row_bytes == 192


def test_a_store_in_memory_holds_rows_and_is_on_no_file_system() -> None:
    ids = torch.arange(NUM_ROWS)
    with RowStore.in_memory(LAYOUT, NUM_ROWS) as store:
        assert not store.path.exists()
        assert not store.read(ids, [7]).depth.any()
        store.write(ids, 7, make_rows(ids))
        found = store.read(ids, [7])
        assert found.depth.eq(1).all()
        for name, rows in make_rows(ids).items():
            assert torch.equal(found.rows[name], rows)
