"""Prove that no pipeline of all has a higher simulated rate than the one that is chosen."""

from __future__ import annotations

import random

import pytest

from autopipe.pipedream import (
    CutState,
    Machines,
    ReplicatedStage,
    fastest_simulated,
    optimize,
    simulated_s,
)
from tests.autopipe.pipedream.test_stage_search import all_pipelines, chain


def some_chain(random_: random.Random, num: int) -> tuple[CutState, ...]:
    """Make layers that computing, sums or transfers may decide on."""
    return chain(
        [
            (random_.uniform(0.1, 1), 10 ** random_.uniform(7, 9.5), 10 ** random_.uniform(3, 10))
            for _ in range(num)
        ]
    )


@pytest.mark.parametrize("levels", [(1, 4), (4, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_no_pipeline_one_names_is_faster(seed: int, levels: tuple[int, int]) -> None:
    states = some_chain(random.Random(seed), 5)
    cluster = [Machines(levels[0], 1e10), Machines(levels[1], 1e9)]
    every_s: dict[tuple[int, ...], float] = {}
    for stages in all_pipelines(5, 4):
        named = tuple(ReplicatedStage(*stage) for stage in stages)
        workers = tuple(stage.replicas for stage in named)
        seconds = simulated_s(states, named, cluster)
        every_s[workers] = min(every_s.get(workers, seconds), seconds)
    chosen = fastest_simulated(states, cluster)
    # A stream has an end, at which a rate may be a little higher than the bound.
    assert chosen.seconds <= 1.01 * min(every_s.values())
    assert chosen.seconds == simulated_s(states, chosen.stages, cluster)
    for workers, least_s in every_s.items():
        plan = fastest_simulated(states, cluster, workers=workers)
        assert tuple(leaf.replicas for leaf in plan.leaves) == workers
        assert least_s <= plan.seconds <= 1.01 * least_s
    for hidden_sums in (False, True):
        other = optimize(states, cluster, activations=True, hidden_sums=hidden_sums)
        assert chosen.seconds <= simulated_s(states, other.stages, cluster)


def test_a_limit_of_memory_excludes_stages_whose_versions_do_not_fit() -> None:
    # Two versions of the lower stage exceed it; replicas of one stage keep none.
    states, cluster = chain([(1, 0, 100), (1, 0, 100)]), [Machines(2, 1e3)]
    assert fastest_simulated(states, cluster, memory_bytes=100).name == "straight"
    assert fastest_simulated(states, cluster, memory_bytes=99).name == "data parallel"
    with pytest.raises(ValueError, match=r"no pipeline of \(1, 1\) workers fits"):
        fastest_simulated(states, cluster, workers=(1, 1), memory_bytes=99)


def test_workers_of_another_cluster_are_refused() -> None:
    states, cluster = chain([(1, 0, 0)] * 2), [Machines(2, 1e9)]
    with pytest.raises(ValueError, match=r"\(2, 1\) are not the workers of 2 machines"):
        fastest_simulated(states, cluster, workers=(2, 1))


def test_a_search_that_is_too_long_ends_with_what_the_rules_choose_or_better() -> None:
    states, cluster = some_chain(random.Random(1), 14), [Machines(4, 1e10), Machines(3, 1e9)]
    chosen = fastest_simulated(states, cluster)
    for hidden_sums in (False, True):
        other = optimize(states, cluster, activations=True, hidden_sums=hidden_sums)
        assert chosen.seconds <= simulated_s(states, other.stages, cluster)
