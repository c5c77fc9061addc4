"""Prove that every rank knows its place, and that its groups are those of its place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autodp.groups import open_links
from autodp.topology import Topology
from autopipe.plan.request import fitting_lengths, length_choices, replicas_of
from tests.helpers.pool import Pool

CLUSTERS = [(num_ranks, slots) for num_ranks in range(1, 25) for slots in range(1, 10)]


def topologies() -> list[Topology]:
    return [
        Topology(num_ranks, slots, length)
        for num_ranks, slots in CLUSTERS
        for length in fitting_lengths(num_ranks, slots)
    ]


def test_grid_of_the_docstring() -> None:
    topology = Topology(8, 8, 2)
    assert topology.replicas == 4
    assert topology.stage_ranks(0) == (0, 2, 4, 6)
    assert topology.stage_ranks(1) == (1, 3, 5, 7)
    assert topology.pipelines[1] == (2, 3)


@pytest.mark.parametrize(
    ("num_ranks", "slots", "length", "pipelines", "spares"),
    [
        (3, 3, 2, [(0, 1)], (2,)),
        (6, 3, 2, [(0, 1), (3, 4)], (2, 5)),
        (7, 7, 3, [(0, 1, 2), (3, 4, 5)], (6,)),
        (12, 4, 8, [tuple(range(8))], (8, 9, 10, 11)),
        (6, 4, 3, [(0, 1, 2)], (3, 4, 5)),
    ],
)
def test_what_a_length_leaves_over_is_spare(
    num_ranks: int,
    slots: int,
    length: int,
    pipelines: list[tuple[int, ...]],
    spares: tuple[int, ...],
) -> None:
    topology = Topology(num_ranks, slots, length)
    assert topology.replicas == len(pipelines)
    assert list(topology.pipelines) == pipelines
    assert [topology.stage_ranks(j) for j in range(length)] == [*zip(*pipelines, strict=True)]
    assert topology.spares == spares
    for rank in spares:
        assert (topology.stage_of(rank), topology.replica_of(rank)) == (length, len(pipelines))
    for replica, ranks in enumerate(pipelines):
        assert [topology.stage_of(rank) for rank in ranks] == [*range(length)]
        assert {topology.replica_of(rank) for rank in ranks} == {replica}
        assert not any(map(topology.is_spare, ranks))


def test_most_replicas_leave_the_others_ranks_spare() -> None:
    topology = Topology(6, 3, 1, max_replicas=2)
    assert topology.replicas == 2
    assert topology.stage_ranks(0) == (0, 1)
    assert topology.spares == (2, 3, 4, 5)


def test_the_planner_counts_replicas_as_the_topology_does() -> None:
    for num_ranks, slots in CLUSTERS:
        exact, *others = length_choices(num_ranks, slots)
        assert exact == fitting_lengths(num_ranks, slots)
        assert not any(Topology(num_ranks, slots, length).spares for length in exact)
        trained = [
            {length * Topology(num_ranks, slots, length).replicas for length in lengths}
            for lengths in others
        ]
        assert all(len(used) == 1 for used in trained)
        assert trained == sorted(trained, key=max, reverse=True)
        for length in range(1, num_ranks + 1):
            replicas = replicas_of(length, num_ranks, slots)
            assert (replicas > 0) == any(length in lengths for lengths in (exact, *others))
            if replicas:
                assert replicas == Topology(num_ranks, slots, length).replicas


def test_every_rank_is_one_stage_of_one_replica() -> None:
    for topology in topologies():
        for rank in range(topology.num_ranks):
            stage, replica = topology.stage_of(rank), topology.replica_of(rank)
            assert rank == replica * topology.length + stage
            assert topology.pipelines[replica][stage] == rank
            assert topology.stage_ranks(stage)[replica] == rank


def test_pipelines_and_stage_groups_both_partition_the_world() -> None:
    for topology in topologies():
        everyone = list(range(topology.num_ranks))
        pipelines = list(topology.pipelines)
        stages = [topology.stage_ranks(j) for j in range(topology.length)]
        assert sorted(rank for ranks in pipelines for rank in ranks) == everyone
        assert sorted(rank for ranks in stages for rank in ranks) == everyone
        assert {len(ranks) for ranks in pipelines} == {topology.length}
        assert {len(ranks) for ranks in stages} == {topology.replicas}


def test_a_pipeline_stays_on_its_node_or_fills_whole_nodes() -> None:
    for topology in topologies():
        for replica in range(topology.replicas):
            ranks = topology.pipelines[replica]
            nodes = {rank // topology.slots_per_node for rank in ranks}
            if topology.length <= topology.slots_per_node:
                assert len(nodes) == 1
            else:
                assert len(nodes) * topology.slots_per_node == len(ranks)


def test_lengths_that_divide_the_world_and_fit_its_nodes_leave_no_rank_idle() -> None:
    assert fitting_lengths(8, 8) == (1, 2, 4, 8)
    assert fitting_lengths(16, 8) == (1, 2, 4, 8, 16)
    assert fitting_lengths(12, 4) == (1, 2, 4, 12)
    assert fitting_lengths(6, 6) == (1, 2, 3, 6)
    assert fitting_lengths(6, 4) == (1, 2)
    assert fitting_lengths(7, 7) == (1, 7)
    assert fitting_lengths(1, 8) == (1,)


@pytest.mark.parametrize("length", [-2, 0, 5, 6, 16])
def test_a_length_that_does_not_fit_is_refused_with_the_ones_that_do(length: int) -> None:
    with pytest.raises(
        ValueError,
        match=rf"length {length} does not fit 12 ranks with 4 slots a "
        r"node; choose one of \[1, 2, 3, 4, 8, 12\]",
    ):
        Topology(12, 4, length)


@pytest.mark.parametrize(("num_ranks", "slots"), [(0, 1), (1, 0), (-1, 4)])
def test_a_cluster_without_ranks_or_slots_is_refused(num_ranks: int, slots: int) -> None:
    with pytest.raises(ValueError, match=f"got {num_ranks} ranks and {slots} slots"):
        Topology(num_ranks, slots, 1)


def open_both_ways() -> bool:
    ranks = range(dist.get_world_size())
    for order in (ranks, ranks[::-1]):
        open_links(order, dist.get_rank(), group=dist.group.WORLD, device=torch.device("cpu"))
    return True


def test_opening_the_links_of_a_pipeline_blocks_no_stage(four_ranks: Pool) -> None:
    assert all(four_ranks.run(open_both_ways))
