"""Rows of any number of entries are a sample's own, or there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipetransformer import attach
from tests.helpers.marks import slow
from tests.helpers.part_models import counted_steps

NUM, TILES = 12, 3
RARELY = (1, 1, 1, 1, 1, 1, 1, 2, 0)
"""Tiles of samples; the few that are looked at before the start have one."""

_Forward = Callable[["_Model", Tensor, Tensor], Tensor]


class _Model(nn.Module):
    """What it makes of a tower's answers begins at zero, as LoRA's and Flamingo's gates do."""

    def __init__(self, forward: _Forward, gate: float) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head, self.gate = nn.Linear(8, 3), nn.Parameter(torch.tensor([gate]))
        self.own = forward

    def forward(self, x: Tensor, num: Tensor) -> Tensor:
        answer: Tensor = self.head(self.gate * self.own(self, x, num))
        return answer


def _summed(hidden: Tensor, num: Tensor) -> Tensor:
    owner = torch.arange(len(num)).repeat_interleave(num)
    # Whatever else there is, as of a model that counts on its own, has no owner.
    return hidden.new_zeros(len(num), 8).index_add(0, owner, hidden[: len(owner)])


def _by_mask(model: _Model, x: Tensor, num: Tensor) -> Tensor:
    return _summed(model.tower(x[x.abs().sum(-1) > 0]), num)


def _by_list(model: _Model, x: Tensor, num: Tensor) -> Tensor:
    rows = [own[:n] for own, n in zip(x, num.tolist(), strict=True)]
    return _summed(model.tower(torch.cat(rows)), num)


def _by_item(model: _Model, x: Tensor, num: Tensor) -> Tensor:
    rows = [own[:n] for own, n in zip(x, num, strict=True)]
    return _summed(model.tower(torch.cat(rows)), num)


def _left_out(model: _Model, x: Tensor, num: Tensor) -> Tensor:
    is_tile = x.abs().sum(-1) > 0
    if not is_tile.any():
        return x.new_zeros(len(x), 8)
    return _summed(model.tower(x[is_tile]), num)


def _never_none(model: _Model, x: Tensor, num: Tensor) -> Tensor:
    is_tile = x.abs().sum(-1) > 0
    if not is_tile.any():  # As SmolVLM keeps one.
        is_tile[0, 0] = True
    return _summed(model.tower(x[is_tile]), num)


def _tiles_first(model: _Model, x: Tensor, num: Tensor) -> Tensor:
    hidden = model.tower(x.transpose(0, 1).flatten(0, 1)).view(TILES, len(x), 8)
    return (hidden * torch.arange(1.0, TILES + 1)[:, None, None]).sum(0)


def _mixing(model: _Model, x: Tensor, num: Tensor) -> Tensor:
    tiles = x.flatten(0, 1)
    return model.tower(tiles - tiles.mean(0)).view(len(x), TILES, 8).mean(1)


def _sorting(model: _Model, x: Tensor, num: Tensor) -> Tensor:
    order = num.argsort(descending=True, stable=True)
    return model.tower(x.sum(1)[order])[order.argsort()]


@dataclass(frozen=True)
class _Run:
    losses: list[float]
    weights: list[Tensor]
    hits: int


def _run(forward: _Forward, gate: float, nums: Sequence[int], *, by_hand: bool) -> _Run:
    torch.manual_seed(0)
    model, samples = _Model(forward, gate), list[dict[str, Tensor]]()
    for index in range(NUM):
        num = nums[index % len(nums)]
        tiles = torch.randn(TILES, 4) * (torch.arange(TILES) < num)[:, None]
        samples.append({"x": tiles, "num": torch.tensor(num), "y": torch.tensor(index % 3)})
    loader: DataLoader[Any] = DataLoader(samples, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    model.tower.requires_grad_(False)
    optimizer = torch.optim.SGD([model.gate, *model.head.parameters()], lr=0.1)
    losses, hits = list[float](), 0
    with attach(model, parts=["tower"], cache=True) as cached:
        for _ in range(3):
            losses += counted_steps(model, optimizer, loader if by_hand else cached.epoch(loader))
        hits = cached.stats.hits
    return _Run(losses, [p.detach() for p in model.parameters()], hits)


def _hits(forward: _Forward, gate: float, nums: Sequence[int]) -> int:
    """Return the hits of the last epoch, of a training as by hand."""
    plain, ours = (_run(forward, gate, nums, by_hand=by_hand) for by_hand in (True, False))
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5, abs=1e-6)
    for one, other in zip(ours.weights, plain.weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    return ours.hits


GATES = pytest.mark.parametrize("gate", [0.0, 1.0])


@GATES
@pytest.mark.parametrize("nums", [(1, 2, 3), slow(RARELY), slow((1,))], ids=str)
@pytest.mark.parametrize("forward", [_by_mask, _by_list, _by_item, _left_out])
def test_rows_of_any_number_of_entries_change_nothing(
    forward: _Forward, nums: Sequence[int], gate: float
) -> None:
    # Counts of a batch may add up to its samples by chance.
    assert _hits(forward, gate, nums) == NUM


@GATES
@pytest.mark.parametrize("forward", [_tiles_first, _mixing])
def test_entries_of_samples_together_are_those_of_each_alone(
    forward: _Forward, gate: float
) -> None:
    # Behind a gate of zero the model's own answer does not show it.
    assert _hits(forward, gate, (1, 2, 3)) == 0


def test_samples_that_a_model_sorts_have_rows_where_that_changes_nothing() -> None:
    assert _hits(_sorting, 1.0, (1,)) == NUM
    assert _hits(_sorting, 1.0, (1, 2, 3)) == 0
    with pytest.raises(ValueError, match="'tower' return other entries for samples of one batch"):
        _run(_sorting, 1.0, RARELY, by_hand=False)


def test_a_sample_that_has_other_entries_alone_is_refused() -> None:
    assert _hits(_never_none, 1.0, (1, 2, 3)) == NUM
    with pytest.raises(ValueError, match="'tower' return other entries for samples of one batch"):
        _run(_never_none, 1.0, RARELY, by_hand=False)


def test_a_chunk_that_is_filled_up_runs_no_sample_again() -> None:
    model, runs = _Model(_by_mask, 1.0), list[int]()
    run = model.tower.forward
    model.tower.forward = lambda x: [runs.append(len(x)), run(x)][1]  # type: ignore[method-assign,assignment]
    samples = [{"x": torch.randn(2, 4), "num": torch.tensor(2), "y": n} for n in range(5)]
    with attach(model, parts=["tower"], cache=True, prefix_chunk=4) as cached:
        batches = cached.epoch(DataLoader(samples, batch_size=4))  # type: ignore[arg-type]
        next(batches)
        runs.clear()
        next(batches)  # One sample, with a mate.
    assert runs == [2, 2, 4]


def test_samples_that_have_nothing_for_a_part_are_named_where_these_are_looked_at() -> None:
    with pytest.raises(ValueError, match="calls 'tower' not at all for two samples"):
        _run(_left_out, 1.0, (0, 1, 2), by_hand=False)
