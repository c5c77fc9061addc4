"""Prove the policies that decide from signals against hand-computed sequences and odd values."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from freeze import (
    AutoFreeze,
    FreezeContext,
    FreezePolicy,
    Linear,
    PaperRule,
    Plasticity,
    PolicyError,
    QuietUpdates,
    checked_decision,
    named_policy,
)
from freeze.policy import MEASURED_SIGNALS
from tests.helpers.freezing import make_context

Values = Sequence[Sequence[float | None]]


def context_with(
    signal: str, values: Sequence[float | None], *, step: int, num_frozen: int = 0, **own: Any
) -> FreezeContext:
    """Build a context of a step in which layers have a signal; frozen ones have none."""
    context = make_context([None] * len(values), epoch=step, num_frozen=num_frozen)
    layers = tuple(
        dataclasses.replace(layer, **{signal: value if layer.index >= num_frozen else None})
        for layer, value in zip(context.layers, values, strict=True)
    )
    return dataclasses.replace(context, layers=layers, **own)


def run(policy: FreezePolicy, signal: str, values: Values, **own: Any) -> list[int]:
    """Return what is frozen after each decision from step 0 on; the policy's state goes through
    JSON each time.
    """
    frozen: list[int] = []
    for step, row in enumerate(values):
        before = frozen[-1] if frozen else 0
        context = context_with(signal, row, step=step, num_frozen=before, **own)
        frozen.append(checked_decision(policy, context).num_frozen)
        policy.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    return frozen


def test_auto_freeze_freezes_below_the_first_layer_at_the_median() -> None:
    values = [
        [None] * 5,
        [10, 10, 10, 10, 10],
        # Changes .1 .2 .5 .6 .7: the median is .5.
        [9, 8, 5, 4, 3],
        # Of layers 2-4, .2 .5 .5: the median is .5.
        [None, None, 4, 2, 1.5],
        # Of layers 3 and 4, .25 and .5: the median lies between.
        [None, None, None, 1.5, 0.75],
    ]
    assert run(AutoFreeze(), "accumulated_gradient", values) == [0, 0, 2, 3, 4]
    # The smallest change of all is below none of them.
    assert run(AutoFreeze(0), "accumulated_gradient", values[:3]) == [0, 0, 0]
    # At the 100th percentile all but the one that changed most freeze, but not the last layer.
    assert run(AutoFreeze(100), "accumulated_gradient", values[:3]) == [0, 0, 4]


def test_auto_freeze_needs_two_intervals_of_a_layer() -> None:
    values = [[10, None, 10], [9, 10, 5], [8.9, 9, 2]]
    assert run(AutoFreeze(), "accumulated_gradient", values) == [0, 1, 2]


def test_plasticity_freezes_what_has_become_flat() -> None:
    policy = Plasticity(0.2, window=3)
    # Layer 0 levels off at once, layer 1 later, layer 2 goes on.
    values = [
        [1.0, 1.0, 1.0],
        [2.0, 2.0, 2.0],
        [2.0, 3.0, 3.0],
        [2.0, 4.0, 4.0],
        [2.0, 4.0, 5.0],
        [2.0, 4.0, 6.0],
        [2.0, 4.0, 7.0],
    ]
    # Slopes of layer 0 over three: 1 (of two), .5, 0: flat at decision 3. Of layer 1: 1, 1, 1, .5,
    # 0: flat at decision 5.
    found = run(policy, "probe_change", values)
    assert found == [0, 0, 0, 1, 1, 2, 2]


def test_plasticity_thaws_where_the_learning_rate_drops() -> None:
    policy = Plasticity(window=2, measure="cka")
    flat = [[0.0, 0.0], [1.0, 1.0], [1.0, 2.0]]
    assert run(policy, "probe_cka", flat, learning_rate=1e-3) == [0, 0, 1]
    # A smooth decay is no drop, however far it goes, and were it to zero.
    line, curve = (8e-4, 4e-4, 0.0, 0.0), (2e-4, 4e-5, 1e-6, 1e-5, 1e-5)
    for step, rate in enumerate((*line, *curve), start=3):
        kept = context_with("probe_cka", [1.0, 3.0], step=step, num_frozen=1, learning_rate=rate)
        assert checked_decision(policy, kept).num_frozen == 1
    low = context_with("probe_cka", [1.0, 3.0], step=12, num_frozen=1, learning_rate=1e-6)
    thawed = checked_decision(policy, low)
    assert thawed.num_frozen == 0 and "fell from 1e-05 to 1e-06" in thawed.reason
    again = context_with("probe_cka", [1.0, 3.0], step=13, learning_rate=1e-6)
    assert checked_decision(policy, again).num_frozen == 0


@pytest.mark.parametrize("rate", [0.1, 0.05, 1e-3, 2e-5, 1e-5])
def test_plasticity_thaws_at_the_very_drop_that_it_names(rate: float) -> None:
    policy = Plasticity(window=2)
    flat = [[0.0, 0.0], [1.0, 1.0], [1.0, 2.0]]
    assert run(policy, "probe_change", flat, learning_rate=rate) == [0, 0, 1]
    low = context_with("probe_change", [1.0, 3.0], step=3, num_frozen=1, learning_rate=rate * 0.1)
    assert checked_decision(policy, low).num_frozen == 0


ADAPTIVE: dict[str, tuple[Any, str]] = {
    "paper": (lambda: PaperRule(1 / 2), "gradient_norm"),
    "auto": (AutoFreeze, "accumulated_gradient"),
    "quiet": (lambda: QuietUpdates(1e3, begin=0), "relative_update"),
    "similarity": (lambda: Plasticity(window=2), "probe_change"),
    "cka": (lambda: Plasticity(window=2, measure="cka"), "probe_cka"),
}


@pytest.mark.parametrize("bad", [None, 0.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_what_is_no_measurement_freezes_nothing(name: str, bad: float | None) -> None:
    build, signal = ADAPTIVE[name]
    if name == "paper" and bad not in (0.0, None):
        with pytest.raises(PolicyError, match="missing or not finite"):
            run(build(), signal, [[bad] * 4] * 4)
        return
    assert run(build(), signal, [[bad] * 4] * 4) == [0] * 4


@pytest.mark.parametrize("bad", [None, 0.0, math.nan, math.inf])
@pytest.mark.parametrize("name", [name for name in ADAPTIVE if name != "paper"])
def test_a_layer_without_a_measurement_is_where_freezing_ends(
    name: str, bad: float | None
) -> None:
    build, signal = ADAPTIVE[name]
    # Without the second layer's fault all these values freeze it, too.
    values = [[4.0, 4.0, 4.0, 4.0], [2.0, 2.0, 2.0, 8.0], [1.9, 1.8, 1.7, 1.0]]
    assert max(run(build(), signal, values)) >= 2
    spoiled = [[row[0], bad, *row[2:]] for row in values]
    assert max(run(build(), signal, spoiled)) == 1


@pytest.mark.parametrize("name", [name for name in ADAPTIVE if name != "paper"])
def test_a_layer_without_weights_goes_with_the_one_above(name: str) -> None:
    build, signal = ADAPTIVE[name]
    values = [[None, 4.0, 4.0, 4.0], [None, 2.5, 2.0, 8.0], [None, 2.4, 1.9, 1.0]]
    policy, frozen = build(), [0]
    for step, row in enumerate(values):
        context = context_with(signal, row, step=step, num_frozen=frozen[-1])
        bare = dataclasses.replace(context.layers[0], num_parameters=0)
        context = dataclasses.replace(context, layers=(bare, *context.layers[1:]))
        frozen.append(checked_decision(policy, context).num_frozen)
    assert 1 not in frozen and frozen[-1] >= 2


@pytest.mark.parametrize(
    ("mean", "num_frozen"), [(1e-3, 3), (None, 3), (1e-5, 0), (2e-4, 0), (9e-4, 3), (0.0, 0)]
)
def test_a_change_at_a_low_rate_is_not_quiet_whatever_rate_comes_next(
    mean: float | None, num_frozen: int
) -> None:
    context = context_with("relative_update", [5e-6] * 4, step=4, mean_learning_rate=mean)
    assert checked_decision(QuietUpdates(), context).num_frozen == num_frozen


def test_a_share_of_the_run_ends_at_its_very_step() -> None:
    contexts = [context_with("relative_update", [1e-9] * 4, step=step) for step in (10, 11)]
    decided = [checked_decision(QuietUpdates(begin=0.55), one).num_frozen for one in contexts]
    assert decided == [0, 3]  # Of 20 steps.


def test_a_quiet_layer_that_is_to_stay_active_is_said_to() -> None:
    decided = checked_decision(QuietUpdates(), context_with("relative_update", [2e-6] * 3, step=9))
    assert decided.reason == "quiet below 1e-05 a step; layer 2: 2e-06, but stays active"


def test_the_paper_s_rule_compares_the_layers_that_do_not_rest() -> None:
    context = make_context([4.0, None, 3.0, 2.0])
    with pytest.raises(PolicyError, match="missing or not finite"):
        checked_decision(PaperRule(1 / 2), context)
    resting = dataclasses.replace(context, resting=(1,))
    assert checked_decision(PaperRule(1 / 2), resting).num_frozen == 2


def test_a_layer_whose_gradient_is_zero_does_not_lead_the_paper_s_rule() -> None:
    policy = PaperRule(1 / 2)
    assert policy.decide(make_context([4.0, 1.0, 3.0, 0.0])) is not None
    assert policy.state_dict()["level"] == 1.0


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("auto", AutoFreeze),
        ("auto:25", AutoFreeze),
        ("plasticity:1/4", Plasticity),
        ("cka", Plasticity),
        ("quiet:1e-4", QuietUpdates),
        ("linear", Linear),
        ("linear:0.2,0.6", Linear),
    ],
)
def test_a_word_names_a_policy(text: str, kind: type) -> None:
    policy = named_policy(text)
    assert isinstance(policy, kind) and policy.signals <= MEASURED_SIGNALS


def test_a_module_of_the_working_folder_names_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_policies.py").write_text(
        "from freeze import Linear, NeverFreeze\n"
        "Class, made = NeverFreeze, Linear(end=0.5)\n"
        "def function(context): return 2\n"
    )
    monkeypatch.chdir(tmp_path)
    names = [named_policy(f"own_policies:{one}").name for one in ("Class", "made", "function")]
    assert names == ["NeverFreeze", "Linear", "function"]
    assert str(tmp_path) not in sys.path


def test_a_guarded_policy_keeps_so_many_layers_from_freezing() -> None:
    held, free = named_policy("guarded:2,alpha:1/2"), named_policy("alpha:1/2")
    assert held.name == "Guarded(AlphaSchedule)"
    context = make_context([1.0] * 4, epoch=3)
    assert checked_decision(free, context).num_frozen > 2
    assert checked_decision(held, context).num_frozen == 2


def test_a_paced_policy_freezes_a_layer_at_a_time() -> None:
    paced, frozen = named_policy("paced:2,schedule:4"), []
    for _ in range(5):
        context = make_context([1.0] * 6, num_frozen=frozen[-1] if frozen else 0)
        frozen.append(checked_decision(paced, context).num_frozen)
    assert frozen == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "auto:x",
        "auto:101",
        "paper",
        "paper:1/0",
        "linear:0.5",
        "none:3",
        "os:nothing",
        "guarded:2",
        "guarded:auto",
        "paced:0,auto",
        "paced:auto",
    ],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"names no freeze policy .*; give none, budget\[:0.5\], paper:1/3"
    ):
        named_policy(text)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AutoFreeze(101), "percentile is 101"),
        (lambda: Plasticity(0), "tolerance is 0; give more than 0"),
        (lambda: Plasticity(measure="svd"), "measure is 'svd'; give one of .'cka', 'similarity'"),
        (lambda: QuietUpdates(0), "threshold is 0; give more than 0"),
        (lambda: QuietUpdates(begin=2), "begin is 2; give a share"),
        (lambda: Plasticity(window=1), "window is 1"),
        (lambda: Plasticity(thaw_drop=1), "thaw_drop is 1"),
    ],
)
def test_arguments_out_of_range_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("policy", [AutoFreeze(), Plasticity()])
def test_another_policy_s_state_is_refused(policy: FreezePolicy) -> None:
    with pytest.raises(ValueError, match=r"was given a state .*\['level'\]"):
        policy.load_state_dict({"level": 1.0})
