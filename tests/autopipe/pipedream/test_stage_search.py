"""Prove the optimizer against hand-computed pipelines, against trying all, and for requests."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest

from autopipe.pipedream import (
    CutState,
    Machines,
    data_parallel_s,
    optimize,
    pipedream_stages,
    plan_as_pipedream,
    question_of,
)
from autopipe.plan import plan_pipeline, predict
from autopipe.profile.network import LinkCost
from autopipe.profile.profile import Profile
from tests.helpers.costs import profile, request, sublayer


def chain(costs: Sequence[tuple[float, float, float]]) -> tuple[CutState, ...]:
    """Build the cuts of a chain of (seconds, output bytes, parameter bytes)."""
    seconds, outputs, weights = zip(*costs, strict=True)
    names = tuple(f"n{i}" for i in range(len(costs)))
    return tuple(
        CutState(
            names[:end],
            tuple(range(end - 1)),
            *(sum(values[:end]) for values in (seconds, outputs, weights)),
            outputs[end - 1],
            sum(seconds[:end]) / 3,
        )
        for end in range(1, len(costs) + 1)
    )


def test_two_equal_layers_are_a_straight_pipeline() -> None:
    plan = optimize(chain([(1, 0, 1e9), (1, 0, 1e9)]), [Machines(2, 1e9)])
    assert plan.name == "straight" and plan.seconds == 1.0
    assert [stage.to_json() for stage in plan.stages] == [[0, 1, 1], [1, 2, 1]]
    # (2 + 4 x 2e9 / (1e9 x 2)) / 2
    assert plan.data_parallel_s == 3.0 and plan.single_machine_s == 2.0


def test_a_stage_of_twice_the_work_has_two_replicas() -> None:
    # Figure: 2-1 on three machines where weights are small below and large above.
    states = chain([(2, 0, 0), (1, 0, 1e9)])
    plan = optimize(states, [Machines(3, 1e9)])
    assert plan.name == "2-1" and plan.seconds == 1.0
    straight = optimize(states, [Machines(2, 1e9)], straight=True)
    assert straight.seconds == 2.0
    with pytest.raises(ValueError, match="cannot be cut into 3 stages"):
        optimize(states, [Machines(3, 1e9)], straight=True)


def test_small_weights_make_data_parallelism_best() -> None:
    plan = optimize(chain([(3, 1e9, 1), (1, 1e9, 1)]), [Machines(4, 1e9)], activations=True)
    assert plan.name == "data parallel"
    assert plan.seconds == plan.data_parallel_s == pytest.approx(1.0)


def test_transfers_count_where_they_are_asked_for() -> None:
    states = chain([(1, 3e9, 1e9), (1, 0, 1e9)])
    assert optimize(states, [Machines(2, 1e9)]).seconds == 1.0
    # 2 x 3 s between the stages; all in one stage costs (2 + 4) / 2.
    found = optimize(states, [Machines(2, 1e9)], activations=True)
    assert (found.name, found.seconds) == ("data parallel", 3.0)


# ResNet-50 by blocks, 128 images: ms, bytes out, bytes of parameters. Sums over the layers of
# PipeDream's published profile (msr-fiddle/pipedream, MIT), without its input.
RESNET50 = [
    (26.9, 102760448, 38144),
    (42.9, 411041792, 300032), (33.1, 411041792, 281600), (35.6, 411041792, 281600),
    (46.3, 205520896, 1517568), (20.3, 205520896, 1120256), (19.8, 205520896, 1120256),
    (21.6, 205520896, 1120256),
    (40.1, 102760448, 6049792), (17.4, 102760448, 4468736), (16.3, 102760448, 4468736),
    (16.3, 102760448, 4468736), (16.2, 102760448, 4468736), (17.3, 102760448, 4468736),
    (35.4, 51380224, 24158208), (17.0, 51380224, 17850368), (19.2, 51380224, 17850368),
    (1.6, 512000, 8196000),
]  # fmt: skip


@pytest.mark.parametrize(
    "levels",
    [[Machines(4, 12e9), Machines(4, 1.25e9)], [Machines(8, 25e9), Machines(2, 3.125e9)]],
    ids=["A", "B"],
)
@pytest.mark.parametrize("activations", [False, True])
def test_the_papers_rule_replicates_resnet50_as_published(
    levels: list[Machines], activations: bool
) -> None:
    states = chain([(ms / 1e3, out, weights) for ms, out, weights in RESNET50])
    plan = optimize(states, levels, activations=activations, hidden_sums=True)
    assert plan.name == "data parallel"
    assert plan.seconds == plan.data_parallel_s == pytest.approx(0.4433 / 16)
    # The published program adds sums to compute, and so finds stages.
    assert optimize(states, levels, activations=activations).name != "data parallel"


def test_memory_excludes_stages_whose_versions_do_not_fit() -> None:
    states = chain([(1, 0, 100), (1, 0, 100)])
    assert optimize(states, [Machines(2, 1e9)], memory_bytes=100).name == "straight"
    # The last stage keeps no second version, the first one 1 of 100 bytes.
    assert optimize(states, [Machines(2, 1e9)], memory_bytes=99).name == "data parallel"


def test_levels_multiply_replicas() -> None:
    # Each server is best as 2 replicas of one stage; between servers weights are too slow.
    states = chain([(2, 0, 1e6), (2, 0, 1e6)])
    plan = optimize(states, [Machines(2, 1e12), Machines(2, 1e3)])
    assert [stage.to_json() for stage in plan.stages] == [[0, 1, 1], [1, 2, 1]]
    assert plan.name == "2-2" and plan.seconds == pytest.approx(1.0, rel=1e-4)
    assert [leaf.to_json() for leaf in plan.leaves] == [[0, 1, 2], [1, 2, 2]]


def all_pipelines(num: int, machines: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield every way to cut num states into stages with replicas, using all machines."""
    for length in range(1, min(num, machines) + 1):
        for cuts in itertools.combinations(range(1, num), length - 1):
            bounds = list(itertools.pairwise((0, *cuts, num)))
            for splits in itertools.combinations(range(1, machines), length - 1):
                counts = [b - a for a, b in itertools.pairwise((0, *splits, machines))]
                yield [(a, b, r) for (a, b), r in zip(bounds, counts, strict=True)]


def slowest(
    costs: Sequence[tuple[float, float, float]],
    stages: Sequence[tuple[int, int, int]],
    rate: float,
    activations: bool,
    hidden_sums: bool = False,
) -> float:
    """Return a pipeline's seconds, written down stage by stage."""
    worst = 0.0
    for begin, end, replicas in stages:
        compute = sum(one[0] for one in costs[begin:end])
        weights = sum(one[2] for one in costs[begin:end])
        sums = 4 * (replicas - 1) * weights / (rate * replicas)
        worst = max(worst, (max(compute, sums) if hidden_sums else compute + sums) / replicas)
        # A transfer is shared among the machines of the stage that takes it, and of the one that
        # sends it where that is not the first.
        if activations and begin:
            worst = max(worst, 2 * costs[begin - 1][1] / (rate * replicas))
        if activations and begin and end < len(costs):
            worst = max(worst, 2 * costs[end - 1][1] / (rate * replicas))
    return worst


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("hidden_sums", [False, True])
def test_no_pipeline_of_all_is_faster(seed: int, activations: bool, hidden_sums: bool) -> None:
    random_ = random.Random(seed)
    costs = [
        (random_.uniform(0.1, 2), random_.uniform(0, 1e9), random_.uniform(0, 1e9))
        for _ in range(random_.randint(2, 6))
    ]
    machines, rate = random_.randint(1, 6), 10 ** random_.uniform(8, 10.5)
    states = chain(costs)
    plan = optimize(
        states, [Machines(machines, rate)], activations=activations, hidden_sums=hidden_sums
    )
    expected = min(
        slowest(costs, stages, rate, activations, hidden_sums)
        for stages in all_pipelines(len(costs), machines)
    )
    assert plan.seconds == pytest.approx(expected, rel=1e-12)
    own = [(stage.begin, stage.end, stage.replicas) for stage in plan.stages]
    assert slowest(costs, own, rate, activations, hidden_sums) == pytest.approx(
        expected, rel=1e-12
    )
    assert own[0][0] == 0 and own[-1][1] == len(costs) and sum(r for *_, r in own) == machines


@pytest.mark.parametrize("seed", range(12))
def test_no_stage_is_planned_without_work_and_no_pipeline_of_those_that_have_some_is_faster(
    seed: int,
) -> None:
    random_ = random.Random(seed)
    costs = [
        (random_.choice([0.0, random_.uniform(0.1, 2)]), random_.uniform(0, 1e9), 1e9)
        for _ in range(6)
    ]
    costs[3] = (1.3, *costs[3][1:])
    machines, rate = random_.randint(2, 6), 10 ** random_.uniform(7, 9)
    plan = optimize(chain(costs), [Machines(machines, rate)], activations=True)
    working = [
        stages
        for stages in all_pipelines(len(costs), machines)
        if all(any(one[0] for one in costs[begin:end]) for begin, end, _ in stages)
    ]
    expected = min(slowest(costs, stages, rate, True) for stages in working)
    assert [(stage.begin, stage.end, stage.replicas) for stage in plan.stages] in working
    assert plan.seconds == pytest.approx(expected, rel=1e-12)


def test_a_dropout_that_costs_nothing_is_no_stage_of_one_machine_of_a_server() -> None:
    # The published program gives each of the three a machine or two: 2-1-1.
    states = chain([(0.4, 1e8, 1e6), (0.0, 1e8, 0.0), (0.2, 1e6, 4e8)])
    plan = optimize(states, [Machines(2, 1e9), Machines(2, 1e8)], activations=True)
    assert plan.name == "2-2" and plan.seconds == 2.0


def test_a_graph_without_enough_work_for_the_stages_is_refused() -> None:
    idle = chain([(1, 0, 0), (0, 0, 0)])
    assert [leaf.to_json() for leaf in optimize(idle, [Machines(1, 1e9)]).leaves] == [[0, 2, 1]]
    with pytest.raises(ValueError, match="cannot be cut into 2 stages that all compute"):
        optimize(idle, [Machines(2, 1e9)], straight=True)
    with pytest.raises(ValueError, match="no node of the graph takes any time"):
        optimize(chain([(0, 0, 0)] * 2), [Machines(2, 1e9)])


def test_data_parallelism_over_levels_sums_level_by_level() -> None:
    states = chain([(8, 0, 1e9)])
    found = data_parallel_s(states, [Machines(2, 1e9), Machines(4, 1e8)])
    inner = (8 + 4 * 1e9 / (1e9 * 2)) / 2
    assert found == pytest.approx((inner + 4 * 3 * 1e9 / (1e8 * 4) / 2) / 4)
    plan = optimize(states, [Machines(2, 1e9), Machines(4, 1e8)])
    assert plan.name == "data parallel" and plan.seconds == pytest.approx(found)


@pytest.mark.parametrize("count", [0, -1])
def test_levels_that_cannot_be_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="give at least one"):
        Machines(count, 1e9)
    with pytest.raises(ValueError, match="a rate above 0"):
        Machines(2, math.nan)
    with pytest.raises(ValueError, match="there are no machines"):
        optimize(chain([(1, 0, 0)]), [])


def test_nothing_that_fits_is_said() -> None:
    with pytest.raises(ValueError, match="no pipeline fits 1 bytes"):
        optimize(chain([(1, 0, 100)] * 3), [Machines(2, 1e9)], memory_bytes=1, straight=True)


LINK = LinkCost(0.0, 1e3)


def heavy_end(num_layers: int = 4) -> Profile:
    """Give the last layer weights that no link sums in time; the others are uneven, and light."""
    layers = [
        sublayer(layer, forward_s=(0.9, 0.7, 1.4)[layer % 3], parameter_bytes=1)
        for layer in range(num_layers - 1)
    ]
    heavy = sublayer(num_layers - 1, parameter_bytes=10**6)
    return profile(*layers, heavy, link=LINK, node_link=LINK)


def light(num_layers: int = 3) -> Profile:
    """Make layers that four slots cannot share as evenly as replicas do."""
    layers = [sublayer(layer, parameter_bytes=1) for layer in range(num_layers)]
    return profile(*layers, link=LINK, node_link=LINK)


def test_heavy_weights_end_in_a_stage_of_one_worker() -> None:
    asked = request(4, stage_workers=(3, 1), lengths=(2,))
    for hidden_sums in (False, True):
        stages = pipedream_stages(heavy_end(), asked, hidden_sums=hidden_sums)
        assert [leaf.to_json() for leaf in stages] == [[0, 3, 3], [3, 4, 1]]
    plan = plan_as_pipedream(heavy_end(), asked)
    assert plan.boundaries == (0, 3, 4) and plan.schedule == "1f1b"
    fastest = min(
        predict(
            heavy_end(), asked, boundaries=(0, 3, 4), num_micro_batches=m, schedule="1f1b"
        ).predicted_step_s
        for m in (4, 8, 12, 16)
    )
    assert plan.predicted_step_s == fastest


def test_counts_that_are_asked_for_are_the_only_ones() -> None:
    asked = request(4, stage_workers=(3, 1), lengths=(2,), micro_batches=(3, 6))
    assert plan_as_pipedream(heavy_end(), asked).num_micro_batches in (3, 6)


def test_light_weights_make_replicas_of_one_stage() -> None:
    asked = request(4, lengths=(1,))
    assert [leaf.to_json() for leaf in pipedream_stages(light(), asked)] == [[0, 3, 4]]
    assert plan_as_pipedream(light(), asked) == plan_pipeline(light(), asked)


def test_workers_that_are_given_are_kept_where_the_optimizer_would_choose_others() -> None:
    asked = request(4, num_frozen=1, stage_workers=(2, 2), lengths=(2,))
    assert [leaf.replicas for leaf in pipedream_stages(heavy_end(), asked)] != [2, 2]
    plan = plan_as_pipedream(heavy_end(), asked)
    assert plan == plan_pipeline(heavy_end(), asked) and plan.length == 2


def test_a_minibatch_is_a_slot_s_and_levels_are_the_cluster_s() -> None:
    asked = request(8, slots_per_node=4, global_batch=64)
    found = question_of(heavy_end(), asked)
    assert found.minibatch == 8 and [level.count for level in found.levels] == [4, 2]
    assert [state.compute_s for state in found.states] == pytest.approx([21.6, 38.4, 72.0, 96.0])


def test_what_does_not_fit_is_refused() -> None:
    asked = request(4, stage_workers=(3, 1), lengths=(2,))
    # The optimizer counts a last stage's stashed weights alone, of which it has none.
    small = dataclasses.replace(asked, memory_limit_bytes=10**6)
    with pytest.raises(ValueError, match=r"stages of 3-1 workers, needs \d+ bytes on a slot"):
        plan_as_pipedream(heavy_end(), small)
    with pytest.raises(ValueError, match="needs 4 micro-batches of 3 samples"):
        plan_as_pipedream(heavy_end(), dataclasses.replace(asked, global_batch=3))
