"""Prove what recomputing saves and costs in predictions, and that plans do it where it pays."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from autopipe.plan import candidates, explain, plan_as_published, plan_pipeline, predict
from autopipe.plan.request import PipelinePlan
from autopipe.profile.profile import Profile
from tests.helpers.costs import profile, request, sublayer, uniform

NEVER, AUTO, ALWAYS = (False,), (False, True), (True,)


def layers(num: int = 4, **changes: Any) -> Profile:
    """Save 10 bytes a sample, of which the input is 4."""
    return profile(*(sublayer(n, output_bytes=4.0, **changes) for n in range(num)))


def predicted(model: Profile, *, recomputes: bool, **changes: Any) -> PipelinePlan:
    """Predict two micro-batches of 8 samples."""
    shape = {"boundaries": (0, 4), "num_micro_batches": 2, "schedule": "gpipe", **changes}
    wanted = request(len(shape["boundaries"]) - 1)
    return predict(model, wanted, recomputes=recomputes, **shape)


def test_a_stage_keeps_inputs_and_what_its_largest_sublayer_saves() -> None:
    weights = 4 * 400
    (plain,) = predicted(layers(), recomputes=False).peak_bytes
    assert plain == weights + 16 * (4 * 10 + 4)
    # The first sublayer's input is the batch; the head keeps all, and its output counts.
    (less,) = predicted(layers(), recomputes=True).peak_bytes
    assert less == weights + 16 * (0 + 4 + 4 + 10 + 4)
    # A sublayer that saves more than the head needs the rest while it runs again.
    large = profile(*layers().sublayers[:2], sublayer(2, saved_bytes=50.0), sublayer(3))
    (more,) = predicted(large, recomputes=True).peak_bytes
    assert more == weights + 16 * (0 + 4 + 4 + 10) + 8 * (50 - 10)


def test_each_stage_keeps_the_inputs_of_its_micro_batches_in_flight() -> None:
    shape: dict[str, Any] = {"boundaries": (0, 2, 4), "num_micro_batches": 4, "schedule": "1f1b"}
    first, last = predicted(layers(), recomputes=True, **shape).peak_bytes
    # Two in flight of 4 samples below, one above, where the head's 10 bytes are freed in time.
    assert first == 2 * 400 + 8 * (0 + 4 + 4) + 4 * 10
    assert last == 2 * 400 + 4 * (4 + 10 + 4)


def test_cast_weights_are_held_once_for_the_largest_sublayer() -> None:
    cast = profile(*(sublayer(n, copy_bytes=50 * (n == 1)) for n in range(4)))
    copied = predicted(cast, recomputes=True).peak_bytes[0]
    assert copied - predicted(layers(), recomputes=True).peak_bytes[0] == 50 - 16 * 3 * 4


def test_a_step_takes_the_repeated_forwards_longer_but_not_the_head_s() -> None:
    assert predicted(layers(), recomputes=False).predicted_step_s == 16 * 4 * 3.0
    assert predicted(layers(), recomputes=True).predicted_step_s == 16 * (3 * 4.0 + 3.0)


def test_a_sublayer_that_recomputes_by_itself_saves_memory_and_costs_no_more_time() -> None:
    own = profile(*layers().sublayers[:1], *(layers(recomputes=True).sublayers[1:3]), sublayer(3))
    plain, again = (predicted(own, recomputes=one) for one in (False, True))
    assert plain.predicted_step_s == 16 * 4 * 3.0
    assert again.predicted_step_s == 16 * (4 * 3.0 + 1.0)  # The first one alone repeats anew.
    assert plain.peak_bytes[0] == 4 * 400 + 16 * (10 + 4 + 4 + 10)


def test_without_a_limit_nothing_is_recomputed() -> None:
    for ranks in (1, 2, 4):
        wanted = request(ranks)
        free = plan_pipeline(layers(8), request(ranks, recompute=AUTO))
        assert free == plan_pipeline(layers(8), wanted)
        assert candidates(layers(8), wanted) == candidates(
            layers(8), request(ranks, recompute=AUTO)
        )


def test_a_limit_that_nothing_else_fits_is_met_by_recomputing() -> None:
    limited: dict[str, Any] = {"micro_batches": (1,), "memory_limit_bytes": 8 * 400 + 700}
    with pytest.raises(ValueError, match=r"add device slots, recompute activations or freeze"):
        plan_pipeline(layers(8), request(1, **limited))
    plan = plan_pipeline(layers(8), request(1, recompute=AUTO, **limited))
    assert plan.recomputes and plan.peak_bytes[0] <= limited["memory_limit_bytes"]
    assert plan.manner == "1f1b, recomputed"
    limited["memory_limit_bytes"] = 8 * 400
    with pytest.raises(ValueError, match=r"\(1f1b, recomputed\), needs .* slots or freeze more"):
        plan_pipeline(layers(8), request(1, recompute=AUTO, **limited))


def test_more_micro_batches_are_taken_where_they_cost_less_than_recomputing() -> None:
    wanted: dict[str, Any] = {"memory_limit_bytes": 8 * 400 + 700, "recompute": AUTO}
    plan = plan_pipeline(layers(8), request(1, **wanted))
    assert not plan.recomputes and plan.num_micro_batches > 1


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_fastest_of_both_kinds_that_fits(seed: int) -> None:
    generator = random.Random(seed)
    model = profile(
        *(
            sublayer(n, forward_s=generator.uniform(0.5, 2), output_bytes=generator.uniform(0, 9))
            for n in range(generator.randint(4, 9))
        )
    )
    wanted: dict[str, Any] = {
        "memory_limit_bytes": generator.randint(800, 2500),
        "num_frozen": generator.randint(0, 2),
    }
    kinds = [candidates(model, request(4, recompute=one, **wanted)) for one in (NEVER, ALWAYS)]
    plans = [plan for kind in kinds for plan in kind]
    if not plans:
        with pytest.raises(ValueError, match="no plan fits"):
            plan_pipeline(model, request(4, recompute=AUTO, **wanted))
        return
    best = plan_pipeline(model, request(4, recompute=AUTO, **wanted))
    assert best.predicted_step_s <= 1.01 * min(plan.predicted_step_s for plan in plans)
    assert best in plans


def test_the_published_rules_recompute_where_no_count_fits_without() -> None:
    limit = {"memory_limit_bytes": 4 * 400 + 600}
    with pytest.raises(ValueError, match="above memory_limit_bytes"):
        plan_as_published(layers(8), request(2, **limit))
    plan = plan_as_published(layers(8), request(2, recompute=AUTO, **limit))
    assert plan.recomputes and (plan.length, plan.schedule) == (2, "gpipe")


def test_the_explanation_parts_the_repeated_forwards_from_the_others() -> None:
    wanted = request(2, recompute=ALWAYS)
    plan = plan_pipeline(uniform(8), wanted)
    parts = explain(uniform(8), wanted, plan).parts
    times = vars(parts)
    assert sum(times.values()) == pytest.approx(plan.predicted_step_s)
    assert parts.recompute_s == pytest.approx(parts.compute_s * 7 / 24)
    once = plan_pipeline(uniform(8), request(2))
    assert explain(uniform(8), request(2), once).parts.recompute_s == 0.0


def test_a_plan_goes_through_json_and_one_of_before_recomputes_nothing() -> None:
    plan = plan_pipeline(uniform(8), request(2, recompute=ALWAYS))
    values = json.loads(json.dumps(plan.to_json()))
    assert PipelinePlan.from_json(values) == plan and plan.recomputes
    del values["recomputes"]
    assert not PipelinePlan.from_json(values).recomputes


def test_a_choice_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"recompute is \(\); give \(False,\), \(True,\) or"):
        request(2, recompute=())
