"""Prove that rows read ahead are those read on the spot, and that nothing stale is ever served."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator

import pytest
import torch

from autocache.layout import RowField, RowLayout
from autocache.row_content import HIDDEN
from autocache.row_pool import RowPool
from autocache.row_reader import RowReader
from autocache.store import RowStore

NUM_ROWS, WIDTH = 12, 1 << 16
LAYOUT = RowLayout((RowField(HIDDEN, (WIDTH,), torch.float32), RowField("y", (), torch.int64)))


def rows(ids: torch.Tensor, shift: int = 0) -> dict[str, torch.Tensor]:
    return {HIDDEN: (ids[:, None] + torch.arange(WIDTH)).float() + shift, "y": ids * 3 + shift}


@pytest.fixture
def store() -> Iterator[RowStore]:
    with RowStore.in_memory(LAYOUT, NUM_ROWS) as made:
        made.write(torch.arange(8), 1, rows(torch.arange(8)))
        yield made


@pytest.fixture
def reader(store: RowStore) -> Iterator[RowReader]:
    made = RowReader(store, device=torch.device("cpu"))
    yield made
    made.close()


def check(reader: RowReader, ids: torch.Tensor, stamps: tuple[int, ...] = (1,)) -> None:
    read = reader.read(ids, stamps)
    assert read.depth.tolist() == [int(one < 8) for one in ids.tolist()]
    hits = read.depth > 0
    for name, expected in rows(ids[hits]).items():
        assert torch.equal(read.rows[name][hits], expected), name


@pytest.mark.parametrize("ahead", [True, False])
def test_rows_are_the_same_whether_they_were_read_ahead(reader: RowReader, ahead: bool) -> None:
    for ids in (torch.tensor([3, 9, 0]), torch.tensor([7, 7]), torch.arange(12)):
        if ahead:
            reader.read_ahead(ids, (1,))
        check(reader, ids)


def test_a_background_read_copies_its_rows_and_not_the_file(store: RowStore) -> None:
    ids, rows_bytes = torch.tensor([3, 0]), 2 * WIDTH * 4
    into = store.buffers(len(ids))
    tracemalloc.start()
    try:
        store.read(ids, (1,), out=into, pool=RowPool(1))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * rows_bytes < NUM_ROWS * WIDTH * 4


def test_rows_that_were_read_ahead_for_another_step_or_depth_are_dropped(
    reader: RowReader, store: RowStore
) -> None:
    reader.read_ahead(torch.tensor([1, 2]), (1,))
    check(reader, torch.tensor([2, 1]))
    reader.read_ahead(torch.tensor([1, 2]), (1,))
    store.write(torch.arange(8), 5, rows(torch.arange(8)))
    check(reader, torch.tensor([1, 2]), stamps=(5,))


def test_rows_of_a_store_condemned_meanwhile_are_misses(
    reader: RowReader, store: RowStore
) -> None:
    reader.read_ahead(torch.tensor([1, 2]), (1,))
    store.condemn()
    assert reader.read(torch.tensor([1, 2]), (1,)).depth.tolist() == [0, 0]


def test_rows_stay_as_they_are_until_the_read_after_the_next(reader: RowReader) -> None:
    first = reader.read(torch.tensor([0, 1]), (1,)).rows[HIDDEN]
    kept = first.clone()
    reader.read_ahead(torch.tensor([2, 3]), (1,))
    check(reader, torch.tensor([2, 3]))
    reader.read_ahead(torch.tensor([4, 5]), (1,))
    assert torch.equal(first, kept)


def test_what_is_read_ahead_in_vain_takes_no_memory_of_rows_in_use(reader: RowReader) -> None:
    first = reader.read(torch.tensor([0, 1]), (1,)).rows[HIDDEN]
    kept = first.clone()
    for other in ([2, 3], [4, 5]):
        reader.read_ahead(torch.tensor(other), (1,))
    check(reader, torch.tensor([6, 7]))
    reader.read_ahead(torch.tensor([0, 9]), (1,))
    reader.forget()
    reader.read_ahead(torch.tensor([2, 3]), (1,))
    check(reader, torch.tensor([2, 3]))
    assert torch.equal(first, kept)


def test_of_damage_a_warning_tells_once_where_rows_were_read_ahead_too(
    reader: RowReader, store: RowStore, caplog: pytest.LogCaptureFixture
) -> None:
    store._tags[3, 1] ^= 1
    for _ in range(2):
        reader.read_ahead(torch.tensor([3, 0]), (1,))
        assert reader.read(torch.tensor([3, 0]), (1,)).depth.tolist() == [0, 1]
    assert caplog.text.count("fail their check") == 1


@pytest.mark.parametrize("ahead", [True, False])
def test_activations_alone_go_to_the_device(store: RowStore, ahead: bool) -> None:
    reader, ids = RowReader(store, device=torch.device("meta")), torch.tensor([1, 2])
    if ahead:
        reader.read_ahead(ids, (1,))
    found = reader.read(ids, (1,)).rows
    assert {name: row.device.type for name, row in found.items()} == {HIDDEN: "meta", "y": "cpu"}
    assert torch.equal(found["y"], rows(ids)["y"])
    reader.close()


def test_a_closed_reader_leaves_no_thread(store: RowStore) -> None:
    before = threading.active_count()
    reader = RowReader(store, device=torch.device("cpu"))
    reader.read_ahead(torch.tensor([1]), (1,))
    reader.close()
    assert threading.active_count() == before


def test_a_row_s_length_is_part_of_what_is_checked() -> None:
    layout = RowLayout((RowField(HIDDEN, (4, 2), torch.float32, varies=True),))
    with RowStore.in_memory(layout, 3) as store:
        values = torch.arange(1.0, 25.0).view(3, 4, 2)
        store.write(torch.arange(3), 1, {HIDDEN: values}, torch.tensor([4, 1, 2]))
        read = store.read(torch.arange(3), [1])
        for row, wanted, length in zip(read.rows[HIDDEN], values, (4, 1, 2), strict=True):
            assert torch.equal(row[:length], wanted[:length]) and not row[length:].any()
        store._tags[1, 2] = 2
        read = store.read(torch.arange(3), [1])
        assert read.depth.tolist() == [1, 0, 1] and read.num_corrupt == 1
