"""Prove that every sublayer is held by exactly the ranks that need it, under any plan."""

from __future__ import annotations

import itertools

import pytest

from autodp.topology import Topology
from autopipe.plan.request import fitting_lengths
from pipetransformer.elastic.shards import (
    OPTIMIZER,
    WEIGHTS,
    Ownership,
    shard_name,
    split_shard_name,
)

NAMES = (
    "embed",
    "blocks.0/attention",
    "blocks.0/mlp",
    "blocks.1/attention",
    "blocks.1/mlp",
    "head",
)


def placements() -> list[Ownership]:
    """Make every cut of the active sublayers for many worlds, lengths and frozen prefixes."""
    found = []
    for num_ranks, slots in ((1, 1), (2, 2), (4, 4), (6, 3), (8, 4)):
        for length, frozen in itertools.product(fitting_lengths(num_ranks, slots), range(6)):
            inner = range(frozen + 1, len(NAMES))
            for cuts in itertools.combinations(inner, length - 1):
                boundaries = (frozen, *cuts, len(NAMES))
                found.append(Ownership(NAMES, Topology(num_ranks, slots, length), boundaries))
    return found


PLACEMENTS = placements()


def expected_ranks(ownership: Ownership, index: int) -> set[int]:
    """Say who holds a sublayer's weights, rank by rank: rank % K is the stage."""
    bounds, length = ownership.boundaries, ownership.topology.length
    return {
        rank
        for rank in range(ownership.topology.num_ranks)
        if bounds[rank % length] <= index < bounds[rank % length + 1]
        or index < bounds[0]
        and rank % length == 0
    }


def test_many_plans_are_compared() -> None:
    assert len(PLACEMENTS) > 100


def test_weights_are_held_by_exactly_the_ranks_that_run_them() -> None:
    for ownership in PLACEMENTS:
        shards = ownership.shards()
        assert len(shards) == 2 * len(NAMES)
        for index, name in enumerate(NAMES):
            ranks = expected_ranks(ownership, index)
            assert ranks and shards[shard_name(name, WEIGHTS)] == ranks
            assert {
                rank
                for rank in range(ownership.topology.num_ranks)
                if index in ownership.held_by(rank)
            } == ranks


def test_optimizer_state_is_at_every_trainer_and_a_frozen_one_s_at_the_owner_alone() -> None:
    for ownership in PLACEMENTS:
        shards = ownership.shards()
        for index, name in enumerate(NAMES):
            is_frozen = index < ownership.boundaries[0]
            ranks = expected_ranks(ownership, index)
            assert shards[shard_name(name, OPTIMIZER)] == ({min(ranks)} if is_frozen else ranks)


def test_parked_are_the_frozen_sublayers_whose_only_optimizer_state_a_rank_has() -> None:
    for ownership in PLACEMENTS:
        shards = ownership.shards()
        for rank in range(ownership.topology.num_ranks):
            expected = [
                index
                for index, name in enumerate(NAMES)
                if index < ownership.boundaries[0]
                and shards[shard_name(name, OPTIMIZER)] == {rank}
            ]
            assert list(ownership.parked_by(rank)) == expected


def test_each_pipeline_trains_every_active_sublayer_once_and_no_frozen_one() -> None:
    for ownership in PLACEMENTS:
        for replica in range(ownership.topology.replicas):
            trained = [
                index
                for rank in ownership.topology.pipelines[replica]
                for index in ownership.trained_by(rank)
            ]
            assert trained == list(range(ownership.boundaries[0], len(NAMES)))


def test_held_sublayers_are_in_order_with_the_frozen_prefix_on_stage_0() -> None:
    ownership = Ownership(NAMES, Topology(4, 4, 2), (2, 4, 6))
    assert [ownership.held_by(rank) for rank in range(4)] == [(0, 1, 2, 3), (4, 5)] * 2


@pytest.mark.parametrize(
    "boundaries",
    [(), (0, 6), (0, 2, 4, 6), (0, 3, 5), (0, 3, 7), (3, 3, 6), (4, 3, 6), (2, 6, 6), (-1, 3, 6)],
)
def test_a_planner_s_boundaries_that_leave_a_stage_or_a_sublayer_out_are_refused(
    boundaries: tuple[int, ...],
) -> None:
    with pytest.raises(ValueError, match=r"length 2 has boundaries \(.*must give 3 that ascend"):
        Ownership(NAMES, Topology(2, 2, 2), boundaries)


@pytest.mark.parametrize("kind", [WEIGHTS, OPTIMIZER])
@pytest.mark.parametrize("name", NAMES)
def test_a_shard_s_name_gives_back_its_sublayer_and_kind(name: str, kind: str) -> None:
    assert split_shard_name(shard_name(name, kind)) == (name, kind)
