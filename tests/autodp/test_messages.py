"""Prove that plain values arrive as they were sent, whoever sends them."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from autodp.messages import broadcast_json, gather_json
from tests.pool import Pool

VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**60,
    0.1,
    1e-300,
    math.pi,
    "",
    'Grüße, 世界\n"',
    [],
    {},
    {"step": 3, "plan": {"boundaries": [0, 4, 9], "speed": 1 / 3}},
    ["x" * 100_000],
]


def broadcast(values: list[Any]) -> list[Any]:
    own = dist.get_rank() == 0
    return [broadcast_json(value if own else object(), group=dist.group.WORLD) for value in values]


def gather(ragged: bool) -> list[list[Any]]:
    rank = dist.get_rank()
    values = [{"rank": rank, "text": "ä" * (1000 * rank if ragged else 5)}, None, rank / 3]
    return [gather_json(value, group=dist.group.WORLD) for value in values]


def test_every_rank_receives_the_value_of_rank_0(two_ranks: Pool) -> None:
    for received in two_ranks.run(broadcast, VALUES):
        assert received == VALUES


def test_values_that_are_not_numbers_arrive(two_ranks: Pool) -> None:
    for received in two_ranks.run(broadcast, [math.inf, -math.inf, math.nan]):
        assert received[:2] == [math.inf, -math.inf]
        assert math.isnan(received[2])


def test_every_rank_gathers_all_values_in_rank_order(four_ranks: Pool) -> None:
    for ragged in (False, True):
        for objects, nothing, numbers in four_ranks.run(gather, ragged):
            assert [entry["rank"] for entry in objects] == [0, 1, 2, 3]
            assert [len(entry["text"]) for entry in objects] == [
                1000 * rank if ragged else 5 for rank in range(4)
            ]
            assert nothing == [None] * 4
            assert numbers == [rank / 3 for rank in range(4)]


def gather_in_groups() -> list[Any]:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2]
    assert isinstance(group, dist.ProcessGroup)
    gathered = gather_json(rank, group=group)
    dist.destroy_process_group(group)
    return gathered


def test_a_group_s_ranks_gather_among_themselves(four_ranks: Pool) -> None:
    assert four_ranks.run(gather_in_groups) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_one_process_gets_the_same_plain_values_as_a_world() -> None:
    assert broadcast_json({"plan": (1, 2)}, group=None) == {"plan": [1, 2]}
    assert gather_json((1, 2), group=None) == [[1, 2]]
