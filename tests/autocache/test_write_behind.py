"""Prove that nobody can tell whether rows are written at once or behind the step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autocache import ActivationStore
from autocache.layout import RowField, RowLayout
from autocache.prefix_cache import PrefixCache
from autocache.row_content import HIDDEN, RowContent
from autocache.row_pool import RowPool
from autocache.store import RowStore
from autocache.write_behind import WriteBehind
from tests.helpers.cached import (
    CHUNK_SIZE,
    CPU,
    KEEP,
    NUM_LAYERS,
    NUM_SAMPLES,
    NUM_TOKENS,
    WIDTH,
    Prefix,
    Samples,
    assert_bitwise_equal,
    compute_uncached,
    pair,
    random_batches,
)

LAYOUT = RowLayout((RowField(HIDDEN, (3,), torch.float32), RowField("y", (), torch.int64)))
CONTENT = RowContent(KEEP)
LIMIT_S = 60.0


def rows(ids: Tensor, shift: int = 0) -> dict[str, Tensor]:
    return {HIDDEN: (ids[:, None] + torch.arange(3)).float() + shift, "y": ids * 3 + shift}


class Held:
    """Hold the thread's writes back, until `release`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._open, self.written = threading.Event(), list[list[int]]()
        write = RowStore.write

        def held(store: RowStore, ids: Tensor, *given: Any, **further: Any) -> None:
            assert self._open.wait(LIMIT_S), "nobody let the write go on"
            write(store, ids, *given, **further)
            self.written.append(ids.tolist())

        patch.setattr(RowStore, "write", held)

    def release(self) -> None:
        self._open.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.release()


@pytest.fixture
def behind(held: Held) -> Iterator[WriteBehind]:
    made = WriteBehind(RowStore.in_memory(LAYOUT, 12), device=CPU)
    yield made
    held.release()
    made.close()


def test_rows_that_wait_are_found_under_their_stamp_and_no_other(
    behind: WriteBehind, held: Held
) -> None:
    ids = torch.arange(4)
    behind.write(ids[:3], 5, rows(ids[:3]))
    assert behind.find(ids, [5]).tolist() == [1, 1, 1, 0]
    behind.write(ids[1:2], 7, rows(ids[1:2]))
    assert behind.find(ids, [5]).tolist() == [1, 0, 1, 0]
    assert behind.find(ids, [5, 7]).tolist() == [1, 2, 1, 0]
    assert not held.written
    held.release()
    behind.settle()
    assert behind.find(ids, [5, 7]).tolist() == [1, 2, 1, 0]


def test_ids_without_a_row_are_not_found_while_others_wait(behind: WriteBehind) -> None:
    ids = torch.tensor([2, 12, 40])
    behind.write(ids, 5, rows(ids))
    assert behind.find(ids, [5]).tolist() == [1, 0, 0]


def test_a_read_waits_for_the_rows_that_it_asks_for(behind: WriteBehind, held: Held) -> None:
    ids = torch.tensor([3, 1])
    behind.write(ids, 5, rows(ids))
    begun, found = threading.Event(), []

    def read() -> None:
        begun.set()
        found.append(behind.read(ids, [5], pool=RowPool(1)))

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(LIMIT_S)
    held.release()
    reader.join(LIMIT_S)
    (read_rows,) = found
    assert read_rows.depth.tolist() == [1, 1]
    for name, wanted in rows(ids).items():
        assert torch.equal(read_rows.rows[name], wanted), name


def test_a_read_of_other_rows_waits_for_none(behind: WriteBehind, held: Held) -> None:
    behind.write(torch.tensor([3]), 5, rows(torch.tensor([3])))
    assert behind.read(torch.tensor([4]), [5]).depth.tolist() == [0]
    assert not held.written


def test_two_writes_wait_at_most(behind: WriteBehind, held: Held) -> None:
    for one in range(2):
        behind.write(torch.tensor([one]), 5, rows(torch.tensor([one])))
    assert not held.written
    helper = threading.Thread(target=held.release)
    helper.start()
    behind.write(torch.tensor([2]), 5, rows(torch.tensor([2])))
    assert held.written[:1] == [[0]]
    helper.join(LIMIT_S)


def test_what_is_written_is_what_was_given_whatever_becomes_of_its_memory(
    behind: WriteBehind, held: Held
) -> None:
    ids = torch.tensor([3, 1])
    given = rows(ids)
    behind.write(ids, 5, given)
    for row in given.values():
        row.zero_()
    held.release()
    found = behind.read(ids, [5]).rows
    for name, wanted in rows(ids).items():
        assert torch.equal(found[name], wanted), name


def test_what_fails_in_the_background_is_raised_once_by_the_next_call(
    behind: WriteBehind, held: Held
) -> None:
    ids = torch.tensor([3, 1])
    behind.write(ids, 5, {HIDDEN: rows(ids)[HIDDEN]})
    held.release()
    with pytest.raises(ValueError, match="do not match the store"):
        behind.read(ids, [5])
    with pytest.raises(ValueError, match="do not match the store"):
        behind.find(ids, [5])
    assert behind.find(ids, [5]).tolist() == [0, 0]


def test_rows_that_wait_are_of_no_use_in_a_condemned_store(
    behind: WriteBehind, held: Held
) -> None:
    ids = torch.tensor([3, 1])
    behind.write(ids, 5, rows(ids))
    assert behind.condemn() and not behind.condemn()
    assert behind.find(ids, [5]).tolist() == [0, 0]
    held.release()
    assert behind.read(ids, [5]).depth.tolist() == [0, 0]


def test_a_failed_check_is_known_as_soon_as_anybody_asks(behind: WriteBehind) -> None:
    goes_on = threading.Event()

    def check() -> bool:
        assert goes_on.wait(LIMIT_S)
        return not behind.condemn()

    assert behind.holds(check), "nothing is known yet"
    helper = threading.Thread(target=goes_on.set)
    helper.start()
    assert behind.is_condemned()
    helper.join(LIMIT_S)


def test_others_see_rows_that_are_settled_and_a_closed_store_leaves_no_thread(
    tmp_path: Path,
) -> None:
    before, ids = threading.active_count(), torch.arange(5)
    store = RowStore.create(tmp_path / "rows", LAYOUT, 12)
    behind = WriteBehind(store, device=CPU)
    behind.write(ids, 5, rows(ids))
    behind.settle()
    with RowStore.open(store.path, LAYOUT, 12) as other:
        assert other.read(ids, [5]).depth.tolist() == [1] * 5
        behind.write(ids + 5, 5, rows(ids + 5))
        behind.close()
        assert other.read(ids + 5, [5]).depth.tolist() == [1] * 5
    assert threading.active_count() == before


def test_cleared_rows_are_found_under_no_stamp(behind: WriteBehind, held: Held) -> None:
    ids = torch.arange(4)
    behind.write(ids, 5, rows(ids))
    held.release()
    behind.clear(torch.tensor([1, 3, 12]))
    assert behind.find(ids, [5]).tolist() == [1, 0, 1, 0]


def make_cache(
    prefix: Prefix, store: ActivationStore, *, checks_every: bool = False
) -> PrefixCache:
    return PrefixCache(
        prefix.run_layers,
        chunk_size=CHUNK_SIZE,
        store=store,
        stamps=prefix.stamps(NUM_LAYERS),
        device=CPU,
        content=replace(CONTENT, checks_every=checks_every),
    )


def in_memory(samples: Samples, num_rows: int) -> RowStore:
    one = {name: entry[:1] for name, entry in samples.entries.items()}
    layout = CONTENT.layout(one, torch.empty(1, NUM_TOKENS, WIDTH))
    return RowStore.in_memory(layout, num_rows)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reads_ahead", [False, True])
def test_fetches_give_the_same_and_count_the_same_as_with_rows_that_are_written_at_once(
    seed: int, reads_ahead: bool
) -> None:
    prefix, samples, plain = Prefix(seed), Samples(), Samples()
    at_once = in_memory(plain, NUM_SAMPLES - 5)
    behind = WriteBehind(in_memory(samples, NUM_SAMPLES - 5), device=CPU)
    cache, wanted = make_cache(prefix, behind), make_cache(prefix, at_once)
    for step, ids in enumerate(random_batches(seed, 20)):
        depth = 1 + step * NUM_LAYERS // 20
        later = pair((ids + 7) % NUM_SAMPLES)
        if reads_ahead:
            cache.read_ahead(ids, depth=depth)
        found = cache.fetch(ids, samples.load, depth=depth, later=later)
        assert_bitwise_equal(found, compute_uncached(prefix, ids, depth, samples))
        wanted.fetch(ids, plain.load, depth=depth, later=later)
        mine, theirs = cache.take_stats(), wanted.take_stats()
        assert (mine.hits, mine.upgrades) == (theirs.hits, theirs.upgrades)
    cache.close()
    every, stamps = torch.arange(NUM_SAMPLES), prefix.stamps(NUM_LAYERS)
    assert torch.equal(behind.find(every, stamps), at_once.find(every, stamps))
    for name, row in at_once.read(every, stamps).rows.items():
        there = at_once.find(every, stamps) > 0
        assert torch.equal(behind.read(every, stamps).rows[name][there], row[there]), name
    behind.close()


def test_what_is_foreseen_counts_rows_that_wait(held: Held) -> None:
    prefix, samples = Prefix(), Samples()
    behind = WriteBehind(in_memory(samples, NUM_SAMPLES), device=CPU)
    cache = make_cache(prefix, behind)
    cache.fetch(torch.arange(4), samples.load, depth=2)
    coming = [(pair([2, 3]), pair([])), (pair([3, 9]), pair([]))]
    assert not held.written
    loads = [(ids.tolist(), writes) for ids, writes in cache.foresee(coming, depth=2)]
    # Neither of these hits is one of those that are checked.
    assert loads == [([], False), ([9], True)]
    held.release()
    behind.close()


def test_a_sample_that_differs_is_used_by_one_fetch_and_the_next_starts_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefix, samples = Prefix(), Samples()
    behind = WriteBehind(in_memory(samples, NUM_SAMPLES), device=CPU)
    cache, ids = make_cache(prefix, behind, checks_every=True), torch.arange(8)
    old = cache.fetch(ids, samples.load, depth=2)
    samples.entries["pixels"][3] += 1
    assert_bitwise_equal(cache.fetch(ids, samples.load, depth=2), old)
    for _ in range(2):
        found = cache.fetch(ids, samples.load, depth=2)
        assert_bitwise_equal(found, compute_uncached(prefix, ids, 2, samples))
    assert caplog.text.count("gives another sample 3 than") == 1
    behind.close()
