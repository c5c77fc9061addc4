"""Prove that no fetch waits for a GPU, and that what it gives is what a CPU gives.

On a stand-in for one: it counts what would wait, and runs everything on the host.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autocache import ActivationStore, DeviceStore, TieredStore
from autocache import row_reader as reader_module
from autocache.layout import RowField, RowLayout
from autocache.prefix_cache import PrefixCache
from autocache.row_content import HIDDEN, RowContent
from autocache.row_reader import RowReader
from autocache.store import RowStore
from autocache.write_behind import WriteBehind
from tests.helpers.cached import (
    KEEP,
    NUM_LAYERS,
    NUM_TOKENS,
    WIDTH,
    Prefix,
    Samples,
    assert_bitwise_equal,
    compute_uncached,
)
from tests.helpers.stand_in_gpu import CUDA, OnGpu, StandInGpu, put_on_gpu, stand_in_gpu

CONTENT = RowContent(KEEP)


SIZE = 4
"""Of a batch, and of a chunk."""


KINDS = ("host", "device", "tiers")


class OneGpu:
    """Hold a cache whose layers run on the stand-in."""

    def __init__(self, gpu: StandInGpu, kind: str) -> None:
        self.gpu, self.samples, self.alone = gpu, Samples(), Prefix()
        self.prefix = copy.deepcopy(self.alone)
        put_on_gpu(self.prefix)
        self.store = self._store(kind)
        self.cache = PrefixCache(
            self.prefix.run_layers,
            chunk_size=SIZE,
            store=self.store,
            stamps=self.alone.stamps(NUM_LAYERS),
            device=CUDA,
            content=CONTENT,
        )

    def _store(self, kind: str) -> ActivationStore:
        one = {name: entry[:1] for name, entry in self.samples.entries.items()}
        layout = CONTENT.layout(one, torch.empty(1, NUM_TOKENS, WIDTH))
        if kind == "device":
            return DeviceStore(layout, 20, device=CUDA)
        if kind == "tiers":
            file = WriteBehind(RowStore.in_memory(layout, 13), device=CUDA)
            return TieredStore({"cuda:0": DeviceStore(layout, 7, device=CUDA), "memory": file})
        return WriteBehind(RowStore.in_memory(layout, 20), device=CUDA)

    def fetch(
        self, ids: Tensor, depth: int, *, ahead: Tensor | None = None
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Fetch, and read ahead; return what would have waited and been launched meanwhile."""
        self.gpu.reset()
        found = self.cache.fetch(ids, self.samples.load, depth=depth)
        if ahead is not None:
            self.cache.read_ahead(ahead, depth=depth)
        waits, launches = dict(self.gpu.waits), dict(self.gpu.launches)
        hidden = found[HIDDEN]
        assert isinstance(hidden, OnGpu) and found["y"].device.type == "cpu"
        wanted = compute_uncached(self.alone, ids, depth, Samples())
        assert_bitwise_equal({**found, HIDDEN: hidden.host}, wanted)
        return waits, launches


@pytest.fixture(params=KINDS)
def one_gpu(request: pytest.FixtureRequest) -> Iterator[OneGpu]:
    with stand_in_gpu() as gpu:
        made = OneGpu(gpu, request.param)
        yield made
        made.cache.close()
        made.store.close()


def test_no_fetch_waits_whether_it_fills_upgrades_reads_or_all_of_that(one_gpu: OneGpu) -> None:
    first, second = torch.arange(SIZE), torch.arange(SIZE, 2 * SIZE)
    mixed = torch.tensor([9, 1, 9, 5])
    waits = [
        one_gpu.fetch(ids, depth, ahead=ahead)[0]
        for ids, depth, ahead in [
            (first, 1, None),
            (second, 1, first),
            (first, 1, None),
            (first, 3, mixed),
            (mixed, 3, None),
            (mixed, 3, mixed),
            (mixed, 3, None),
            (torch.tensor([22, 2]), 3, None),
        ]
    ]
    stats = one_gpu.cache.take_stats()
    assert stats.hits > 8 and stats.upgrades and stats.misses
    assert waits == [{}] * len(waits)


def test_a_warm_fetch_launches_a_copy_and_a_choice_of_rows_at_most(one_gpu: OneGpu) -> None:
    ids = torch.arange(SIZE)
    for ahead in (None, ids):
        one_gpu.fetch(ids, 2, ahead=ahead)
    _, launches = one_gpu.fetch(ids, 2)
    # Of two tiers each has these, and both are put into the batch's order by one index.
    assert sum(launches.values()) <= (6 if isinstance(one_gpu.store, TieredStore) else 2), launches


def test_a_full_chunk_is_sent_as_it_is_and_each_entry_once(one_gpu: OneGpu) -> None:
    _, launches = one_gpu.fetch(torch.arange(SIZE), 2)
    assert "index_select" not in launches and "cat" not in launches
    # A device's rows are written at their places, and those of a tier are chosen first.
    num_indices = {DeviceStore: 1, TieredStore: 3}.get(type(one_gpu.store), 0)
    assert launches["_to_copy"] == len(one_gpu.samples.entries) + num_indices


@pytest.mark.parametrize("one_gpu", ["host"], indirect=True)
def test_memory_is_read_into_again_only_once_its_rows_have_reached_the_gpu(
    one_gpu: OneGpu,
) -> None:
    ids = torch.arange(SIZE)
    one_gpu.fetch(ids, 1)
    reader = RowReader(one_gpu.store, device=CUDA)
    stamps = tuple(one_gpu.alone.stamps(1))
    noted: list[int] = []

    class Sent:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            noted.append(self.number)

    num_reads = 2 * reader_module._NUM_BUFFERS
    for number in range(num_reads):
        if number % 2:
            reader.read_ahead(ids, stamps)
        reader.read(ids, stamps)
        reader._buffers[-1].sent = Sent(number)  # type: ignore[assignment]
    assert noted == list(range(num_reads - reader_module._NUM_BUFFERS))
    reader.close()


META = torch.device("meta")


@pytest.mark.parametrize("stored", [False, True])
def test_what_goes_to_other_stages_beside_the_frozen_prefix_is_in_host_memory(
    stored: bool,
) -> None:
    # The cache gave targets and masks on the device, and they were sent from there, to a receive
    # in host memory: every pipeline of two stages with a frozen layer waited for ever.
    entries = {"x": torch.randn(6, 4), "mask": torch.ones(6, 4), "y": torch.arange(6)}
    content = RowContent(("mask", "y"))

    def load(ids: Tensor) -> dict[str, Tensor]:
        return {name: entry[ids] for name, entry in entries.items()}

    def run_layers(batch: dict[str, Tensor], first: int, last: int) -> Tensor:
        assert {entry.device for entry in batch.values()} == {META}
        return batch["x"] * 2

    store = None
    if stored:
        one = load(torch.tensor([0]))
        store = RowStore.in_memory(content.layout(one, one["x"]), 6)
        store.write(torch.arange(6), 1, full_rows(entries, store))
    cache = PrefixCache(
        run_layers, chunk_size=4, stamps=[1], store=store, device=META, content=content
    )
    rows = cache.fetch(torch.tensor([3, 1, 3, 5]), load, depth=1)
    assert rows["hidden"].device == META and rows["hidden"].shape == (4, 4)
    assert torch.equal(rows["y"], torch.tensor([3, 1, 3, 5]))
    assert rows["mask"].is_cpu and rows.keys() == {"hidden", "mask", "y"}


def full_rows(entries: dict[str, Tensor], store: RowStore) -> dict[str, Tensor]:
    """Make all rows of a store; digests that are never asked for."""
    rows = {"hidden": entries["x"], **entries, "digest": torch.zeros(6, dtype=torch.int64)}
    return {field.name: rows[field.name] for field in store.layout.fields}


def test_threads_that_read_and_write_rows_are_on_their_rank_s_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # They stayed on GPU 0, where each rank's first wait or copy built a context of some 500 MB.
    current, gpu = threading.local(), torch.device("cuda", 3)
    seen: list[int] = []
    layout = RowLayout((RowField("label", (), torch.int64), RowField(HIDDEN, (2,), torch.float32)))
    rows = {"label": torch.arange(4), HIDDEN: torch.rand(4, 2)}
    ids = torch.arange(4)

    def note(*_: Any, **__: Any) -> bool:
        seen.append(getattr(current, "index", 0))
        return True

    with stand_in_gpu():
        monkeypatch.setattr(
            torch.cuda, "set_device", lambda index: setattr(current, "index", index)
        )
        within = RowStore.in_memory(layout, 4)
        store, reader = WriteBehind(within, device=gpu), RowReader(within, device=gpu)
        store.holds(note)
        store.write(ids, 5, rows)
        store.settle()
        monkeypatch.setattr(RowReader, "_sent", lambda self, read, _: read if note() else None)
        reader.read_ahead(ids, (5,))
        reader.forget()
        reader.close()
        store.close()
    assert seen == [3, 3]
