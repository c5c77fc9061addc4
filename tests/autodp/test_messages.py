"""Prove that plain values arrive as they were sent, whoever sends them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autodp import messages
from autodp.messages import broadcast_json, broadcast_tensor, gather_json
from tests.helpers.pool import Pool

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


TENSORS = {
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7),
    "bfloat16": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "empty": torch.empty(0, 4),
    "large": torch.arange(1000, dtype=torch.float64).view(10, 100),
}


def spread(name: str, source: int) -> Tensor:
    """Return what a rank's tensor is on this one, in messages of 64 bytes."""
    tensor = TENSORS[name].clone()
    if dist.get_rank() != source:
        tensor.zero_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "_MESSAGE_BYTES", 64)
        broadcast_tensor(tensor, source, group=dist.group.WORLD, what="its numbers")
    return tensor


@pytest.mark.parametrize("name", TENSORS)
def test_a_rank_s_tensor_arrives_bit_by_bit_in_several_messages(
    four_ranks: Pool, name: str
) -> None:
    for received in four_ranks.run(spread, name, 2):
        assert received.dtype == TENSORS[name].dtype
        assert torch.equal(received, TENSORS[name])


def test_one_process_keeps_its_tensor() -> None:
    tensor = TENSORS["large"].clone()
    broadcast_tensor(tensor, 0, group=None, what="its numbers")
    assert torch.equal(tensor, TENSORS["large"])
