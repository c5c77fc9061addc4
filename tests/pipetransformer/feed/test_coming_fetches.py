"""Claims about what is known of the fetches to come."""

from __future__ import annotations

import torch
from torch import Tensor

from pipetransformer.feed.coming_fetches import FollowedFetches, with_later

STEPS = [(epoch, torch.arange(first, first + 2)) for epoch in (0, 1) for first in range(0, 24, 2)]


def test_what_is_later_ends_with_the_epoch_and_after_some_fetches() -> None:
    fetches = list(with_later(STEPS))
    assert [(fetch.epoch, fetch.ids.tolist()) for fetch in fetches] == [
        (epoch, ids.tolist()) for epoch, ids in STEPS
    ]
    assert fetches[0].later.tolist() == [*range(2, 18)]
    assert fetches[9].later.tolist() == [20, 21, 22, 23]
    assert fetches[11].later.tolist() == []
    assert fetches[12].later.tolist() == [*range(2, 18)]


def test_fetches_are_followed_and_others_begin_anew() -> None:
    begun = []

    def to_come() -> list[tuple[int, Tensor]]:
        begun.append(position)
        return STEPS[position:]

    position = 0
    followed = FollowedFetches(to_come)
    assert followed.later(*STEPS[0])[:2].tolist() == [2, 3]
    assert followed.later(*STEPS[1])[:2].tolist() == [4, 5]
    position = 6
    assert followed.later(*STEPS[6])[:2].tolist() == [14, 15]
    assert begun == [0, 6]
    assert not len(followed.later(0, torch.tensor([5, 9])))
    position = 3
    followed.forget()
    assert followed.later(*STEPS[3])[:2].tolist() == [8, 9]
    assert begun == [0, 6, 6, 3]
