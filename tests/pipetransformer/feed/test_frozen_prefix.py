"""Prove that cached samples are never asked for again, and that no stale row is ever served."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autocache.prefix_cache import CacheStats
from autocache.store import NamelessFilesError, RowStore
from pipetransformer.feed.samples import Batch
from pipetransformer.processes.world import connect
from tests.helpers.feeds import IDS, Feed, assert_fetch, counts, leave_rows_unchecked
from tests.helpers.models import NUM_FEATURES, tiny_data
from tests.helpers.pool import Pool


@pytest.fixture(autouse=True)
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no row be checked against the dataset: what is read for it is not counted here."""
    leave_rows_unchecked(monkeypatch)


@pytest.fixture
def feed(tmp_path: Path) -> Any:
    """Make a feed of one process whose cache is in a folder of its own."""
    made = Feed(tmp_path)
    yield made
    made.samples.close()


def test_with_nothing_frozen_the_dataset_s_entries_are_served(feed: Feed) -> None:
    batch, read, stats = feed.fetch()
    assert list(batch) == ["x", "y"] and read == sorted(IDS.tolist())
    assert torch.equal(batch["x"], feed.data.data.tensors[0][IDS]) and stats == CacheStats()


def test_the_dataset_is_not_asked_for_a_cached_sample(feed: Feed) -> None:
    feed.set_depth(2)
    assert_fetch(feed, 2, (0, 0, 5))
    assert_fetch(feed, 2, (5, 0, 0))
    _, read, stats = feed.fetch(torch.tensor([9, 1, 5]))
    assert (read, counts(stats)) == ([1], (2, 0, 1))


def test_cached_rows_have_the_bits_of_computed_ones(tmp_path: Path) -> None:
    batches = []
    for use_cache in (True, False):
        feed = Feed(tmp_path)
        feed.set_depth(3, use_cache=use_cache)
        feed.fetch(torch.tensor([7, 5]))  # Two are hits where there is a cache.
        batches.append(feed.fetch()[0]["hidden"])
        feed.samples.close()
    assert torch.equal(*batches)


def test_growth_runs_the_new_layers_on_the_rows_and_asks_the_dataset_for_nothing(
    feed: Feed,
) -> None:
    feed.set_depth(1)
    assert_fetch(feed, 1, (0, 0, 5))
    feed.set_depth(3)
    assert_fetch(feed, 3, (0, 5, 0))
    assert_fetch(feed, 3, (5, 0, 0))


def train_layer(feed: Feed, layer: int) -> None:
    """Change a layer's weights, as training after a thaw does."""
    with torch.no_grad():
        for parameter in feed.layered.sublayers[layer].module.parameters():
            parameter.add_(0.5)


@pytest.mark.parametrize("thawed_to", [0, 1])
def test_rows_from_before_a_thaw_never_hit_after_a_refreeze(feed: Feed, thawed_to: int) -> None:
    feed.set_depth(2)
    assert_fetch(feed, 2, (0, 0, 5))
    feed.set_depth(thawed_to)
    train_layer(feed, 1)
    feed.set_depth(2)
    assert_fetch(feed, 2, (0, 0, 5))
    assert_fetch(feed, 2, (5, 0, 0))


def test_a_thaw_serves_the_lower_depth_at_once(feed: Feed) -> None:
    feed.set_depth(3)
    assert_fetch(feed, 3, (0, 0, 5))
    feed.set_depth(1)
    assert_fetch(feed, 1, (0, 0, 5))
    assert_fetch(feed, 1, (5, 0, 0))


def test_a_rank_that_leaves_stage_0_and_returns_serves_the_weights_it_then_holds(
    feed: Feed,
) -> None:
    feed.set_depth(2)
    assert_fetch(feed, 2, (0, 0, 5))
    feed.set_depth(1, on_stage_0=False)
    feed.set_depth(2, on_stage_0=False)
    train_layer(feed, 1)
    feed.set_depth(2)
    assert_fetch(feed, 2, (0, 0, 5))


def test_layers_of_other_widths_get_a_store_of_their_own(tmp_path: Path) -> None:
    widths = ((NUM_FEATURES, 8), (8, 10), (10, 10), (10, 3))
    model = nn.Sequential(*[nn.Linear(*width) for width in widths])
    feed = Feed(tmp_path, model=model.double())
    for depth, expected in ((1, (0, 0, 5)), (2, (0, 0, 5)), (3, (0, 5, 0)), (1, (0, 0, 5))):
        feed.set_depth(depth)
        assert_fetch(feed, depth, expected)
        assert_fetch(feed, depth, (5, 0, 0))
    feed.samples.close()
    assert os.listdir(tmp_path) == []


def test_where_files_need_names_the_cache_s_file_has_lost_its_name_when_it_is_used(
    feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> RowStore:
        raise NamelessFilesError(errno.EOPNOTSUPP, "no such files here")

    monkeypatch.setattr(RowStore, "create_nameless", refuse)
    feed.set_depth(2)
    assert os.listdir(tmp_path) == []
    assert_fetch(feed, 2, (0, 0, 5))
    assert_fetch(feed, 2, (5, 0, 0))


def refuse_to_reserve(_descriptor: int, _offset: int, num_bytes: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_system_that_is_too_small_means_no_cache_and_one_warning(
    feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse_to_reserve)
    with caplog.at_level(logging.WARNING):
        feed.set_depth(2)
        assert_fetch(feed, 2, (0, 0, 5))
        assert_fetch(feed, 2, (0, 0, 5))
    assert len(caplog.records) == 1 and os.listdir(tmp_path) == []
    assert "no cache: " in caplog.text and "is computed at every step" in caplog.text


def test_a_limit_caches_as_many_rows_as_it_holds(tmp_path: Path) -> None:
    # A row is 64 bytes each of activations, a target and a digest: a third of the samples has one,
    # spread evenly.
    feed = Feed(tmp_path, cache_limit_bytes=len(tiny_data()) // 3 * 192)
    feed.set_depth(2)
    everything = torch.arange(len(tiny_data()))
    feed.fetch(everything)
    _, read, stats = feed.fetch(everything)
    assert counts(stats) == (len(everything) // 3, 0, len(read))
    kept = sorted({*everything.tolist()} - {*read})
    assert {later - sooner for sooner, later in itertools.pairwise(kept)} <= {3, 4}
    feed.samples.close()


def test_a_limit_for_less_than_a_tenth_of_the_rows_means_no_cache_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num = len(tiny_data())
    assert num == 26
    for limit_bytes, keeps, may_hit in (
        (3 * 192, False, True),
        (3 * 192 - 1, False, False),
        (3 * 192 - 1, True, False),
    ):
        feed = Feed(tmp_path, cache_limit_bytes=limit_bytes, cache_keep=keeps)
        with caplog.at_level(logging.WARNING):
            feed.set_depth(2)
            hits = [counts(feed.fetch(torch.arange(num))[2])[0] for _ in range(2)]
        assert hits == ([0, 3] if may_hit else [0, 0])
        feed.samples.close()
    said = [one for one in caplog.messages if "tenth" in one]
    assert said == 2 * [
        "no cache: cache_limit_bytes=575 has room for less than a tenth of 26 rows of 192 bytes; "
        "the frozen prefix is computed at every step"
    ]


def test_a_dataset_with_random_augmentation_is_not_cached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for noise, may_cache in ((0.0, True), (0.1, False)):
        samples = Feed(tmp_path, noise=noise).samples
        samples.keeper.look_for_randomness()
        assert samples.keeper.may_cache is may_cache
    assert [r.message[:44] for r in caplog.records] == [
        "no cache: the training set gives other value"
    ]


def fetch_in_turn(folder: str) -> tuple[list[Any], list[str]]:
    """Let rank 0 fetch, then rank 1; return what each needed, and the folder's files meanwhile."""
    world = connect("cpu", timeout_s=30.0)
    feed, found, files, open_store = Feed(Path(folder), world), [], [], RowStore.open

    def noting(*arguments: Any) -> RowStore:
        files.extend(os.listdir(folder))
        return open_store(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        leave_rows_unchecked(patch)
        patch.setattr(RowStore, "open", noting)
        feed.set_depth(2)
        for rank in range(world.size):
            if world.rank == rank:
                batch, read, stats = feed.fetch()
                torch.testing.assert_close(batch["hidden"], feed.expect(2), rtol=1e-12, atol=1e-12)
                found = [read, counts(stats), batch["hidden"].tolist()]
            dist.barrier()
    files += os.listdir(folder)
    feed.samples.close()
    return found, files


def test_the_processes_of_a_node_share_one_cache_that_no_folder_lists(two_ranks: Pool) -> None:
    # On Linux every tmpfs takes files without a name; other file systems may not.
    shared = "/dev/shm" if sys.platform == "linux" else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        (first, early), (second, late) = two_ranks.run(fetch_in_turn, folder)
    assert first[:2] == [sorted(IDS.tolist()), (0, 0, 5)] and second[:2] == [[], (5, 0, 0)]
    assert first[2] == second[2] and early == []
    assert late == [] or sys.platform != "linux"


def set_depth_without_space(folder: str) -> list[str]:
    """Let rank 0 find no space; return this rank's warnings, after a fetch that still works."""
    world = connect("cpu", timeout_s=30.0)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger, reserve = logging.getLogger("pipetransformer"), os.posix_fallocate
    logger.addHandler(handler)
    if world.is_main:
        os.posix_fallocate = refuse_to_reserve
    try:
        feed = Feed(Path(folder), world)
        feed.set_depth(2)
        assert_fetch(feed, 2, (0, 0, 5))
        feed.samples.close()
    finally:
        os.posix_fallocate = reserve
        logger.removeHandler(handler)
    return warnings


def test_no_space_on_one_process_is_no_cache_on_all_and_is_warned_of_once(
    two_ranks: Pool, tmp_path: Path
) -> None:
    first, second = two_ranks.run(set_depth_without_space, str(tmp_path))
    assert len(first) == 1 and "no cache: " in first[0] and second == []
    assert os.listdir(tmp_path) == []


def test_kernels_to_which_a_sample_s_place_matters_are_told_of(
    feed: Feed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = feed.prefix.run_layers

    def by_place(batch: Batch, first: int, last: int) -> Tensor:
        hidden = run(batch, first, last)
        return hidden + 1e-15 * torch.arange(len(hidden), dtype=hidden.dtype)[:, None]

    with caplog.at_level(logging.INFO):
        feed.set_depth(1)
        assert "to rounding" not in caplog.text
        feed.samples.close()
        feed.prefix._store = None
        monkeypatch.setattr(feed.prefix, "run_layers", by_place)
        feed.set_depth(2)
    assert "equals an uncached one to rounding, not bit by bit" in caplog.text
