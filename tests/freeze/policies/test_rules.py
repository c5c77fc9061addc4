"""Prove the freeze rules against the published tables, hand-computed cases, and their contract."""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from freeze import AlphaSchedule, FreezeSchedule, Guarded, PaperRule
from freeze.policies.arguments import rounded_up
from freeze.policy import (
    FreezeContext,
    FreezeDecision,
    FreezePolicy,
    NeverFreeze,
    PolicyError,
    as_policy,
    checked_decision,
)
from tests.helpers.freezing import FALLING, make_context

# L = 12, T = 1, 2, ...: published with the paper's rule.
GOLDEN = {
    1 / 2: [6, 9, 11, 12],
    2 / 5: [5, 8, 10, 11, 12],
    1 / 3: [4, 7, 9, 10, 11, 11, 12],
    1 / 4: [3, 6, 7, 9, 10, 10, 11, 11, 12],
    1 / 5: [3, 5, 6, 8, 9, 9, 10, 10, 11],
}


def run_policy(policy: FreezePolicy, norms_per_epoch: Sequence[Sequence[float]]) -> list[int]:
    """Return what is frozen after each epoch 1, 2, ..., executing every decision."""
    frozen = [0]
    for epoch, norms in enumerate(norms_per_epoch, start=1):
        context = make_context(norms, epoch=epoch, num_frozen=frozen[-1])
        frozen.append(checked_decision(policy, context).num_frozen)
    return frozen[1:]


@pytest.mark.parametrize("alpha", GOLDEN)
def test_closed_form_equals_published_table(alpha: float) -> None:
    assert run_policy(AlphaSchedule(alpha), [FALLING] * len(GOLDEN[alpha])) == GOLDEN[alpha]


@pytest.mark.parametrize("alpha", GOLDEN)
def test_paper_rule_equals_closed_form_until_only_last_layer_is_active(alpha: float) -> None:
    published = [min(num_frozen, 11) for num_frozen in GOLDEN[alpha]]
    assert run_policy(PaperRule(alpha), [FALLING] * len(published)) == published


def test_closed_form_freezes_nothing_in_the_first_epoch() -> None:
    assert checked_decision(AlphaSchedule(1 / 3), make_context(epoch=0)).num_frozen == 0


@pytest.mark.parametrize(
    ("smallest", "expected"),
    [
        # Layer 0 has the smallest gradient: nothing freezes, however large alpha is.
        ([0], [0]),
        # L_f(1) = min(6, 2) = 2; L_f(2) = min(2 + 5, 11) = 7; L_f(3) = min(7 + 2.5, 8) = 8.
        ([2, 11, 8], [2, 7, 8]),
        # L_f(1) = 6; L_f(2) = min(9, 7) = 7; L_f(3) = min(9.5, 7) = 7; L_f(4) = 9.5, rounded 10.
        ([11, 7, 7, 11], [6, 7, 7, 10]),
    ],
)
def test_smallest_gradient_stops_the_freeze_below_its_layer(
    smallest: list[int], expected: list[int]
) -> None:
    norms = [[0.1 if index == layer else 1.0 for index in range(12)] for layer in smallest]
    assert run_policy(PaperRule(1 / 2), norms) == expected


def test_argmin_ignores_frozen_and_parameterless_layers_and_takes_lowest_of_equals() -> None:
    layers = list(make_context([5.0, 0.0, 3.0, 2.0, 2.0]).layers)
    layers[0] = dataclasses.replace(layers[0], gradient_norm=0.1)
    layers[1] = dataclasses.replace(layers[1], num_parameters=0)
    context = dataclasses.replace(
        make_context([1.0] * 5), layers=tuple(layers), num_frozen=1, frozen_since=(0,)
    )
    # Starts from the one frozen layer: min(1 + 0.9 * 4, 3) = 3.
    assert checked_decision(PaperRule(0.9), context).num_frozen == 3


def test_real_valued_level_survives_rounding() -> None:
    policy = PaperRule(1 / 5)
    assert run_policy(policy, [FALLING] * 2) == [3, 5]
    # 12 * (1 - 0.8^2); from the rounded 3 and 5 it would be 4.8 and 6.4.
    assert policy.state_dict()["level"] == pytest.approx(4.32)


@pytest.mark.parametrize(("level", "expected"), [(6.000000001, 6), (6.001, 7), (0.0, 0)])
def test_rounding_error_does_not_freeze_a_layer(level: float, expected: int) -> None:
    assert rounded_up(level) == expected


def test_paper_rule_never_thaws_on_random_gradients() -> None:
    draw = random.Random(0)
    for _ in range(50):
        norms = [[draw.random() for _ in range(12)] for _ in range(12)]
        frozen = run_policy(PaperRule(draw.uniform(0.05, 0.95)), norms)
        assert frozen == sorted(frozen)


def test_paper_rule_starts_anew_from_what_something_else_thawed() -> None:
    policy = PaperRule(1 / 2)
    assert run_policy(policy, [FALLING] * 2) == [6, 9]
    assert checked_decision(policy, make_context(num_frozen=2)).num_frozen == 7


def test_paper_rule_takes_no_decision_at_step_0_nor_without_any_gradient() -> None:
    policy = PaperRule(1 / 2)
    assert policy.decide(make_context(epoch=0)) is None
    unmeasured = checked_decision(policy, make_context([None] * 12))
    assert unmeasured == FreezeDecision(0, "keep: no active layer has a measured gradient")
    assert policy.state_dict() == {"level": 0.0, "num_decisions": 0}


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_paper_rule_rejects_gradient_norms_it_cannot_compare(bad: float | None) -> None:
    with pytest.raises(ValueError, match=r"step 1 .* missing or not finite: \{4: (None|nan|inf)"):
        PaperRule(1 / 2).decide(make_context([*FALLING[:4], bad, *FALLING[5:]]))


def test_paper_rule_continues_identically_from_its_state_as_json() -> None:
    draw = random.Random(1)
    norms = [[draw.random() for _ in range(12)] for _ in range(4)] + [FALLING] * 4
    whole = PaperRule(1 / 5)
    expected = run_policy(whole, norms)
    first, second = PaperRule(1 / 5), PaperRule(1 / 5)
    frozen = run_policy(first, norms[:5])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for epoch, epoch_norms in enumerate(norms[5:], start=6):
        context = make_context(epoch_norms, epoch=epoch, num_frozen=frozen[-1])
        frozen.append(checked_decision(second, context).num_frozen)
    assert frozen == expected
    assert second.state_dict() == whole.state_dict()


def test_state_of_another_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="PaperRule was given a state with the keys"):
        PaperRule(1 / 2).load_state_dict({})
    with pytest.raises(ValueError, match="AlphaSchedule was given a state"):
        AlphaSchedule(1 / 2).load_state_dict(PaperRule(1 / 2).state_dict())
    AlphaSchedule(1 / 2).load_state_dict(AlphaSchedule(1 / 2).state_dict())


def test_schedule_holds_its_last_entry_and_may_thaw() -> None:
    assert run_policy(FreezeSchedule([0, 2, 5, 3]), [FALLING] * 5) == [2, 5, 3, 3, 3]
    assert run_policy(FreezeSchedule({4: 6, 2: 1}), [FALLING] * 5) == [0, 1, 1, 6, 6]


def test_schedule_beyond_the_layers_is_refused_at_the_first_call() -> None:
    with pytest.raises(ValueError, match=r"up to 13 layers, but 12 layers .* 0\.\.12"):
        FreezeSchedule([0, 4, 13]).decide(make_context(epoch=0))


@pytest.mark.parametrize("alpha", [0, 1, -0.5, float("nan")])
def test_alpha_outside_0_and_1_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha is .* between 0 and 1"):
        PaperRule(alpha)
    with pytest.raises(ValueError, match="alpha is .* between 0 and 1"):
        AlphaSchedule(alpha)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(TypeError, match="an epoch of the freeze schedule is '3'"):
        FreezeSchedule({"3": 4})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="is empty"):
        FreezeSchedule([])


def test_none_becomes_never_and_a_policy_stays_itself() -> None:
    policy = PaperRule(1 / 3)
    assert as_policy(policy) is policy
    assert isinstance(as_policy(None), NeverFreeze)
    decision = checked_decision(as_policy(None), make_context(num_frozen=3))
    assert decision == FreezeDecision(3, "keep")


def half_of_them(context: FreezeContext) -> int:
    """Freeze half the layers."""
    return context.num_layers // 2


def test_function_may_return_number_decision_or_none() -> None:
    policy = as_policy(half_of_them)
    assert policy.signals == {"gradient_norm"}
    assert policy.decide(make_context()) == FreezeDecision(6, "half_of_them returned 6")
    kept = checked_decision(policy, make_context(num_frozen=6))
    assert kept == FreezeDecision(6, "keep: half_of_them returned 6")
    decision = FreezeDecision(2, "why")
    assert checked_decision(as_policy(lambda context: decision), make_context()) == decision
    assert as_policy(lambda context: None).decide(make_context()) is None


@pytest.mark.parametrize("wrong", [3, "auto", [0, 2, 4], PaperRule])
def test_anything_else_is_no_policy(wrong: Any) -> None:
    with pytest.raises(
        TypeError, match=r"no freeze policy; pass an instance .*PaperRule\(1 / 3\)"
    ) as caught:
        as_policy(wrong)
    assert "FreezeSchedule([0, 2, 4])" in str(caught.value)
    assert 'freeze.named_policy("auto")' in str(caught.value)


def test_a_policy_that_raises_is_found_by_file_and_line() -> None:
    class Beyond(FreezePolicy):
        def decide(self, context: FreezeContext) -> FreezeDecision:
            return FreezeDecision(int(self.norm(context)), "")

        def norm(self, context: FreezeContext) -> float:
            return statistics.mean([])

    line = inspect.getsourcelines(Beyond.norm)[1] + 1
    for policy in (Beyond(), Guarded(Beyond())):
        with pytest.raises(PolicyError, match="raised StatisticsError at step 1") as caught:
            checked_decision(policy, make_context())
        assert str(caught.value).endswith(f" ({__file__}, line {line})")


def test_policy_asking_for_an_unknown_signal_is_refused() -> None:
    class Psychic(FreezePolicy):
        signals = frozenset({"gradient_norm", "future_loss"})

        def decide(self, context: FreezeContext) -> None:
            return None

    with pytest.raises(ValueError, match=r"Psychic asks for the signals \['future_loss'\]"):
        as_policy(Psychic())


@pytest.mark.parametrize("num_frozen", [-1, 13])
def test_decision_outside_the_layers_is_refused(num_frozen: int) -> None:
    policy = as_policy(lambda context: num_frozen)
    with pytest.raises(
        ValueError, match=rf"<lambda> decided to freeze {num_frozen} layers .*0\.\.12"
    ):
        checked_decision(policy, make_context())


@pytest.mark.parametrize("answer", [2.5, True, "2"])
def test_decision_that_is_no_int_is_refused(answer: Any) -> None:
    with pytest.raises(PolicyError, match="a freeze decision must be an int") as caught:
        checked_decision(as_policy(lambda context: answer), make_context())
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("resting", [3, ("a",), None])
def test_layers_that_rest_are_ints(resting: Any) -> None:
    with pytest.raises(TypeError, match="resting layers must be a tuple of ints"):
        FreezeDecision(0, "", resting)


def test_policy_class_returning_a_bare_number_is_refused() -> None:
    class Bare(FreezePolicy):
        def decide(self, context: FreezeContext) -> Any:
            return 3

    with pytest.raises(TypeError, match=r"Bare\.decide returned 3 \(int\)"):
        checked_decision(Bare(), make_context())


def test_context_is_immutable() -> None:
    metrics = {"accuracy": 0.5}
    context = dataclasses.replace(make_context(), metrics=metrics)
    metrics["accuracy"] = 0.9
    assert context.metrics == {"accuracy": 0.5}
    with pytest.raises(TypeError, match="does not support item assignment"):
        context.metrics["accuracy"] = 1.0  # type: ignore[index]


def test_a_policy_of_0_2_that_sets_learning_rates_is_refused() -> None:
    class Old(NeverFreeze):
        def learning_rate_scale(self, layer: int, num_layers: int, progress: float) -> float:
            return 0.5

    with pytest.raises(ValueError, match="learning_rate_schedule="):
        as_policy(Old())
