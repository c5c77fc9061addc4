"""Claims about chunks that are filled up with samples of later fetches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autocache.prefix_cache import PrefixCache
from autocache.prefix_chunks import filling, room_in_chunks
from autocache.row_content import Positions, RowContent
from autocache.store import RowStore
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
)


class World:
    """Hold a prefix, its samples, and a cache whose rows are checked against these."""

    def __init__(self, store: RowStore, samples: Samples, content: RowContent) -> None:
        self.prefix, self.samples, self.store = Prefix(), samples, store
        self.cache = PrefixCache(
            self.prefix.run_layers,
            chunk_size=CHUNK_SIZE,
            store=store,
            stamps=self.prefix.stamps(NUM_LAYERS),
            device=CPU,
            content=content,
        )

    def found(self, *ids: int) -> list[int]:
        stamps = self.prefix.stamps(NUM_LAYERS)
        return self.store.find(torch.tensor(ids), stamps).tolist()

    def fetch(
        self, ids: list[int], later: list[int] | Tensor = (), depth: int = 4, keeps: bool = True
    ) -> None:
        """Fetch, and hold what comes against what is computed alone."""
        wanted = torch.tensor(ids)
        found = self.cache.fetch(
            wanted, self.samples.load, depth=depth, keeps=keeps, later=pair(later)
        )
        alone = compute_uncached(Prefix(), wanted, depth, Samples())
        assert_bitwise_equal(found, alone)


@contextmanager
def a_world(folder: Path, num_rows: int = NUM_SAMPLES) -> Iterator[World]:
    samples, content = Samples(), RowContent(KEEP)
    one = {name: entry[:1] for name, entry in samples.entries.items()}
    layout = content.layout(one, torch.empty(1, NUM_TOKENS, WIDTH))
    with RowStore.create(folder / "rows", layout, num_rows) as store:
        yield World(store, samples, content)


@pytest.mark.parametrize(
    ("found", "taken"),
    [
        # All of the 4 that run from layer 0 on go through the layers above, too.
        ([4, 0, 1, 4], [2, 3]),
        ([0, 4], [2, 3, 5]),
        ([1, 1, 2, 4], [0]),
        ([0, 1, 1, 1, 1], [2, 3, 5]),
        # Above the 2 of layer 0 a chunk is full.
        ([0, 0, 1, 2], []),
        ([4, 1, 1, 1, 1, 1], [0, 7, 8]),
    ],
)
def test_the_soonest_samples_found_as_deep_fill_up_chunks_and_begin_none(
    found: list[int], taken: list[int]
) -> None:
    later = torch.tensor([1, 4, 0, 0, 2, 0, 0, 1, 1, 1])
    own = torch.tensor(found)
    more = filling(room_in_chunks(own, chunk_size=4, depth=4), later)
    assert more.tolist() == taken
    for depth in own[own < 4].tolist():
        before, after = (int((one <= depth).sum()) for one in (own, torch.cat((own, later[more]))))
        assert -(-after // 4) == -(-before // 4)


def test_full_chunks_and_hits_take_no_later_sample() -> None:
    for found in ([0, 0, 0, 0], [4, 4], [4]):
        assert not room_in_chunks(torch.tensor(found), chunk_size=4, depth=4)
    assert not len(filling({}, torch.zeros(9, dtype=torch.int64)))


def test_later_samples_are_computed_once_and_found_by_their_fetch(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        world.fetch([7, 8, 9], depth=1)
        world.prefix.calls.clear()
        world.samples.asked.clear()
        world.fetch([0, 7], [8, 1, 2, 9, 3])
        assert world.prefix.calls == [(0, 1), (1, 4)]
        assert world.samples.asked == [0, 1, 2]
        assert world.found(0, 7, 8, 1, 2, 9, 3) == [4, 4, 1, 4, 4, 1, 0]
        world.fetch([8], [9, 3])
        assert world.found(8, 9, 3) == [4, 4, 0]
        world.cache.take_stats()
        world.prefix.calls.clear()
        world.fetch([1, 2, 8, 9])
        assert not world.prefix.calls
        assert world.cache.take_stats().hits == 4


def test_what_is_not_kept_makes_room_for_what_is_later(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        world.fetch([0, 1], [2, 3, 4], keeps=False)
        assert world.found(0, 1, 2, 3, 4) == [0, 0, 4, 4, 0]


def test_nothing_later_is_computed_where_it_has_no_row_or_rows_are_of_no_use(
    tmp_path: Path,
) -> None:
    with a_world(tmp_path, num_rows=6) as world:
        world.fetch([0], [7, 8, 9])
        assert world.samples.asked == [0]
        world.store.condemn()
        world.fetch([1], [2, 3])
        assert world.samples.asked == [0, 1]


def test_a_sample_that_is_fetched_now_and_later_is_computed_once(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        world.fetch([0, 0, 1], [1, 0, 2, 3], keeps=False)
        assert world.samples.asked == [0, 1, 2] and world.found(0, 1, 2) == [0, 0, 4]


@pytest.mark.parametrize("seed", range(4))
def test_foreseen_are_the_loads_of_an_epoch_at_mixed_depths(tmp_path: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with a_world(tmp_path, num_rows=NUM_SAMPLES - 3) as world:
        mixed = torch.randperm(NUM_SAMPLES, generator=generator)
        for depth, ids in zip((1, 2, 4), mixed[:15].split(5), strict=True):
            world.fetch(ids.tolist(), depth=depth)
        batches = torch.randperm(NUM_SAMPLES, generator=generator).split(3)
        later = [torch.cat([*batches[i + 1 : i + 4], batches[0][:0]]) for i in range(len(batches))]
        coming = [(pair(ids), pair(after)) for ids, after in zip(batches, later, strict=True)]
        foreseen = [ids.tolist() for ids, _ in world.cache.foresee(coming, depth=4)]
        loads, calls = [], []
        for ids, after in zip(batches, later, strict=True):
            world.samples.asked.clear()
            world.prefix.calls.clear()
            world.fetch(ids.tolist(), after)
            loads.append(world.samples.asked.copy())
            calls += world.prefix.calls
        assert foreseen == loads
        # Without later samples each of the 8 fetches needs one call for each layer at least.
        assert sum(last - first for first, last in calls) < 8 * NUM_LAYERS


def test_what_is_foreseen_while_a_fetch_loads_begins_with_that_fetch(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        world.fetch(list(range(0, NUM_SAMPLES, 2)))
        # Hits are counted, and some are checked: 3 of a fetch's 6 samples.
        batches = torch.arange(NUM_SAMPLES).split(6)
        foreseen: list[list[int]] = []

        def load(ids: Tensor) -> dict[str, Tensor]:
            if not foreseen:
                coming = [(pair(one), pair(())) for one in batches]
                foreseen.extend(
                    found.tolist() for found, _ in world.cache.foresee(coming, depth=4)
                )
            loads.append(ids.tolist())
            return world.samples.load(ids)

        loads: list[list[int]] = []
        for ids in batches:
            world.cache.fetch(ids, load, depth=4)
        assert foreseen == loads


def test_rows_that_fit_nowhere_take_no_later_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with a_world(tmp_path) as world:
        world.samples.entries["y"] = world.samples.entries["y"].double()
        for ids in ([0], [1]):
            world.cache.fetch(torch.tensor(ids), world.samples.load, depth=2, later=pair([2, 3]))
        assert "samples are not kept in the cache where 'y'" in caplog.text
        assert world.samples.asked == [0, 2, 3, 1]


def test_rows_that_are_damaged_in_store_are_computed_with_the_others(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        world.fetch([4, 5, 6], depth=1)
        words = world.store._parts[0][1]
        words[5, 0] ^= 1
        world.fetch([4], [5, 6])
        assert world.found(4, 5, 6) == [4, 4, 4]
        world.fetch([5, 6])


def test_positions_that_only_later_samples_need_are_left_out() -> None:
    positions = Positions("mask", ("hidden", "mask"), most=5)
    content = RowContent(("mask",), padding_mask="mask", positions=positions)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    rows = {"hidden": torch.arange(15.0).reshape(3, 5, 1), "mask": mask}
    own = content.head(rows, 2)
    assert torch.equal(own["hidden"], rows["hidden"][:2, :3])
    assert torch.equal(own["mask"], mask[:2, :3])
    assert content.head(rows, 3)["hidden"].shape == (3, 5, 1)
