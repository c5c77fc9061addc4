"""Prove that each row has one place in one tier, and that tiers are one store to who uses them.

`test_store.any_store`, `test_device_store` and `test_gpu_waits` try tiers as any other store.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autocache import (
    ActivationStore,
    DeviceStore,
    RowField,
    RowLayout,
    RowStore,
    TieredStore,
    WriteBehind,
)
from autocache.row_pool import RowPool
from autocache.row_reader import reader_of
from tests.helpers.cached import CPU, LAYOUT, NUM_ROWS, assert_rows_equal, make_rows


def of_sizes(*sizes: int) -> TieredStore:
    return TieredStore({str(n): RowStore.in_memory(LAYOUT, num) for n, num in enumerate(sizes)})


@pytest.mark.parametrize("sizes", [(12,), (1, 11), (11, 1), (5, 7), (4, 3, 5), (1, 1, 10)])
def test_each_row_has_a_place_of_its_own_and_each_tier_is_spread_over_all(
    sizes: tuple[int, ...],
) -> None:
    store = of_sizes(*sizes)
    parts = store.parts(torch.arange(NUM_ROWS))
    assert [part.ids.tolist() for part in parts] == [list(range(size)) for size in sizes]
    positions = torch.cat([part.positions for part in parts])
    assert sorted(positions.tolist()) == list(range(NUM_ROWS))
    for number, size in enumerate(sizes):
        for half in (range(6), range(6, 12)):
            own = Counter(int(part.tier) for part in parts for p in part.positions if p in half)
            assert abs(own[number] - size / 2) <= 1.0
    store.close()


def test_ids_behind_the_last_row_miss_and_ids_below_the_first_are_refused() -> None:
    store = of_sizes(4, 3, 5)
    beyond = torch.arange(NUM_ROWS, 40)
    store.write(beyond, 3, make_rows(beyond))
    store.write(torch.arange(NUM_ROWS), 3, make_rows(torch.arange(NUM_ROWS)))
    assert not store.find(beyond, [3]).any() and not store.read(beyond, [3]).depth.any()
    assert not store.read(torch.arange(0), [3]).depth.any()
    for wrong in range(-30, 0):
        with pytest.raises(ValueError, match="give dataset indices"):
            store.find(torch.tensor([2, wrong]), [3])
    store.close()


def test_tiers_of_several_layouts_and_no_tiers_are_refused() -> None:
    other = RowStore.in_memory(RowLayout(LAYOUT.fields[:2]), 4)
    with pytest.raises(ValueError, match="give tiers of one layout"):
        TieredStore({"a": RowStore.in_memory(LAYOUT, 4), "b": other})
    with pytest.raises(ValueError, match="give tiers of one layout"):
        TieredStore({})


def test_a_field_is_computed_once_for_the_threads_of_all_tiers() -> None:
    store = TieredStore(
        {
            name: WriteBehind(RowStore.in_memory(LAYOUT, 6), device=CPU) for name in ("a", "b")
        }
    )  # fmt: skip
    ids, calls = torch.tensor([7, 2, 9, 4]), []
    rows = make_rows(ids)

    def give() -> Tensor:
        calls.append(1)
        return rows["y"]

    store.write(ids, 3, {**rows, "y": give})
    store.settle()
    assert_rows_equal(store.read(ids, [3]).rows, make_rows(ids))
    assert len(calls) == 1
    store.close()


@pytest.mark.parametrize("number", [0, 1])
def test_what_condemns_one_tier_in_another_process_condemns_all_here(
    tmp_path: Path, number: int
) -> None:
    def open_both(make: bool) -> TieredStore:
        files = {str(n): tmp_path / str(n) for n in range(2)}
        opened = RowStore.create if make else RowStore.open
        return TieredStore({name: opened(path, LAYOUT, 6) for name, path in files.items()})

    mine, theirs = open_both(True), open_both(False)
    ids = torch.arange(NUM_ROWS)
    mine.write(ids, 3, make_rows(ids))
    assert_rows_equal(theirs.read(ids, [3]).rows, make_rows(ids))
    assert theirs.tiers[number].condemn()
    assert mine.is_condemned() and not mine.find(ids, [3]).any()
    assert mine.condemn() is False
    for store in (theirs, mine):
        store.close()


def test_a_tier_that_cannot_be_closed_leaves_no_other_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = of_sizes(6, 6)

    def fail() -> None:
        raise OSError("no")

    monkeypatch.setattr(store.tiers[1], "close", fail)
    with pytest.raises(OSError, match="no"):
        store.close()
    with pytest.raises(ValueError, match="is closed"):
        store.tiers[0].find(torch.arange(2), [3])


@pytest.mark.parametrize("is_damaged", [False, True])
def test_rows_of_a_file_are_read_ahead_and_those_of_a_device_when_they_are_asked_for(
    tmp_path: Path, is_damaged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = RowStore.create(tmp_path / "rows", LAYOUT, 6)
    tiers: dict[str, ActivationStore] = {"cpu": DeviceStore(LAYOUT, 6, device=CPU), "file": file}
    store, all_ids = TieredStore(tiers), torch.arange(NUM_ROWS)
    store.write(all_ids, 3, make_rows(all_ids))
    if is_damaged:
        file._parts[0][1][2, 0] ^= 1
    reader = reader_of(store, device=CPU)
    for ids in (torch.tensor([7, 0, 11, 4, 5, 4]), torch.tensor([1, 3]), torch.tensor([0, 4])):
        for ahead in (ids, all_ids[:7], None):
            if ahead is not None:
                reader.read_ahead(ahead, (3,))
            read = reader.read(ids, (3,))
            lost = [int(is_damaged and one == 4) for one in ids.tolist()]
            assert read.depth.tolist() == [1 - one for one in lost]
            there = read.depth > 0
            rows = {name: row[there] for name, row in read.rows.items()}
            assert_rows_equal(rows, make_rows(ids[there]))
    assert len(caplog.messages) == is_damaged
    reader.close()
    store.close()


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("width", [3, 1 << 12])
def test_tiers_in_host_memory_are_read_into_one_place_without_a_copy(
    varies: bool, width: int
) -> None:
    fields = (RowField("hidden", (3, width), torch.float32, varies), *LAYOUT.fields[1:])
    layout, ids = RowLayout(fields), torch.arange(NUM_ROWS)
    store = TieredStore({str(num): RowStore.in_memory(layout, num) for num in (3, 4, 5)})
    written, lengths = make_rows(ids, layout), ids % 3 + 1
    if varies:
        written["hidden"][torch.arange(3) >= lengths[:, None]] = 0
    store.write(ids[:-2], 3, {n: row[:-2] for n, row in written.items()}, lengths[:-2])
    into, asked = store.buffers(NUM_ROWS + 1), torch.tensor([11, 3, 0, 7, 9, 7, 10, 40])
    into["hidden"].fill_(5)
    for pool in (None, RowPool(1)):
        read = store.read(asked, [3], out=into, pool=pool)
        assert read.depth.tolist() == [0, 1, 1, 1, 1, 1, 0, 0]
        there = read.depth > 0
        rows = {name: row[there] for name, row in read.rows.items()}
        assert_rows_equal(rows, {name: row[asked[there]] for name, row in written.items()})
        assert read.rows["hidden"].data_ptr() == into["hidden"].data_ptr() or width == 3
        assert (into["hidden"][: len(asked)][~there] == 5).all()
    store.close()
