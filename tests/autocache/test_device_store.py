"""Prove that rows on a device are read, refused and lost as those in a file are.

The device is the host's memory; see test_gpu_waits for one that is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autocache import ActivationStore, DeviceStore, TieredStore, device_bytes
from autocache.layout import RowField, RowLayout
from autocache.prefix_cache import PrefixCache
from autocache.row_content import HIDDEN, Positions, RowContent
from autocache.store import RowStore
from tests.helpers.cached import (
    CHUNK_SIZE,
    CPU,
    KEEP,
    LAYOUT,
    NUM_LAYERS,
    NUM_ROWS,
    NUM_SAMPLES,
    NUM_TOKENS,
    WIDTH,
    Prefix,
    Samples,
    assert_rows_equal,
    make_rows,
    random_batches,
)
from tests.helpers.marks import slow


@pytest.fixture
def store() -> Iterator[DeviceStore]:
    made = DeviceStore(LAYOUT, NUM_ROWS, device=CPU)
    yield made
    made.close()


def test_a_write_that_dies_half_way_leaves_misses(
    store: DeviceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(4)
    store.write(ids, 3, make_rows(ids))

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for owner, name in ((Tensor, "index_copy_"), (RowStore, "write")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, die)
            with pytest.raises(KeyboardInterrupt):
                store.write(ids[:2], 4, make_rows(ids[:2]))
        assert store.read(ids, [3, 4]).depth.tolist() == [0, 0, 1, 1]
        store.write(ids[:2], 3, make_rows(ids[:2]))


def test_of_more_rows_than_slots_those_that_are_written_first_are_kept() -> None:
    store = DeviceStore(LAYOUT, NUM_ROWS, device=CPU, num_slots=3)
    ids, later = torch.tensor([7, 0, NUM_ROWS, 4]), torch.tensor([5, 4])
    store.write(ids, 3, make_rows(ids))
    assert store.find(ids, [3]).tolist() == [1, 1, 0, 1] and store.is_writable
    # A row is written where it lies, also beside one that has no place.
    store.write(later, 4, make_rows(later))
    assert not store.is_writable
    store.write(ids[:1], 4, make_rows(ids[:1]))
    asked = torch.tensor([4, 5, 0, 7])
    read = store.read(asked, [3, 4])
    assert read.depth.tolist() == store.find(asked, [3, 4]).tolist() == [2, 0, 1, 2]
    found = read.depth > 0
    mine = {name: row[found] for name, row in read.rows.items()}
    assert_rows_equal(mine, make_rows(asked[found]))
    assert store._hidden.nbytes == device_bytes(LAYOUT, 3)
    store.close()


def test_a_damaged_part_in_host_memory_is_a_counted_miss(store: DeviceStore) -> None:
    ids = torch.arange(4)
    store.write(ids, 3, make_rows(ids))
    rest: Any = store._within
    rest._parts[0][1][2, 0] ^= 1
    read = store.read(ids, [3])
    assert read.depth.tolist() == [1, 1, 0, 1] and read.num_corrupt == 1


def test_rows_that_do_not_fit_the_layout_are_refused_before_anything_is_written(
    store: DeviceStore,
) -> None:
    ids = torch.arange(4)
    store.write(ids, 3, make_rows(ids))
    rows = make_rows(ids)
    for given in (
        {**rows, HIDDEN: rows[HIDDEN][:, :2]},
        {**rows, HIDDEN: rows[HIDDEN].half()},
        {name: row for name, row in rows.items() if name != HIDDEN},
    ):
        with pytest.raises(ValueError, match="do not match the store"):
            store.write(ids, 4, given)
    assert store.read(ids, [3]).depth.all()


def test_layouts_without_activations_or_with_them_alone_are_refused() -> None:
    for fields in (LAYOUT.fields[:1], LAYOUT.fields[1:]):
        with pytest.raises(ValueError, match="and at least one other"):
            DeviceStore(RowLayout(fields), 4, device=CPU)


def test_a_closed_store_has_given_its_memory_back_and_refuses_to_read(store: DeviceStore) -> None:
    assert store._hidden.nbytes == device_bytes(LAYOUT, NUM_ROWS) < store.num_bytes
    store.close()
    assert store._hidden.nbytes == 0
    with pytest.raises(ValueError, match="is closed"):
        store.read(torch.arange(2), [3])


def test_rows_of_a_condemned_store_are_neither_found_nor_read(store: DeviceStore) -> None:
    ids = torch.arange(4)
    store.write(ids, 3, make_rows(ids))
    assert store.condemn() and store.is_condemned()
    store.write(ids, 4, make_rows(ids))
    assert not store.find(ids, [3, 4]).any() and not store.read(ids, [3, 4]).depth.any()


def test_what_is_behind_a_row_s_length_reads_as_zeros() -> None:
    layout = RowLayout((RowField(HIDDEN, (4, 2), torch.float32, varies=True), LAYOUT.fields[2]))
    lengths, values = torch.tensor([4, 1, 2]), torch.full((3, 4, 2), torch.nan)
    for row, length in zip(values, lengths.tolist(), strict=True):
        row[:length] = torch.arange(2.0 * length).view(length, 2)
    both: list[ActivationStore] = [
        DeviceStore(layout, 3, device=CPU), RowStore.in_memory(layout, 3)
    ]  # fmt: skip
    ids = torch.arange(3)
    for store in both:
        store.write(ids, 1, {HIDDEN: values, "y": ids}, lengths)
    mine, theirs = (store.read(ids, [1]).rows for store in both)
    assert_rows_equal(mine, theirs)


def as_rows(samples: Samples, content: RowContent, place: str) -> ActivationStore:
    one = {name: entry[:1] for name, entry in samples.entries.items()}
    layout = content.layout(one, torch.empty(1, NUM_TOKENS, WIDTH))
    num_on_device = {"device": NUM_SAMPLES - 5, "tiers": 8, "memory": 0}[place]
    num_in_memory = NUM_SAMPLES - 5 - num_on_device
    tiers: dict[str, ActivationStore] = {}
    if num_on_device:
        tiers["device"] = DeviceStore(layout, num_on_device, device=CPU)
    if num_in_memory:
        tiers["memory"] = RowStore.in_memory(layout, num_in_memory)
    return TieredStore(tiers) if len(tiers) > 1 else tiers[place]


WITH_LENGTHS = Positions("mask", (HIDDEN, "pixels", "mask"), most=NUM_TOKENS)


@pytest.mark.parametrize(
    "content",
    [
        RowContent(KEEP),
        RowContent(KEEP, dtype=torch.bfloat16, computed_dtype=torch.float32),
        RowContent(KEEP, padding_mask="mask", positions=WITH_LENGTHS),
        RowContent(KEEP, torch.int8, torch.float32, padding_mask="mask", positions=WITH_LENGTHS),
    ],
    ids=["as computed", "rounded", "unequal lengths", "int8 of unequal lengths"],
)
@pytest.mark.parametrize("seed", [0, slow(1)])
@pytest.mark.parametrize("place", ["device", "tiers"])
def test_fetches_through_freezes_and_thaws_are_those_of_a_store_in_host_memory(
    content: RowContent, seed: int, place: str
) -> None:
    found: list[list[dict[str, Tensor]]] = []
    counts, asked = [], []
    for where in (place, "memory"):
        prefix, samples = Prefix(seed), Samples()
        if content.positions is not None:
            # Here a mask's zeros are padding, which no layer looks at.
            samples.entries["mask"] = ~samples.entries["mask"]
            run = prefix.run_layers

            def run_layers(
                batch: dict[str, Tensor], first: int, last: int, run: Any = run
            ) -> Tensor:
                return run({**batch, "mask": ~batch["mask"]}, first, last)
        else:
            run_layers = prefix.run_layers
        store = as_rows(samples, content, where)
        stamps = prefix.stamps(NUM_LAYERS)
        cache = PrefixCache(
            run_layers,
            chunk_size=CHUNK_SIZE,
            store=store,
            stamps=stamps,
            device=CPU,
            content=content,
        )
        found.append([])
        for step, ids in enumerate(random_batches(seed, 24)):
            if step == 12:  # Thawed, trained and frozen again.
                with torch.no_grad():
                    next(prefix.blocks[1].parameters())[0] += 1.0
                stamps[:] = prefix.stamps(NUM_LAYERS)
            depth = 1 + step % 12 * NUM_LAYERS // 12
            cache.read_ahead(ids, depth=depth)
            fetched = cache.fetch(ids, samples.load, depth=depth)
            found[-1].append({name: row.clone() for name, row in fetched.items()})
        counts.append(replace(cache.take_stats(), seconds=0.0))
        asked.append(samples.asked)
        cache.close()
        store.close()
    assert counts[0] == counts[1] and counts[0].hits
    # What was rounded at one depth is computed anew for another.
    assert bool(counts[0].upgrades) == (content.dtype is None)
    assert asked[0] == asked[1]
    for mine, theirs in zip(*found, strict=True):
        assert_rows_equal(mine, theirs)


@pytest.mark.parametrize("place", ["device", "tiers"])
def test_a_sample_that_differs_condemns_the_store_at_once(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefix, samples, content = Prefix(), Samples(), RowContent(KEEP, checks_every=True)
    store = as_rows(samples, content, place)
    cache = PrefixCache(
        prefix.run_layers,
        chunk_size=CHUNK_SIZE,
        store=store,
        stamps=prefix.stamps(2),
        device=CPU,
        content=content,
    )
    ids = torch.arange(8)
    old = cache.fetch(ids, samples.load, depth=2)[HIDDEN]
    samples.entries["pixels"][3] += 1
    new = cache.fetch(ids, samples.load, depth=2)[HIDDEN]
    changed = (old != new).flatten(1).any(1).numpy()
    assert np.flatnonzero(changed).tolist() == [3]
    assert store.is_condemned() and "gives another sample 3 than" in caplog.text
    store.close()
