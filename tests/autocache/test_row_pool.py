"""Prove that rows which several threads copy are those that one copies, and that none is left."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from autocache import row_pool
from autocache.layout import RowField, RowLayout
from autocache.row_content import HIDDEN
from autocache.row_pool import RowPool
from autocache.row_reader import RowReader
from autocache.store import RowStore
from tests.helpers.stand_in_gpu import CUDA, OnGpu, stand_in_gpu

NUM_ROWS, TOKENS, WIDTH = 11, 6, 40


@pytest.fixture(autouse=True)
def few_bytes_are_shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have small rows shared as large ones are; no thread may be left."""
    monkeypatch.setattr(row_pool, "_LEAST_BYTES", 1)
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def store_of(*, varies: bool, width: int = WIDTH) -> RowStore:
    """Return a store with all rows but the last two, and one damaged."""
    hidden = RowField(HIDDEN, (TOKENS, width), torch.bfloat16, varies)
    layout = RowLayout((hidden, RowField("y", (), torch.int64), RowField("m", (5,), torch.bool)))
    store, ids = RowStore.in_memory(layout, NUM_ROWS), torch.arange(NUM_ROWS - 2)
    values = torch.rand(len(ids), TOKENS, width).bfloat16()
    rows = {HIDDEN: values, "y": ids * 3, "m": torch.rand(len(ids), 5) > 0.5}
    store.write(ids, 1, rows, 1 + ids % TOKENS if varies else None)
    store._tags[4, 1] ^= 1
    return store


@pytest.mark.parametrize("varies", [False, True])
# Rows that are summed together, and piece by piece.
@pytest.mark.parametrize("width", [WIDTH, 1 << 16])
def test_several_threads_read_what_one_reads(varies: bool, width: int) -> None:
    asked = torch.tensor([8, 4, 0, 10, 3, 3, 7, 1])
    for num in (1, 2, 3, 4, 20):
        pool = RowPool(num)
        with store_of(varies=varies, width=width) as store:
            into = [store.buffers(len(asked)) for _ in range(2)]
            for buffers in into:
                buffers[HIDDEN].fill_(7)
            # The damage is found first, so that both find the same.
            assert store.read(asked[1:2], (1,)).num_corrupt == 1
            alone = store.read(asked, (1,), out=into[0])
            together = store.read(asked, (1,), out=into[1], pool=pool)
        pool.close()
        assert together.depth.tolist() == alone.depth.tolist() == [1, 0, 1, 0, 1, 1, 1, 1]
        there = alone.depth > 0
        for name, row in alone.rows.items():
            assert torch.equal(row[there], together.rows[name][there]), (num, name)
        assert (into[1][HIDDEN][~there] == 7).all()


def test_a_damaged_row_is_a_miss_whichever_thread_reads_it() -> None:
    for place in range(4):
        asked, pool = torch.tensor([0, 1, 2, 3]).roll(place), RowPool(4)
        with store_of(varies=False) as store:
            store._tags[2, 1] ^= 1
            read = store.read(asked, (1,), pool=pool)
        pool.close()
        assert read.depth.tolist() == [int(row != 2) for row in asked.tolist()]
        assert read.num_corrupt == 1


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_is_raised_once_all_threads_have_ended(failing: int) -> None:
    pool, ended, others = RowPool(4), list[int](), threading.Event()

    def work(part: slice) -> None:
        if part.start == failing:
            others.set()
            raise OSError("the disk is gone")
        assert others.wait(60)
        ended.append(part.start)

    with pytest.raises(OSError, match="the disk is gone"):
        pool.each(work, 4, num_bytes=4)
    assert sorted(ended) == [start for start in range(4) if start != failing]
    pool.close()


def test_a_thread_that_does_not_end_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_pool, "MOST_WAIT_S", 0.01)
    pool, answered = RowPool(2), threading.Event()

    def work(part: slice) -> None:
        assert part.start == 0 or answered.wait(60)

    with pytest.raises(TimeoutError, match=r"not read within .* choose another folder"):
        pool.each(work, 2, num_bytes=2)
    pool.close()  # Nor is it waited for here.
    (left,) = (one for one in threading.enumerate() if one.name.startswith("read-rows"))
    answered.set()
    left.join(60)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all cores of the machine count")
def test_beside_a_gpu_several_threads_read_and_on_cpus_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    names, shared = set[str](), RowPool.each
    asked = torch.arange(8)

    def each(pool: RowPool, work: object, num: int, *, num_bytes: int) -> None:
        def noted(part: slice) -> None:
            names.add(threading.current_thread().name.rpartition("_")[0])
            work(part)  # type: ignore[operator]

        shared(pool, noted, num, num_bytes=num_bytes)

    monkeypatch.setattr(RowPool, "each", each)
    with store_of(varies=False) as store, stand_in_gpu() as gpu:
        for device, wanted in ((CUDA, {"read-ahead", "read-rows"}), (torch.device("cpu"), None)):
            reader, plain = RowReader(store, device=device), store.read(asked, (1,)).rows[HIDDEN]
            names.clear()
            reader.read_ahead(asked, (1,))
            reader.forget()
            assert names == (wanted or {"read-ahead"})
            reader.read_ahead(asked, (1,))
            gpu.reset()
            read = reader.read(asked, (1,)).rows[HIDDEN]
            assert not gpu.waits
            found = read.host if isinstance(read, OnGpu) else read
            assert torch.equal(found[[0, 1, 2, 3, 5, 6, 7]], plain[[0, 1, 2, 3, 5, 6, 7]])
            reader.close()
