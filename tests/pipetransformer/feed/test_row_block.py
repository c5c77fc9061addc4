"""Prove that rows which are read for several steps at once are those of single reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autocache import HIDDEN, CacheStats, Positions, own_lengths
from autocache.store import RowStore
from pipetransformer.feed.fetch_forecast import Follower, with_later
from pipetransformer.feed.row_block import RowBlock, hit_together
from tests.helpers.feeds import Feed, counts, leave_rows_unchecked

STEPS = [torch.tensor(step) for step in ([5, 0], [9, 3], [7, 1], [2, 4])]


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Feed, list[int]]:
    """Return a feed that has rows of all steps, and the sizes of all reads of its store."""
    leave_rows_unchecked(monkeypatch)
    feed, sizes = Feed(tmp_path), list[int]()
    feed.set_depth(2)
    for step in STEPS:
        feed.fetch(step)
    foresee(feed, STEPS)
    read = RowStore.read

    def counted(store: RowStore, ids: Tensor, *given: object, **named: object) -> object:
        sizes.append(len(ids))
        return read(store, ids, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(RowStore, "read", counted)
    return feed, sizes


def foresee(feed: Feed, steps: list[Tensor]) -> None:
    feed.samples._coming = Follower(lambda: with_later((1, step) for step in steps))


def assert_right(feed: Feed, step: Tensor, expected: tuple[int, int, int]) -> None:
    batch, stats = feed.samples.rows(1).fetch(step), feed.samples.take_stats()
    torch.testing.assert_close(batch[HIDDEN], feed.expect(2, step), rtol=1e-12, atol=1e-12)
    assert torch.equal(batch["y"], feed.data.data.tensors[1][step])
    assert counts(stats) == expected


def test_rows_of_all_steps_are_read_at_once(filled: tuple[Feed, list[int]]) -> None:
    feed, sizes = filled
    for step in STEPS:
        assert_right(feed, step, (2, 0, 0))
    assert sizes == [8]


def test_steps_that_were_not_foreseen_are_read_by_themselves(
    filled: tuple[Feed, list[int]],
) -> None:
    feed, sizes = filled
    assert_right(feed, STEPS[0], (2, 0, 0))
    for step in (STEPS[2], STEPS[3], STEPS[1]):
        assert_right(feed, step, (2, 0, 0))
    assert sizes == [8, 2, 2, 2]


def test_a_miss_ends_what_is_read_at_once(filled: tuple[Feed, list[int]]) -> None:
    feed, sizes = filled
    missing = [*STEPS[:2], torch.tensor([10, 11]), STEPS[3]]
    foresee(feed, missing)
    for step, expected in zip(missing, [(2, 0, 0)] * 2 + [(0, 0, 2), (2, 0, 0)], strict=True):
        assert_right(feed, step, expected)
    assert sizes[0] == 4


def test_rows_of_weights_that_were_changed_meanwhile_are_dropped(
    filled: tuple[Feed, list[int]],
) -> None:
    feed, _ = filled
    assert_right(feed, STEPS[0], (2, 0, 0))
    with torch.no_grad():
        next(iter(feed.layered.model.parameters())).mul_(2)
    assert_right(feed, STEPS[1], (0, 0, 2))


def test_rows_of_a_store_that_was_condemned_meanwhile_are_dropped(
    filled: tuple[Feed, list[int]],
) -> None:
    feed, _ = filled
    assert_right(feed, STEPS[0], (2, 0, 0))
    assert feed.samples.keeper.store is not None
    feed.samples.keeper.store.condemn()
    assert_right(feed, STEPS[1], (0, 0, 2))


def test_another_depth_drops_what_was_read(filled: tuple[Feed, list[int]]) -> None:
    feed, _ = filled
    assert_right(feed, STEPS[0], (2, 0, 0))
    feed.set_depth(1)
    batch, _, stats = feed.fetch(STEPS[1])
    torch.testing.assert_close(batch[HIDDEN], feed.expect(1, STEPS[1]), rtol=1e-12, atol=1e-12)
    assert counts(stats) == (0, 0, 2)


def test_a_sample_that_changed_is_found_when_rows_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autocache.sample_checks._DENSE_CHECKS", 1)
    monkeypatch.setattr("autocache.sample_checks._SPARSE_CHECKS", 1)
    feed = Feed(tmp_path)
    feed.set_depth(2)
    for step in STEPS:
        feed.fetch(step)
    foresee(feed, STEPS)
    feed.data.data.tensors[0][4] += 1
    for step in STEPS:
        assert_right(feed, step, (0, 0, 2))


def test_where_all_samples_are_compared_each_step_reads_its_own(
    tmp_path: Path, filled: tuple[Feed, list[int]]
) -> None:
    _, sizes = filled
    feed = Feed(tmp_path, cache_check="all")
    feed.set_depth(2)
    for step in STEPS:
        feed.fetch(step)
    foresee(feed, STEPS)
    sizes.clear()
    for step in STEPS[:2]:
        feed.data.read.clear()
        assert_right(feed, step, (2, 0, 0))
        assert feed.data.read == step.tolist()
    feed.data.data.tensors[0][1] += 1  # It shows in its own step.
    for step in STEPS[2:]:
        assert_right(feed, step, (0, 0, 2))
    assert sizes == [8]


def labelled(rows: Any) -> None:
    """Have a feed's rows be compared with the labels of its data set."""
    labels = rows.samples.dataset.data.tensors[1]
    changed = lambda ids, kept: labels[ids] != kept["y"]  # noqa: E731
    rows.keeper.format.content = replace(rows.keeper.format.content, changed=changed)


@pytest.mark.parametrize("is_undisturbed", [False, True])
def test_a_label_that_is_corrected_meanwhile_shows_at_once_where_others_run_between_steps(
    filled: tuple[Feed, list[int]], is_undisturbed: bool
) -> None:
    feed, sizes = filled
    feed.samples.is_undisturbed = is_undisturbed
    labelled(feed.samples)
    feed.samples._cache = feed.samples.keeper.cache_over(
        feed.samples.keeper.store, feed.samples.keeper.format.content
    )
    assert_right(feed, STEPS[0], (2, 0, 0))
    before = feed.data.data.tensors[1].clone()
    feed.data.data.tensors[1][9] += 1
    batch = feed.samples.rows(1).fetch(STEPS[1])
    assert torch.equal(
        batch["y"], (before if is_undisturbed else feed.data.data.tensors[1])[STEPS[1]]
    )
    assert len(sizes) == 1 + (not is_undisturbed)


def test_large_rows_are_read_step_by_step() -> None:
    asked = list[int]()

    def hits(ids: Tensor) -> Tensor:
        asked.append(len(ids))
        return torch.ones(len(ids), dtype=torch.bool)

    assert hit_together(STEPS, hits, most_rows=3) == []
    assert len(hit_together(STEPS, hits, most_rows=7)) == 3
    assert asked == [6]


def test_each_step_is_padded_to_its_own_longest() -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    batch = {HIDDEN: torch.rand(4, 3, 2), "mask": mask}
    block = RowBlock(
        0, (1,), [torch.tensor([0, 1]), torch.tensor([2, 3])], batch, CacheStats(3, 0, 1),
        positions=Positions("mask", (HIDDEN, "mask"), 3),
    )  # fmt: skip
    first, second = block.take(), block.take()
    assert first[0][HIDDEN].shape == (2, 2, 2) and second[0][HIDDEN].shape == (2, 3, 2)
    assert torch.equal(first[0][HIDDEN], batch[HIDDEN][:2, :2]) and not block.has_more
    assert int(own_lengths(first[0]["mask"]).max()) == 2
    assert [counts(share) for _, share in (first, second)] == [(1, 0, 1), (2, 0, 0)]
