"""Prove that a run's request gets PipeDream's stages, or is told why it cannot."""

from __future__ import annotations

import dataclasses

import pytest

from autopipe.pipedream import pipedream_stages, plan_as_pipedream, question_of
from autopipe.plan import plan_pipeline, predict
from autopipe.profile.network import LinkCost
from autopipe.profile.profile import Profile
from tests.costs import profile, request, sublayer

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
    assert [leaf.to_json() for leaf in pipedream_stages(heavy_end(), asked)] == [
        [0, 3, 3], [3, 4, 1],
    ]  # fmt: skip
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
    assert [node.compute_s for node in found.graph.nodes] == pytest.approx(
        [21.6, 16.8, 33.6, 24.0]
    )


def test_what_does_not_fit_is_refused() -> None:
    asked = request(4, stage_workers=(3, 1), lengths=(2,))
    # The optimizer counts a last stage's stashed weights alone, of which it has none.
    small = dataclasses.replace(asked, memory_limit_bytes=10**6)
    with pytest.raises(ValueError, match=r"stages of 3-1 workers, needs \d+ bytes on a slot"):
        plan_as_pipedream(heavy_end(), small)
    with pytest.raises(ValueError, match="needs 4 micro-batches of 3 samples"):
        plan_as_pipedream(heavy_end(), dataclasses.replace(asked, global_batch=3))
