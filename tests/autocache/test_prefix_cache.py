"""Claims about the prefix cache: what it computes, what it reads, and that no one can tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autocache import ActivationStore, DeviceStore
from autocache.prefix_cache import PrefixCache
from autocache.prefix_chunks import place
from autocache.row_content import HIDDEN, RowContent
from autocache.store import RowStore
from autocache.write_behind import WriteBehind
from tests.helpers.cached import (
    CHUNK_SIZE,
    CONTENT,
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
    make_cache,
    random_batches,
)


@contextmanager
def make_store(folder: Path, samples: Samples, num_rows: int = NUM_SAMPLES) -> Iterator[RowStore]:
    hidden = torch.empty(1, NUM_TOKENS, WIDTH, dtype=samples.entries["pixels"].dtype)
    one = {name: entry[:1] for name, entry in samples.entries.items()}
    layout = CONTENT.layout(one, hidden)
    with RowStore.create(folder / "rows", layout, num_rows) as store:
        yield store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(2))
def test_cached_equals_uncached_bitwise_for_random_mixes_of_hits_upgrades_and_misses(
    tmp_path: Path, seed: int, dtype: torch.dtype
) -> None:
    prefix, samples = Prefix(seed, dtype), Samples(dtype)
    with make_store(tmp_path, samples, num_rows=NUM_SAMPLES - 5) as store:
        cache = make_cache(prefix, prefix.stamps(NUM_LAYERS), store)
        kinds = set()
        for step, ids in enumerate(random_batches(seed, 20)):
            depth = 1 + step * NUM_LAYERS // 20
            found = cache.fetch(ids, samples.load, depth=depth)
            assert_bitwise_equal(found, compute_uncached(prefix, ids, depth, samples))
            stats = cache.take_stats()
            kinds.add((stats.hits > 0, stats.upgrades > 0, stats.misses > 0))
    assert (True, True, True) in kinds, "no batch mixed all three"


def test_uncached_equals_running_every_sample_in_one_chunk_of_itself() -> None:
    prefix, samples = Prefix(), Samples()
    found = compute_uncached(prefix, torch.arange(NUM_SAMPLES), 2, samples)
    for index in range(NUM_SAMPLES):
        one = compute_uncached(prefix, torch.tensor([index]), 2, samples)
        assert_bitwise_equal({k: v[index : index + 1] for k, v in found.items()}, one)


def test_hits_ask_neither_the_dataset_nor_the_layers(tmp_path: Path) -> None:
    prefix, samples = Prefix(), Samples()
    with make_store(tmp_path, samples) as store:
        cache = make_cache(prefix, prefix.stamps(2), store)
        first = cache.fetch(torch.arange(10), samples.load, depth=2)
        assert samples.asked == list(range(10))
        assert prefix.calls == [(0, 2)] * 3
        again = cache.fetch(torch.arange(10), samples.load, depth=2)
        assert_bitwise_equal(again, first)
        cache.fetch(torch.tensor([12, 3, 11]), samples.load, depth=2)
    assert samples.asked == [*range(10), 12, 11]
    assert prefix.calls == [(0, 2)] * 4


def test_a_sample_that_is_known_to_have_changed_is_made_anew_and_stored(tmp_path: Path) -> None:
    prefix, samples = Prefix(), Samples()
    ids = torch.tensor([5, 2, 9])

    def changed(ids: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        return kept["y"] != samples.entries["y"][ids]

    content = dataclasses.replace(CONTENT, changed=changed)
    with make_store(tmp_path, samples) as store:
        cache = PrefixCache(
            prefix.run_layers,
            chunk_size=CHUNK_SIZE,
            store=store,
            stamps=prefix.stamps(3),
            device=CPU,
            content=content,
        )
        cache.fetch(ids, samples.load, depth=1)
        for asked, which in (([2], ids[1:2]), ([5, 2, 9], ids), ([], ids[:0])):
            samples.asked.clear()
            samples.entries["y"][which] += 1
            found = cache.fetch(ids, samples.load, depth=2)
            assert samples.asked == asked
            assert_bitwise_equal(found, compute_uncached(prefix, ids, 2, samples))


def test_an_older_row_runs_only_the_new_layers_and_is_upgraded_in_place(tmp_path: Path) -> None:
    prefix, samples = Prefix(), Samples()
    ids = torch.tensor([5, 2, 9])
    with make_store(tmp_path, samples) as store:
        cache = make_cache(prefix, prefix.stamps(NUM_LAYERS), store)
        cache.fetch(ids, samples.load, depth=1)
        size = store.path.stat().st_size
        found = cache.fetch(ids, samples.load, depth=3)
        assert prefix.calls == [(0, 1), (1, 3)]
        assert_bitwise_equal(cache.fetch(ids, samples.load, depth=3), found)
        assert prefix.calls == [(0, 1), (1, 3)]
        assert store.path.stat().st_size == size
        assert samples.asked == ids.tolist()
        stats = cache.take_stats()
    assert (stats.hits, stats.upgrades, stats.misses) == (3, 3, 3)
    assert_bitwise_equal(found, compute_uncached(prefix, ids, 3, samples))


def test_rows_of_several_depths_are_run_together_from_where_they_meet(tmp_path: Path) -> None:
    prefix, samples = Prefix(), Samples()
    with make_store(tmp_path, samples) as store:
        cache = make_cache(prefix, prefix.stamps(NUM_LAYERS), store)
        cache.fetch(torch.tensor([7]), samples.load, depth=1)
        cache.fetch(torch.tensor([3]), samples.load, depth=2)
        cache.fetch(torch.tensor([11]), samples.load, depth=4)
        prefix.calls.clear()
        ids = torch.tensor([11, 3, 0, 7])
        found = cache.fetch(ids, samples.load, depth=4)
        assert prefix.calls == [(0, 1), (1, 2), (2, 4)]
        assert_bitwise_equal(cache.fetch(ids, samples.load, depth=4), found)
    assert_bitwise_equal(found, compute_uncached(prefix, ids, 4, samples))


def test_a_row_from_before_a_thaw_never_hits(tmp_path: Path) -> None:
    prefix, samples = Prefix(), Samples()
    ids = torch.arange(6)
    with make_store(tmp_path, samples) as store:
        make_cache(prefix, prefix.stamps(3), store).fetch(ids, samples.load, depth=3)
        with torch.no_grad():
            next(prefix.blocks[1].parameters())[0] += 1.0
        cache = make_cache(prefix, prefix.stamps(3), store)
        found = cache.fetch(ids, samples.load, depth=3)
        stats = cache.take_stats()
    assert (stats.hits, stats.upgrades, stats.misses) == (0, 0, 6)
    assert_bitwise_equal(found, compute_uncached(prefix, ids, 3, samples))


def test_a_thaw_without_training_makes_deeper_rows_miss_and_recomputes_them(
    tmp_path: Path,
) -> None:
    prefix, samples = Prefix(), Samples()
    ids = torch.arange(6)
    with make_store(tmp_path, samples) as store:
        stamps = prefix.stamps(3)
        cache = make_cache(prefix, stamps, store)
        cache.fetch(ids, samples.load, depth=3)
        del stamps[1:]
        found = cache.fetch(ids, samples.load, depth=1)
        stats = cache.take_stats()
    assert (stats.hits, stats.misses) == (0, 12)
    assert_bitwise_equal(found, compute_uncached(prefix, ids, 1, samples))


def test_a_damaged_row_is_recomputed_and_stored_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix, samples = Prefix(), Samples()
    ids = torch.arange(6)
    with make_store(tmp_path, samples) as store:
        cache = make_cache(prefix, prefix.stamps(2), store)
        wanted = cache.fetch(ids, samples.load, depth=2)
        at = store.path.read_bytes().index(wanted["hidden"][4].numpy().tobytes()) + 77
        with open(store.path, "rb+") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 16]))
        cache.take_stats()
        assert_bitwise_equal(cache.fetch(ids, samples.load, depth=2), wanted)
        assert cache.take_stats().misses == 1
        assert "fail their check" in caplog.text
        assert_bitwise_equal(cache.fetch(ids, samples.load, depth=2), wanted)
        assert cache.take_stats().hits == 6


def test_samples_beyond_the_capacity_are_recomputed_every_time(tmp_path: Path) -> None:
    prefix, samples = Prefix(), Samples()
    ids = torch.arange(8)
    with make_store(tmp_path, samples, num_rows=5) as store:
        cache = make_cache(prefix, prefix.stamps(2), store)
        wanted = cache.fetch(ids, samples.load, depth=2)
        samples.asked.clear()
        assert_bitwise_equal(cache.fetch(ids, samples.load, depth=2), wanted)
    assert samples.asked == [5, 6, 7]


@pytest.mark.parametrize("cached_depth", [0, 1, 3])
def test_duplicate_ids_are_loaded_and_run_once_and_returned_at_every_position(
    tmp_path: Path, cached_depth: int
) -> None:
    prefix, samples = Prefix(), Samples()
    ids = torch.tensor([7, 1, 7, 3, 1, 7])
    with make_store(tmp_path, samples) as store:
        cache = make_cache(prefix, prefix.stamps(3), store)
        if cached_depth:
            cache.fetch(torch.tensor([7]), samples.load, depth=cached_depth)
        found = cache.fetch(ids, samples.load, depth=3)
    assert sorted(samples.asked) == [1, 3, 7]
    single = [compute_uncached(prefix, ids[i : i + 1], 3, samples) for i in range(len(ids))]
    assert_bitwise_equal(found, {k: torch.cat([one[k] for one in single]) for k in found})


def test_without_a_store_every_sample_is_computed_and_counted_as_a_miss() -> None:
    prefix, samples = Prefix(), Samples()
    cache = make_cache(prefix, prefix.stamps(2), None)
    for _ in range(2):
        cache.fetch(torch.arange(5), samples.load, depth=2)
    stats = cache.take_stats()
    assert (stats.hits, stats.upgrades, stats.misses) == (0, 0, 10)
    assert stats.seconds > 0
    assert cache.take_stats().misses == 0


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["at once", "behind", "on the device"])
def test_on_a_gpu_cached_equals_uncached_bitwise_whatever_is_done_to_what_it_gives(
    kind: str,
) -> None:
    device = torch.device("cuda", 0)
    prefix, samples = Prefix().to(device), Samples()
    one = {name: entry[:1] for name, entry in samples.entries.items()}
    layout = CONTENT.layout(one, torch.empty(1, NUM_TOKENS, WIDTH))
    store: ActivationStore
    if kind == "on the device":
        store = DeviceStore(layout, NUM_SAMPLES - 5, device=device)
    else:
        store = RowStore.in_memory(layout, NUM_SAMPLES - 5)
        store = WriteBehind(store, device=device) if kind == "behind" else store
    cache = make_cache(prefix, prefix.stamps(NUM_LAYERS), store, device)
    uncached = make_cache(prefix, prefix.stamps(NUM_LAYERS), None, device)
    for step, ids in enumerate(random_batches(0, 40)):
        depth = 1 + step * NUM_LAYERS // 40
        if step % 3:
            cache.read_ahead(ids, depth=depth)
        found = cache.fetch(ids, samples.load, depth=depth)
        where = {name: entry.device.type for name, entry in found.items()}
        assert where.pop(HIDDEN) == "cuda" and set(where.values()) == {"cpu"}
        kept = {name: entry.clone() for name, entry in found.items()}
        # As the layers above may; at once, while rows are on their way.
        found[HIDDEN].fill_(torch.nan)
        assert_bitwise_equal(kept, uncached.fetch(ids, samples.load, depth=depth))
    assert cache.take_stats().hits
    cache.close()
    store.close()


def _drop_target(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: entry for name, entry in entries.items() if name != "y"}


def _drop_last_sample(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: entry[:-1] for name, entry in entries.items()}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(_drop_target, "keep only names"), (_drop_last_sample, "one row per id")],
)
def test_a_loaded_batch_that_lacks_entries_or_samples_is_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    prefix, samples = Prefix(), Samples()
    with make_store(tmp_path, samples) as store:
        cache = make_cache(prefix, prefix.stamps(2), store)
        with pytest.raises(ValueError, match=message):
            cache.fetch(torch.arange(5), lambda ids: spoil(samples.load(ids)), depth=2)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    prefix, samples = Prefix(), Samples()
    stamps = prefix.stamps(2)

    def build(chunk_size: int, keep: tuple[str, ...], store: RowStore | None) -> PrefixCache:
        return PrefixCache(
            prefix.run_layers,
            chunk_size=chunk_size,
            store=store,
            stamps=stamps,
            device=CPU,
            content=RowContent(keep, checked=False),
        )

    with make_store(tmp_path, samples) as store:
        with pytest.raises(ValueError, match="at least one sample per chunk"):
            build(0, KEEP, None)
        with pytest.raises(ValueError, match="name each entry once"):
            build(4, ("hidden",), None)
        cache = build(4, KEEP, store)
        with pytest.raises(ValueError, match="depth >= 1"):
            cache.fetch(torch.arange(3), samples.load, depth=0)
        with pytest.raises(ValueError, match="at least one id"):
            cache.fetch(torch.arange(0), samples.load, depth=1)
        with pytest.raises(ValueError, match="has no stamp"):
            cache.fetch(torch.arange(3), samples.load, depth=3)


def test_rows_of_other_shapes_than_those_that_were_read_are_refused_by_name() -> None:
    rows = {"hidden": torch.zeros(3, 4)}
    first = torch.tensor([0])
    with pytest.raises(ValueError, match=r"'hidden' has the shape \(5,\) for some samples"):
        place(rows, first, {"hidden": torch.ones(1, 5)}, first)
    assert not rows["hidden"].any()
