"""What a part returns for samples together is cut between them only where that is proven."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipetransformer import attach
from tests.helpers.part_models import counted_steps

NUM, BATCH, MOST = 64, 8, 3
RARE = 59
"""It is among the last that have rows, and beside a like one: where a part may do otherwise."""

_Inner = Callable[..., Tensor]


class _Part(nn.Module):
    """What it does between its entries is a function of them, and of what it is told."""

    def __init__(self, inner: _Inner) -> None:
        super().__init__()
        self.linear, self.inner, self.noted = nn.Linear(4, 8), inner, "1"

    def forward(self, x: Tensor, num: Tensor | None = None) -> Tensor:
        counts = [*map(int, self.noted.split())] if num is None else num.tolist()
        return self.linear(self.inner(x, counts)).tanh()


class _Model(nn.Module):
    def __init__(self, inner: _Inner, way: str) -> None:
        super().__init__()
        self.tower, self.head, self.way = _Part(inner), nn.Linear(8, 3), way

    def forward(self, x: Tensor, num: Tensor) -> Tensor:
        tiles, owner = x[x.abs().sum(-1) > 0], torch.arange(len(num)).repeat_interleave(num)
        if self.way == "attribute":
            self.tower.noted = " ".join(map(str, num.tolist()))
        told = {"argument": (num,), "mask": (tiles[:, 0] > 50,)}.get(self.way, ())
        hidden = self.tower(tiles, *told)
        answer: Tensor = self.head(hidden.new_zeros(len(num), 8).index_add(0, owner, hidden))
        return answer


def _apart(x: Tensor, _counts: list[int]) -> Tensor:
    return x


def _mixes_neighbours(x: Tensor, counts: list[int]) -> Tensor:
    for place, (one, other) in enumerate(pairwise(counts)):
        if one == other == 2:
            first, size = sum(counts[:place]), len(x)
            order = [*range(first), *range(first + 2, first + 4), first, first + 1]
            return x[[*order, *range(first + 4, size)]]
    return x


def _sorts_by_size(x: Tensor, counts: list[int]) -> Tensor:
    order = sorted(range(len(counts)), key=counts.__getitem__)
    return torch.cat([x.split(counts)[place] for place in order])


def _turns_many(x: Tensor, _counts: list[int]) -> Tensor:
    return x.flip(0) if len(x) > BATCH else x


def _turned(x: Tensor) -> Tensor:
    """Return entries of which two have changed places, of samples that do not run alone then."""
    return x[[0, 1, 2, 4, 3, *range(5, len(x))]] if len(x) > 4 else x


def _turns_where_large(x: Tensor, _counts: list[int]) -> Tensor:
    return _turned(x) if x.max() > 50 else x


def _turns_as_a_mask_says(x: Tensor, _counts: list[int]) -> Tensor:
    return torch.where((x > 50).any(), _turned(x), x)


def _turns_as_numbers_say(x: Tensor, _counts: list[int]) -> Tensor:
    return _turned(x) if max(x.flatten().tolist()) > 50 else x


def _turns_as_it_is_told(x: Tensor, told: list[int]) -> Tensor:
    return _turned(x) if any(told) else x


def _samples(nums: list[int], *, is_large: bool = False) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    tiles = (
        torch.randn(NUM, MOST, 4) * (torch.arange(MOST) < torch.tensor(nums)[:, None])[..., None]
    )
    if is_large:
        tiles[RARE, 0, 0] = 100.0
    return [
        {"x": one, "num": torch.tensor(num), "y": torch.tensor(place % 3)}
        for place, (one, num) in enumerate(zip(tiles, nums, strict=True))
    ]


def _train(
    model: nn.Module, samples: list[dict[str, Tensor]], *, by_hand: bool = False
) -> list[float]:
    loader: DataLoader[Any] = DataLoader(samples, batch_size=BATCH)  # type: ignore[arg-type]
    model.tower.requires_grad_(False)  # type: ignore[union-attr]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = list[float]()
    with attach(model, parts=["tower"], cache=True) as cached:
        for _ in range(2):
            losses += counted_steps(model, optimizer, loader if by_hand else cached.epoch(loader))
        assert by_hand or cached.stats.hits == NUM
    return losses


def _build(inner: _Inner, way: str) -> _Model:
    torch.manual_seed(0)
    return _Model(inner, way)


def _runs(inner: _Inner, way: str, samples: list[dict[str, Tensor]]) -> list[int]:
    """Return the entries of each run of the part in the last filled batch, beside by hand."""
    plain = _train(_build(inner, way), samples, by_hand=True)
    model, runs = _build(inner, way), list[int]()
    run = model.tower.linear.forward
    model.tower.linear.forward = lambda x: [runs.append(len(x)), run(x)][1]  # type: ignore[method-assign,assignment]
    assert _train(model, samples) == pytest.approx(plain, rel=1e-6, abs=1e-6)
    return runs


_RARELY = [1] * RARE + [2, 2, 1, 1, 2]


@pytest.mark.parametrize("way", ["nothing", "argument"])
@pytest.mark.parametrize("nums", [(2,), (1, 2, 3, 2)], ids=str)
def test_samples_run_together_where_a_chunk_was_cut_like_this_before(
    nums: tuple[int, ...], way: str
) -> None:
    # Of the last two chunks one sample each runs alone, too, and then all of the next.
    *_, one, some, other, more = _runs(_apart, way, _samples([*nums] * (NUM // len(nums))))
    assert (some, more) == (16, 16) and one in nums and other in nums


def test_a_part_that_is_told_otherwise_than_by_arguments_runs_one_by_one() -> None:
    assert _runs(_apart, "attribute", _samples([2] * NUM))[-9:] == [*[2] * 8, 16]


@pytest.mark.parametrize("way", ["argument", "attribute"])
@pytest.mark.parametrize("inner", [_mixes_neighbours, _sorts_by_size])
def test_a_part_that_mixes_samples_of_some_sizes_alone_is_refused(inner: _Inner, way: str) -> None:
    with pytest.raises(ValueError, match="'tower' return other entries for samples of one batch"):
        _train(_build(inner, way), _samples(_RARELY))


def test_a_part_that_mixes_samples_of_so_many_entries_is_refused() -> None:
    with pytest.raises(ValueError, match="'tower' return other entries for samples of one batch"):
        _train(_build(_turns_many, "nothing"), _samples(_RARELY))


@pytest.mark.parametrize(
    ("inner", "way"),
    [
        (_turns_where_large, "nothing"),
        (_turns_as_a_mask_says, "nothing"),
        (_turns_as_numbers_say, "nothing"),
        (_turns_as_it_is_told, "mask"),
    ],
)
def test_a_part_that_mixes_samples_of_some_values_alone_is_refused(
    inner: _Inner, way: str
) -> None:
    with pytest.raises(ValueError, match="'tower' return other entries for samples of one batch"):
        _train(_build(inner, way), _samples([2] * NUM, is_large=True))
