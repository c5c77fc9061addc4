"""Prove when the frozen layers' weights leave a GPU, and that nothing else changes by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipetransformer.feed.frozen_prefix import FrozenPrefix
from tests.models import NUM_SAMPLES
from tests.pipetransformer.feed.test_frozen_prefix import Feed, counts, leave_rows_unchecked

ALL = torch.arange(NUM_SAMPLES)
ACCELERATOR = torch.device("cpu", 0)
"""Stands for a GPU: no other device than the host's, but another name."""


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Note where weights are moved to; each move gives them other memory, as a GPU's would."""
    made: list[torch.device] = []
    to = Tensor.to

    def moved(tensor: Tensor, device: torch.device) -> Tensor:
        made.append(device)
        return to(tensor, device, copy=True)

    move = FrozenPrefix._move

    def patched(prefix: FrozenPrefix, device: torch.device) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "to", moved)
            move(prefix, device)

    monkeypatch.setattr(FrozenPrefix, "_move", patched)
    leave_rows_unchecked(monkeypatch)
    return made


@pytest.fixture
def feed(tmp_path: Path, moves: list[torch.device]) -> Iterator[Feed]:
    made = Feed(tmp_path)
    made.prefix._device = ACCELERATOR
    made.set_depth(2)
    yield made
    made.samples.close()


def check(feed: Feed, ids: Tensor, expected: tuple[int, int, int]) -> None:
    batch, _, stats = feed.fetch(ids)
    torch.testing.assert_close(batch["hidden"], feed.expect(2, ids), rtol=1e-12, atol=1e-12)
    assert counts(stats) == expected


def test_weights_leave_once_as_many_samples_as_there_are_needed_none(
    feed: Feed, moves: list[torch.device]
) -> None:
    check(feed, ALL[:20], (0, 0, 20))
    check(feed, ALL, (20, 0, 6))
    check(feed, ALL[:13], (13, 0, 0))
    check(feed, ALL[13:], (13, 0, 0))
    assert not moves
    check(feed, ALL[:1], (1, 0, 0))
    left = [torch.device("cpu")] * len([t for i in range(2) for t in feed.layered.tensors(i)])
    assert moves == left
    for _ in range(3):
        check(feed, ALL, (26, 0, 0))
    assert moves == left, "they stay away, and no row is stamped anew"


def test_they_come_back_for_whoever_runs_moves_or_measures_them(
    feed: Feed, moves: list[torch.device]
) -> None:
    for _ in range(3):
        feed.fetch(ALL)
    moves.clear()
    batch, _, _ = feed.fetch(ALL[:1])
    kept = {name: t for i in range(2) for name, t in feed.layered.tensors(i).items()}
    hidden = feed.prefix.run_layers({"x": feed.data.data.tensors[0][:1]}, 0, 2)
    assert set(moves) == {ACCELERATOR}
    torch.testing.assert_close(hidden, batch["hidden"], rtol=1e-12, atol=1e-12)
    assert all(feed.layered.tensor(name) is t for name, t in kept.items()), "the very tensors"
    for _ in range(2):
        feed.fetch(ALL)
    moves.clear()
    feed.set_depth(3)
    assert set(moves) == {ACCELERATOR}
    _, _, stats = feed.fetch(ALL)
    assert counts(stats) == (0, 26, 0), "rows of before serve the next depth"


def test_what_a_user_writes_while_they_are_away_is_noticed(
    feed: Feed, moves: list[torch.device]
) -> None:
    for _ in range(3):
        feed.fetch(ALL)
    assert moves
    with torch.no_grad():
        feed.layered.sublayers[0].module.weight.add_(1.0)
    feed.prefix.come_back()
    check(feed, ALL, (0, 0, 26))


def test_on_cpus_they_stay_where_they_are(tmp_path: Path, moves: list[torch.device]) -> None:
    feed = Feed(tmp_path)
    feed.set_depth(2)
    for _ in range(4):
        feed.fetch(ALL)
    feed.samples.close()
    assert not moves
