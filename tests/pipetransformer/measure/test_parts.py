"""Prove what the parts of a measurement time, and that they leave out what they should."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autocache import PrefixCache, RowContent, RowLayout, RowStore
from autopipe.profile.chain import MeasuredChain
from autopipe.profile.profile import SublayerCost
from pipetransformer.feed.samples import Batch
from pipetransformer.measure import link_times, reading_times
from pipetransformer.measure import sublayer_times as compute_module
from pipetransformer.measure.measurements import first_sublayers
from pipetransformer.measure.reading_times import disk_byte_s, measure_rows, measure_samples
from pipetransformer.measure.sublayer_times import measure_company, time_alone
from pipetransformer.measure.timing import typical_s
from pipetransformer.processes.world import World

CPU, WRITTEN = torch.device("cpu"), "cache_write_bytes_per_s"


def test_links_are_timed_beside_as_many_sublayers_as_take_long_enough() -> None:
    costs = []
    for seconds in (9.0, 1.0, 2.0, 4.0, 8.0):
        cost = SublayerCost.__new__(SublayerCost)
        object.__setattr__(cost, "forward_s", (seconds, 100.0))
        costs.append(cost)
    span = range(1, 5)
    assert [first_sublayers(costs, span, s) for s in (0.5, 1.0, 3.5, 7.0, 99.0)] == [
        range(1, 2), range(1, 2), range(1, 4), range(1, 4), range(1, 5)
    ]  # fmt: skip


class Clock:
    """Stand for the time, which only passes where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def spend(self, seconds: float) -> None:
        self.now_s += seconds


def test_typical_seconds_are_the_median_without_warm_up_and_preparation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, seconds = Clock(monkeypatch), iter([50.0, 3.0, 1.0, 40.0, 2.0, 4.0])
    assert (
        typical_s(
            lambda: clock.spend(next(seconds)), repeats=5, before=lambda: clock.spend(1000.0)
        )
        == 3.0
    )


def test_reading_is_divided_into_the_call_and_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def read(ids: Tensor) -> Batch:
        clock.spend(5.0 + 2.0 * len(ids))
        return {}

    found = measure_samples(read, 8)
    assert found == {"fetch_s": pytest.approx(5.0), "read_s": pytest.approx(2.0)}
    assert measure_samples(read, 1) == {"fetch_s": pytest.approx(7.0), "read_s": 0.0}


def test_a_cached_row_costs_a_call_and_its_bytes() -> None:
    found = measure_rows("/dev/shm", CPU)
    assert 0.0 <= found["cached_fetch_s"] < 0.1
    assert all(1e6 < found[name] <= 1e12 for name in ("cache_bytes_per_s", WRITTEN))
    assert found["cache_device_bytes_per_s"] is None


def test_rows_are_written_where_none_were_and_read_in_the_way_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[Tensor] = []
    ahead: list[Tensor] = []

    def write(self: RowStore, ids: Tensor, *rows: Any, store: Any = RowStore.write) -> None:
        written.append(ids)
        store(self, ids, *rows)

    def read_ahead(self: PrefixCache, ids: Tensor, *, depth: int) -> None:
        ahead.append(ids)

    monkeypatch.setattr(RowStore, "write", write)
    monkeypatch.setattr(PrefixCache, "read_ahead", read_ahead)
    measure_rows("/dev/shm", CPU)
    assert not ahead
    ids = torch.cat(written)
    assert torch.equal(ids, torch.arange(reading_times._NUM_ROWS)) and len(written) > 1
    with RowStore.in_memory(RowLayout((reading_times._ROW,)), len(ids)) as store:
        reading_times._write_s(store, CPU)
        content = RowContent((), checked=False)
        cache = PrefixCache(
            reading_times._never, chunk_size=1, store=store, stamps=[1], device=CPU,
            content=content,
        )  # fmt: skip
        reading_times._fetch_s(cache, reads_ahead=True)
    assert ahead and {len(one) for one in ahead} == {reading_times._FETCHED}


def test_rows_in_a_device_s_memory_are_timed_by_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_times, "typical_s", lambda action, **_: float(action().nbytes))
    assert reading_times._select_s(CPU) == 1.0


@pytest.mark.cuda
def test_rows_are_read_written_and_selected_on_a_gpu() -> None:
    found = measure_rows("/dev/shm", torch.device("cuda"))
    assert 0.0 <= found["cached_fetch_s"] < 0.1
    assert 1e6 < found["cache_bytes_per_s"] < found["cache_device_bytes_per_s"] < 1e14
    assert 1e6 < found[WRITTEN] < 1e12


def test_a_row_on_a_disk_costs_what_the_disk_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(file: int, num_bytes: int, start: int) -> bytes:
        time.sleep(1e-3)
        return b""

    monkeypatch.setattr(os, "pread", slow)
    monkeypatch.setattr(reading_times, "_MEMORY", Path("/proc"))  # Even where /tmp is in memory.
    assert measure_rows(tmp_path, CPU)["cache_bytes_per_s"] < (1 << 16) / 1e-3
    assert disk_byte_s(tmp_path / "missing") == 0.0
    monkeypatch.setattr(reading_times, "_MEMORY", tmp_path)
    assert disk_byte_s(tmp_path) == 0.0


def chain(*rounds_s: float) -> MeasuredChain:
    """Make a chain of one sublayer at one size, 4 s by its medians."""
    cost = SublayerCost("only", 0, (1.0,), (1.0,), (1.0,), (1.0,), 0, 0, 0, 0, 0.0, 0.0)
    return MeasuredChain((cost,), (rounds_s,))


def world(rank: int, size: int, slots: int) -> World:
    return World(rank, size, slots, CPU, None, owned=False)


def test_what_a_rank_takes_alone_is_compared_with_the_slowest_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Slowest: 5, 4, 12. Rank 0 of the node alone, in two spans.
    answer = [[(4.0, 4.0, 12.0), [2.5, 1.0]], [(5.0, 4.0, 4.0), [None, None]]]
    monkeypatch.setattr(compute_module, "gather_json", lambda *_args, **_settings: answer)
    alone = measure_company(chain(4.0, 4.0, 12.0), [None, None], world(1, 2, 2))
    assert alone == pytest.approx(3.5 / 5.0)


@pytest.mark.parametrize(("size", "slots"), [(1, 1), (2, 1)])
def test_where_no_node_has_two_slots_none_computes_alone(
    monkeypatch: pytest.MonkeyPatch, size: int, slots: int
) -> None:
    answer = [[(4.0, 4.4, 4.0), [None]]] * size
    monkeypatch.setattr(compute_module, "gather_json", lambda *_args, **_settings: answer)
    own = chain(4.0, 4.4, 4.0)
    assert time_alone([], [], world=world(0, size, slots), repeats=3) is None
    assert measure_company(own, [None], world(0, size, slots)) == 1.0


def test_links_and_sums_keep_the_quartiles_of_their_repeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repeats = [8.0, 2.0, 4.0, 5.0, 3.0]
    monkeypatch.setattr(link_times, "repeats_s", lambda *_, **__: repeats)
    monkeypatch.setattr(link_times, "typical_s", lambda *_, **__: 0.0)
    link = link_times._measure_link(world(0, 2, 2), 1, lambda: None, 0.0)
    assert (link.latency_s, link.spread) == (2.0, (0.75, 1.25))
    monkeypatch.setattr(link_times, "_sums_s", lambda *_: repeats)
    monkeypatch.setattr(link_times, "_stage_group", lambda *_: nullcontext())
    (cost,) = link_times.measure_sums(world(0, 2, 2), 1 << 20, timeout_s=1.0)
    assert (set(cost.seconds), cost.spread) == ({4.0}, (0.75, 1.25))
