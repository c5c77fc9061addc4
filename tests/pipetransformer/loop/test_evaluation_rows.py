"""Evaluations have rows of their own, and rows may be filled without training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pipetransformer import CachedLoop, attach
from tests.helpers.marks import slow
from tests.helpers.pool import Pool

NUM, NUM_HELD_OUT = 12, 7
RUNS = Counter[int]()
"""Forwards by block."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        RUNS[id(self)] += 1  # No attribute: that would keep rows away.
        answer: Tensor = x + self.drop(torch.tanh(self.linear(x)))
        return answer


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        answer: Tensor = self.head(hidden)
        return answer


class _Data(Dataset[dict[str, Tensor]]):
    def __init__(self, num: int, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num, 8, generator=draws)
        self.y = torch.randint(3, (num,), generator=draws)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


Batches = Callable[[DataLoader[Any]], Iterable[Any]]


def _evaluate(model: nn.Module, batches: Iterable[Any]) -> float:
    model.eval()
    with torch.no_grad():
        found = [F.cross_entropy(model(b["x"]), b["y"], reduction="sum").item() for b in batches]
    model.train()
    return sum(found)


def _train(
    model: nn.Module,
    epoch: Batches,
    evaluation: Batches,
    *,
    own: nn.Module | None = None,
    num_epochs: int = 3,
) -> list[float]:
    """Train, and evaluate within each epoch and behind it; return all losses."""
    torch.manual_seed(0)
    loader = DataLoader(_Data(NUM, 1), batch_size=4, shuffle=True)
    held_out = DataLoader(_Data(NUM_HELD_OUT, 2), batch_size=3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = [_evaluate(model, evaluation(held_out))]
    for _ in range(num_epochs):
        for index, batch in enumerate(epoch(loader)):
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if index == 1:
                losses.append(_evaluate(model, evaluation(held_out)))
        losses.append(_evaluate(model, evaluation(held_out)))
    return losses


def _attached(model: _Model, kind: str, **settings: Any) -> CachedLoop:
    if kind == "blocks":
        return attach(model, freeze=[1, 2, 2], **settings)
    return attach(model, parts=["blocks.0", "blocks.1"], cache=True, **settings)


def _model() -> _Model:
    torch.manual_seed(0)
    model = _Model()
    model.first.requires_grad_(False)
    return model


def _held_out() -> DataLoader[Any]:
    return DataLoader(_Data(NUM_HELD_OUT, 2), batch_size=3)


def _assert_equal(model: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


KINDS = pytest.mark.parametrize("kind", ["blocks", "parts"])


@KINDS
def test_an_evaluation_within_an_epoch_changes_nothing_and_has_rows(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = _model(), _model()
    with _attached(plain, kind) as cached:
        expected = _train(plain, cached.epoch, lambda loader: loader)
    with _attached(model, kind) as cached:
        held_out = _held_out()
        losses = _train(model, cached.epoch, lambda _: cached.evaluation(held_out))
        runs = [RUNS[id(block)] for block in model.blocks]
        assert _evaluate(model, cached.evaluation(held_out)) == losses[-1]
        new = [RUNS[id(block)] - num for block, num in zip(model.blocks, runs, strict=True)]
        assert new == [0, 0, 3]
    # A row is computed with other samples, in another order of sums.
    assert losses == pytest.approx(expected, rel=1e-6)
    _assert_equal(model, plain)
    # The evaluation's hooks on the model were once taken for the loop's own, and rows went.
    assert "were changed" not in caplog.text


@KINDS
def test_an_evaluation_leaves_the_rows_of_the_training(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, hits = _model(), list[int]()
    run = model.blocks[0].forward
    model.blocks[0].forward = lambda x: run(x)  # type: ignore[method-assign]
    held_out = [DataLoader(_Data(NUM_HELD_OUT, seed), batch_size=3) for seed in range(6)]
    with _attached(model, kind) as cached:

        def epoch(loader: DataLoader[Any]) -> Iterator[Any]:
            yield from cached.epoch(loader)
            hits.append(cached.stats.hits)

        evaluated = iter([held_out[0], *held_out * 2])  # More than there is place for.
        _train(model, epoch, lambda _: cached.evaluation(next(evaluated)))
    assert hits[-1] == NUM
    assert not caplog.records


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_evaluation_draws_what_its_loader_draws(num_workers: int) -> None:
    def states(*, has_rows: bool) -> list[Tensor]:
        model, found = _model(), list[Tensor]()
        more = {"num_workers": num_workers, "persistent_workers": bool(num_workers)}
        held_out: list[DataLoader[Any]] = [
            DataLoader(_Data(NUM_HELD_OUT, 2), batch_size=3, shuffle=True, **more)
            for _ in range(2)
        ]
        with _attached(model, "parts") as cached:
            torch.manual_seed(0)
            for batch in cached.epoch(DataLoader(_Data(NUM, 1), batch_size=4)):
                model(batch["x"])
                for loader in held_out:
                    _evaluate(model, cached.evaluation(loader) if has_rows else loader)
                    found.append(torch.get_rng_state())
        return found

    for one, other in zip(states(has_rows=True), states(has_rows=False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("is_closed", "kind"),
    [(True, "parts"), (False, "blocks"), slow(True, "blocks"), slow(False, "parts")],
)
def test_an_evaluation_that_is_left_or_stands_open_changes_no_step(
    kind: str, is_closed: bool
) -> None:
    model, plain, kept = _model(), _model(), list[Any]()

    def first_of(loader: Iterable[Any], own: nn.Module) -> list[Any]:
        batches = iter(loader)
        own(next(batches)["x"])
        if not is_closed:
            kept.append(batches)
        return []

    with _attached(plain, kind) as cached:
        expected = _train(plain, cached.epoch, lambda loader: first_of(loader, plain))
    kept.clear()
    with _attached(model, kind) as cached:
        if is_closed:
            evaluated = cached.evaluation
        else:  # A step runs from its start, as an evaluation has the model.

            def evaluated(loader: DataLoader[Any]) -> Any:
                return cached.evaluation(loader) if len(kept) == 3 else loader

        losses = _train(model, cached.epoch, lambda loader: first_of(evaluated(loader), model))
    # From its start a step sums over other numbers of samples.
    assert losses == pytest.approx(expected, rel=0 if is_closed else 1e-5, abs=0)
    if is_closed:
        _assert_equal(model, plain)


def test_evaluations_do_not_nest() -> None:
    model = _model()
    with _attached(model, "parts") as cached:
        loader = DataLoader(_Data(NUM, 1), batch_size=4)
        for batch in cached.epoch(loader):
            model(batch["x"])
        batches = cached.evaluation(_held_out())
        next(batches)
        with pytest.raises(ValueError, match="an evaluation is under way"):
            next(cached.evaluation(_held_out()))
        with pytest.raises(ValueError, match="an evaluation is under way"):
            cached.fill(loader)
        batches.close()  # type: ignore[attr-defined]
        assert len(list(cached.evaluation(_held_out()))) == 3


def test_an_epoch_ends_an_evaluation_that_was_left() -> None:
    model = _model()
    loader, held_out = DataLoader(_Data(NUM, 1), batch_size=4), _held_out()
    with _attached(model, "blocks") as cached:
        for batch in cached.epoch(loader):
            model(batch["x"])
        batches = cached.evaluation(held_out)
        next(batches)
        for batch in cached.epoch(loader):  # Of another depth.
            model(batch["x"])
        assert len(list(cached.evaluation(held_out))) == 3
        with pytest.raises(ValueError, match="has begun an epoch"):
            next(batches)


def test_a_teacher_has_rows_in_an_evaluation() -> None:
    teacher, student = _model(), _model()
    held_out, loader = _held_out(), DataLoader(_Data(NUM, 1), batch_size=4)
    expected = [teacher.eval()(batch["x"]) for batch in held_out]
    with attach(student, parts=[teacher], cache=True) as cached:
        for _ in range(3):
            for batch in cached.epoch(loader):
                teacher(batch["x"])
            runs = RUNS[id(teacher.blocks[0])]
            for batch, answer in zip(cached.evaluation(held_out), expected, strict=True):
                torch.testing.assert_close(teacher(batch["x"]), answer, rtol=1e-6, atol=1e-6)
        assert RUNS[id(teacher.blocks[0])] == runs
        assert cached.stats.hits == NUM


@KINDS
def test_rows_are_filled_without_training_and_kept_for_a_later_run(
    kind: str, tmp_path: Path
) -> None:
    model, plain = _model(), _model()
    with _attached(plain, kind) as cached:
        expected = _train(plain, cached.epoch, lambda _: [])
    loader = DataLoader(_Data(NUM, 1), batch_size=5, shuffle=True)
    settings = {"cache_folder": str(tmp_path), "cache_keep": True}
    with _attached(model, kind, **settings) as cached:
        state = torch.get_rng_state()
        assert cached.fill(loader).misses > 0
        assert cached.fill(loader).hits == NUM
        assert torch.equal(torch.get_rng_state(), state)
    later = _model()
    hits: list[int] = []
    with _attached(later, kind, **settings) as cached:

        def epoch(loader: DataLoader[Any]) -> Iterator[Any]:
            yield from cached.epoch(loader)
            hits.append(cached.stats.hits)

        assert _train(later, epoch, lambda _: []) == expected
    assert hits[0] == NUM
    _assert_equal(later, plain)


def test_what_cannot_be_filled_is_refused() -> None:
    loader = DataLoader(_Data(NUM, 1), batch_size=5)
    with (
        pytest.raises(ValueError, match="nothing is frozen"),
        attach(_model(), freeze=[0, 2]) as a,
    ):
        a.fill(loader)
    named = DataLoader([(one["x"], one["y"], 0) for one in _Data(NUM, 1)], batch_size=5)
    with pytest.raises(ValueError, match="run an epoch"), attach(_model(), freeze=1) as a:
        a.fill(named)
    with pytest.raises(ValueError, match="was closed"):
        a.fill(loader)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters())
    with (
        pytest.raises(ValueError, match="a policy decides"),
        attach(model, freeze="budget:0.7", optimizer=optimizer, num_epochs=2) as a,
    ):
        a.fill(loader)


@KINDS
def test_rows_are_not_filled_within_an_epoch(kind: str) -> None:
    model, loader = _model(), DataLoader(_Data(NUM, 1), batch_size=4)
    with _attached(model, kind) as cached:
        batches = cached.epoch(loader)
        model(next(batches)["x"])
        # Two blocks would freeze as in the next epoch.
        with pytest.raises(ValueError, match="an epoch is under way"):
            cached.fill(loader)
        assert cached.num_frozen == (0 if kind == "parts" else 1)
        batches.close()  # type: ignore[attr-defined]
        cached.fill(loader)


def _fill(folder: str) -> tuple[int, int]:
    loader = DataLoader(_Data(NUM + 1, 1), batch_size=3)
    with attach(_model(), freeze=2, cache_folder=folder, cache_keep=True) as cached:
        first = cached.fill(loader)
    return first.misses, first.hits


def test_two_processes_fill_a_set_together(two_ranks: Pool, tmp_path: Path) -> None:
    found = two_ranks.run(_fill, str(tmp_path))
    # The second one has a sample twice, as all have as many batches.
    assert [sum(counts) for counts in found] == [NUM // 2 + 1] * 2
    assert _fill(str(tmp_path)) == (0, NUM + 1)


def test_an_empty_evaluation_has_no_batch() -> None:
    model = _model()
    with _attached(model, "parts") as cached:
        for batch in cached.epoch(DataLoader(_Data(NUM, 1), batch_size=4)):
            model(batch["x"])
        assert list(cached.evaluation(DataLoader(_Data(0, 2), batch_size=4))) == []
