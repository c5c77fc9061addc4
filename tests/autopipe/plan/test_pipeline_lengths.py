"""Prove that a described cluster's sums are priced by the links that each stage's ring passes."""

from __future__ import annotations

from typing import Any

import pytest

from autodp.topology import Topology
from autopipe.plan.explanation import explain
from autopipe.plan.request import PlanRequest, length_choices
from autopipe.plan.search import predict
from autopipe.profile.network import LinkCost, RingCost
from tests.helpers.costs import profile, sublayer


def test_a_part_of_a_node_is_filled_as_a_node_of_its_size_is() -> None:
    assert length_choices(6, 8) == length_choices(6, 6) == ((1, 2, 3, 6), (5,), (4,))
    assert length_choices(8, 4) == ((1, 2, 4, 8), (3,))


LINK, NODE_LINK = LinkCost(1.0, 64.0), LinkCost(3.0, 32.0)
LAYER_BYTES = 4096


def summed_s(num_ranks: int, slots: int, length: int, **changes: Any) -> float:
    """Plan one layer of 4096 bytes a stage for a described cluster, and return its sums' part."""
    layers = [sublayer(index, parameter_bytes=LAYER_BYTES) for index in range(length)]
    costs = profile(*layers, all_reduce=RingCost(LINK, NODE_LINK))
    asked = PlanRequest(num_ranks, slots, 96, 0, **changes)
    cuts = tuple(range(length + 1))
    plan = predict(costs, asked, boundaries=cuts, num_micro_batches=1, schedule="1f1b")
    return explain(costs, asked, plan).parts.all_reduce_s


def ring_s(ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """Add up 2 (R - 1) messages of 1 / R of a stage's bytes."""
    return 2 * (ranks - 1) * (latency_s + LAYER_BYTES / ranks / bytes_per_s)


@pytest.mark.parametrize(
    ("length", "ranks", "sharing"), [(1, 8, 1), (2, 4, 2), (4, 2, 4), (3, 2, 3)]
)
def test_rings_over_nodes_share_their_link_with_those_of_the_other_stages(
    length: int, ranks: int, sharing: int
) -> None:
    # Where three stages leave a slot of each node idle, three rings share a node's link.
    assert summed_s(8, 4, length) == pytest.approx(ring_s(ranks, 3.0, 32 / sharing))


def test_pipelines_over_nodes_share_a_node_s_link_as_often_as_it_has_slots() -> None:
    # 8 stages of 2 ranks each: a node has 4 of them, whose partners are two nodes away.
    assert summed_s(16, 4, 8) == pytest.approx(ring_s(2, 3.0, 32 / 4))


def test_workers_of_a_stage_on_one_node_do_not_pay_for_the_link_between_nodes() -> None:
    workers = (2, 2, 2, 2)
    assert summed_s(8, 4, 4, stage_workers=workers) == pytest.approx(ring_s(2, 1.0, 64.0))
    assert summed_s(8, 4, 2, stage_workers=(4, 4)) == pytest.approx(ring_s(4, 1.0, 64.0))


def test_only_the_stage_whose_workers_live_on_two_nodes_pays_for_the_link_between_them() -> None:
    # Ranks 3 and 4 are of stage 1, and no other ring leaves a node.
    assert summed_s(8, 4, 3, stage_workers=(3, 2, 3)) == pytest.approx(
        max(ring_s(3, 1.0, 64.0), ring_s(2, 3.0, 32.0))
    )
    # Stage 0 has ranks 0 to 2, stage 1 ranks 3 to 5, stage 2 ranks 6 to 8, stage 3 the others:
    # on the second node two rings share the link.
    assert summed_s(12, 4, 4, stage_workers=(3, 3, 3, 3)) == pytest.approx(ring_s(3, 3.0, 32 / 2))


@pytest.mark.parametrize("length", [1, 2])
def test_pipelines_that_a_limit_leaves_on_one_node_stay_off_the_link_between_nodes(
    length: int,
) -> None:
    assert summed_s(8, 4, length, max_replicas=2) == pytest.approx(ring_s(2, 1.0, 64.0))


@pytest.mark.parametrize(("length", "most"), [(1, 5), (1, 7), (2, 3), (4, 2)])
def test_pipelines_that_a_limit_leaves_on_two_nodes_share_the_link_as_rings_run(
    length: int, most: int
) -> None:
    expected_s = ring_s(most, 3.0, 32 / length)
    assert summed_s(8, 4, length, max_replicas=most) == pytest.approx(expected_s)


def leaving(topology: Topology) -> list[int]:
    """Count for each stage how many rings leave the busiest of its nodes; 0 where its stays."""
    slots = topology.slots_per_node
    rings = [topology.stage_ranks(stage) for stage in range(topology.length)]
    edges = [
        {
            a // slots
            for a, b in zip(ranks, ranks[1:] + ranks[:1], strict=True)
            if a // slots != b // slots
        }
        for ranks in rings
    ]
    return [
        max((sum(node in other for other in edges) for node in own), default=0) for own in edges
    ]


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("most", [None, 1, 2, 3])
def test_rings_are_those_of_the_ranks_that_train(slots: int, nodes: int, most: int | None) -> None:
    num_ranks = slots * nodes
    asked = PlanRequest(num_ranks, slots, 96, 0, max_replicas=most)
    possible = [n for n in range(1, num_ranks + 1) if n <= slots or n % slots == 0]
    for length in possible:
        topology = Topology(num_ranks, slots, length, most)
        rings = asked.rings_of(length)
        assert [ring.num_ranks for ring in rings] == [topology.replicas] * length
        assert [ring.num_sharing for ring in rings] == leaving(topology)


@pytest.mark.parametrize("workers", [(5, 1), (1, 5), (2, 2, 2), (1, 3, 2), (6,), (1, 4, 1)])
@pytest.mark.parametrize("slots", [1, 2, 3, 6])
def test_rings_of_shared_stages_are_those_of_their_workers(
    workers: tuple[int, ...], slots: int
) -> None:
    asked = PlanRequest(6, slots, 96, 0, stage_workers=workers)
    topology = Topology(6, slots, len(workers), stage_workers=workers)
    rings = asked.rings_of(len(workers))
    assert [ring.num_ranks for ring in rings] == list(workers)
    assert [ring.num_sharing for ring in rings] == leaving(topology)
