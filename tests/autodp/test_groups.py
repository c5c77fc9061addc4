"""Prove that groups are built once, ahead where that costs nothing, and none is left behind."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import autodp.groups
from autodp.groups import GroupPool, Groups, build_groups
from autodp.topology import Topology
from autopipe.plan.request import fitting_lengths
from tests.helpers.pool import Pool


def pool(timeout_s: float = 30.0) -> GroupPool:
    """Build a pool over the world of a test, two slots a node."""
    world_size = dist.get_world_size()
    return GroupPool(
        dist.get_rank(),
        [Topology(world_size, 2, length) for length in fitting_lengths(world_size, 2)],
        on_cuda=False,
        timeout_s=timeout_s,
    )


def members(groups: Groups) -> list[list[int] | None]:
    """Return the ranks of the pipeline's group and of the stage's."""
    return [
        None if group is None else dist.get_process_group_ranks(group)
        for group in (groups.forward, groups.stage)
    ]


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def open_all(lengths: list[int], most_connections: int) -> dict[str, list[object]]:
    """Open topologies in turn; return members, sums over them, and how many were built by then."""
    found: dict[str, list[object]] = {"members": [], "sums": [], "built": [], "left": []}
    before = num_groups()
    with (
        patch.object(autodp.groups, "_MOST_CONNECTIONS", most_connections),
        patch.object(dist, "new_group", wraps=dist.new_group) as new_group,
    ):
        groups_pool = pool()
        for length in lengths:
            groups = groups_pool.open(Topology(dist.get_world_size(), 2, length), timeout_s=20.0)
            found["members"].append(members(groups))
            assert groups.forward is groups.backward
            found["built"].append(new_group.call_count)
            sums = []
            for group in (groups.forward, groups.stage):
                total = torch.tensor([dist.get_rank()])
                if group is not None:
                    dist.all_reduce(total, group=group)
                sums.append(int(total))
            found["sums"].append(sums)
        groups_pool.close()
    found["left"].append(num_groups() - before)
    return found


def expected_members(length: int, rank: int) -> list[list[int] | None]:
    topology = Topology(4, 2, length)
    pipeline = topology.pipelines[topology.replica_of(rank)]
    stage = topology.stage_ranks(topology.stage_of(rank))
    return [list(ranks) if len(ranks) > 1 else None for ranks in (pipeline, stage)]


@pytest.mark.parametrize("most_connections", [512, 0])
def test_groups_are_those_of_each_topology_however_often_it_comes(
    four_ranks: Pool, most_connections: int
) -> None:
    lengths = [2, 1, 1, 4, 2, 4]
    for rank, found in enumerate(four_ranks.run(open_all, lengths, most_connections)):
        expected = [expected_members(length, rank) for length in lengths]
        assert found["members"] == expected
        assert found["sums"] == [[sum(r) if r else rank for r in pair] for pair in expected]
        assert found["left"] == [0]


def test_over_gloo_all_groups_are_built_by_the_first_call(four_ranks: Pool) -> None:
    # K = 1: a stage of 4. K = 2: two stages and two pipelines of 2. K = 4: a pipeline of 4.
    for found in four_ranks.run(open_all, [2, 1, 4, 2], 512):
        assert found["built"] == [6, 6, 6, 6]


def test_elsewhere_groups_are_built_only_where_the_length_changes(four_ranks: Pool) -> None:
    for found in four_ranks.run(open_all, [2, 2, 1, 1, 4], 0):
        assert found["built"] == [4, 4, 5, 5, 6]


def wait_in_a_group(limits_s: list[float]) -> None:
    """Open a topology with one limit after the other, and wait in vain."""
    groups_pool = pool(timeout_s=60.0)
    for limit_s in limits_s:
        groups = groups_pool.open(Topology(2, 2, 1), timeout_s=limit_s)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="1000ms"):
            dist.all_reduce(torch.zeros(1), group=groups.stage)
    dist.barrier()
    groups_pool.close()


def test_waits_fail_after_the_limit_of_the_present_plan(two_ranks: Pool) -> None:
    two_ranks.run(wait_in_a_group, [60.0, 1.0])


def backends_of_groups(backend: str | None) -> list[str]:
    """Return what the groups of a pool are made with."""
    topology = Topology(2, 2, 2)
    groups_pool = GroupPool(
        dist.get_rank(), [topology], on_cuda=False, timeout_s=30.0, backend=backend
    )
    groups = groups_pool.open(topology, timeout_s=20.0)
    found = dist.get_backend_config(groups.forward)
    dist.barrier()  # A rank that closes at once would break the other's connecting.
    groups_pool.close()
    return [found, dist.get_backend_config()]


def test_groups_have_the_backend_asked_for_or_else_the_default_group_s(two_ranks: Pool) -> None:
    for found, default in two_ranks.run(backends_of_groups, None):
        assert found == default != "cpu:gloo"
    for found, _ in two_ranks.run(backends_of_groups, "cpu:gloo"):
        assert found == "cpu:gloo"


def seconds_of_new_groups(ahead: bool) -> list[float]:
    """Return what building has taken, after each of a few topologies."""
    of_length = [Topology(2, 2, length) for length in (1, 2)]
    groups_pool = GroupPool(
        dist.get_rank(), of_length if ahead else (), on_cuda=False, timeout_s=30.0
    )
    found = []
    for topology in (of_length[0], of_length[0], of_length[1]):
        groups_pool.open(topology, timeout_s=20.0)
        found.append(groups_pool.rebuild_s)
        dist.barrier()
    groups_pool.close()
    return found


def test_groups_that_are_not_built_ahead_tell_what_new_ones_take(two_ranks: Pool) -> None:
    for first, again, other in two_ranks.run(seconds_of_new_groups, False):
        assert 0 < first == again != other > 0
    assert two_ranks.run(seconds_of_new_groups, True) == [[0.0] * 3] * 2


def test_one_process_has_no_groups() -> None:
    groups_pool = GroupPool(0, [Topology(1, 1, 1)], on_cuda=False, timeout_s=1.0)
    groups = groups_pool.open(Topology(1, 1, 1), timeout_s=1.0)
    assert groups == Groups(None, None, None)
    groups_pool.close()


def test_groups_are_aborted_all_at_the_same_time() -> None:
    together = threading.Barrier(4)  # Each abort ends only when all have begun.
    aborted: list[str] = []

    def group(name: str) -> Any:
        return SimpleNamespace(abort=lambda: (together.wait(30.0), aborted.append(name)))

    Groups(group("forward"), group("backward"), group("stage"), group("everyone")).abort()
    assert sorted(aborted) == ["backward", "everyone", "forward", "stage"]


@pytest.mark.parametrize("length", [1, 2])
def test_on_gpus_spares_too_take_part_in_making_every_group(length: int) -> None:
    topology = Topology(3, 3, length, max_replicas=1 if length == 2 else None)
    made: dict[int, list[Any]] = {}
    summed = []
    for rank in range(3):
        calls = made.setdefault(rank, [])

        def own_group(
            members: Any, rank: int, timeout_s: float, backend: Any, calls: list[Any] = calls
        ) -> Any:
            calls.append(members)
            own = next((ranks for ranks in members if rank in ranks), ())
            return own if len(own) > 1 else None

        with (
            patch.object(autodp.groups, "_own_group", own_group),
            patch.object(autodp.groups, "open_links"),
            patch.object(dist, "all_reduce", lambda tensor, group: summed.append(group)),
            FakeTensorMode(),
        ):
            build_groups(topology, rank, on_cuda=True, timeout_s=1.0)
    assert made[0] == made[1] == made[2] and len(made[0]) == (3 if length == 1 else 4)
    # Sums of replicas, and of all, begin before any of them may be without samples.
    assert summed == [(0, 1, 2)] * 3
