"""Prove that wrapped policies hold back, listen, repeat, and go on after a resume."""

from __future__ import annotations

import dataclasses
import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from freeze import (
    FreezeContext,
    FreezeDecision,
    FreezePolicy,
    Guarded,
    Linear,
    NeverFreeze,
    PaperRule,
    PolicyError,
    Replay,
    as_policy,
    checked_decision,
)
from pipetransformer.elastic.journal import Journal
from tests.helpers.freezing import FALLING, make_context


def run(policy: FreezePolicy, num: int, **by_epoch: list[Any]) -> list[int]:
    """Return what is frozen after each epoch 0, 1, ..., executing every decision."""
    frozen = 0
    found = []
    for epoch in range(num):
        context = context_of(epoch, frozen, **{name: own[epoch] for name, own in by_epoch.items()})
        frozen = checked_decision(policy, context).num_frozen
        found.append(frozen)
    return found


def context_of(epoch: int, frozen: int, **changes: Any) -> FreezeContext:
    context = make_context(FALLING, epoch=epoch, num_frozen=frozen)
    return dataclasses.replace(context, **changes)


def wanting(*wanted: int) -> Any:
    """Return a policy that wants so many layers by epoch, and remembers nothing."""
    return lambda context: wanted[min(context.epoch, len(wanted) - 1)]


def test_a_guard_waits_for_warm_up_and_patience_and_leaves_layers_active() -> None:
    assert run(Guarded(wanting(4), warmup=3), 5) == [0, 0, 0, 4, 4]
    assert run(Guarded(wanting(4), warmup=0.1), 4) == [0, 0, 4, 4]  # Of 20 steps.
    assert run(Guarded(wanting(4), warmup=0.55), 12) == [0] * 11 + [4]
    assert run(Guarded(wanting(0, 5, 3, 4, 4), patience=3), 5) == [0, 0, 0, 3, 3]
    assert run(Guarded(wanting(0, 5, 0, 4, 4), patience=2), 5) == [0, 0, 0, 0, 4]
    assert run(Guarded(wanting(12), min_active=2), 1) == [10]
    assert run(Guarded(wanting(3), at_once=2), 3) == [2, 3, 3]
    assert run(Guarded(wanting(2, 9, 9, 9, 3), patience=2, at_once=1), 6) == [0, 1, 1, 2, 2, 3]


def test_a_guard_lets_its_policy_thaw_at_once() -> None:
    assert run(Guarded(wanting(6, 6, 2), patience=2), 3) == [0, 6, 2]


@pytest.mark.parametrize(
    ("name", "values", "tolerance", "expected"),
    [
        ("accuracy", [0.5, 0.6, 0.7, 0.65, 0.7], 0.0, [3, 3, 6, 3, 6]),
        ("accuracy", [0.5, 0.6, 0.7, 0.65, 0.7], 0.1, [3, 3, 6, 6, 6]),
        ("eval_loss", [0.5, 0.4, 0.3, 0.35, 0.3], 0.0, [3, 3, 6, 3, 6]),
        ("accuracy", [0.5, 0.6, 0.6, math.nan, 0.6], 0.0, [3, 3, 6, 3, 6]),
    ],
)
def test_a_guard_thaws_what_froze_since_the_best_metric(
    name: str, values: list[float], tolerance: float, expected: list[int]
) -> None:
    policy = Guarded(wanting(3, 3, 6), thaw_on=name, tolerance=tolerance)
    metrics = [{name: value} for value in values]
    assert run(policy, 5, metrics=metrics) == expected


def test_a_guard_tells_evaluations_apart_by_their_steps() -> None:
    def frozen(accuracies: list[float], steps: list[int]) -> list[int]:
        metrics = [{"accuracy": value} for value in accuracies]
        policy = Guarded(wanting(*range(0, 12, 2)), thaw_on="accuracy")
        return run(policy, len(steps), metrics=metrics, evaluated_at=steps)

    # The same evaluation seen twice, then one that found the same.
    assert frozen([0.9, 0.9, 0.8], [0, 0, 2]) == [0, 2, 0]
    assert frozen([0.9, 0.9, 0.9, 0.8], [0, 1, 2, 3]) == [0, 2, 4, 2]
    assert frozen([0.9, 0.8, 0.8], [0, 1, 2]) == [0, 2, 0]


def test_a_guard_is_told_which_way_its_metric_goes() -> None:
    rates = [{"wer": value} for value in (0.5, 0.4, 0.6)]
    policy = Guarded(wanting(2, 4, 6), thaw_on="wer", greater_is_better=False)
    assert run(policy, 3, metrics=rates) == [2, 4, 2]
    with pytest.raises(PolicyError, match="thaw_on is 'F1', but an evaluation has \\['wer'\\]"):
        run(Guarded(wanting(2), thaw_on="F1"), 1, metrics=rates)


def test_a_guard_goes_on_from_its_state() -> None:
    def policy() -> Guarded:
        return Guarded(PaperRule(1 / 3), patience=2, thaw_on="accuracy")

    whole, first, second = policy(), policy(), policy()
    metrics = [{"accuracy": value} for value in (0.5, 0.6, 0.7, 0.6, 0.6, 0.8, 0.8)]
    expected, frozen, found = run(whole, 7, metrics=metrics), 0, []
    for epoch in range(7):
        if epoch == 3:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        asked = first if epoch < 3 else second
        context = context_of(epoch, frozen, metrics=metrics[epoch])
        frozen = checked_decision(asked, context).num_frozen
        found.append(frozen)
    assert found == expected and max(found) > 0
    with pytest.raises(ValueError, match=r"the keys \['level'\], not .*resume with the policy"):
        policy().load_state_dict({"level": 1})


@pytest.mark.parametrize(
    "options",
    [
        {"warmup": -1},
        {"patience": 0},
        {"at_once": 0},
        {"at_once": 1.5},
        {"min_active": -1},
        {"min_active": 1.5},
        {"tolerance": math.nan},
    ],
)
def test_guards_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{next(iter(options))} is .*; give "):
        Guarded(wanting(1), **options)


@pytest.mark.parametrize("signals", [["relative_update"], "relative_update"])
def test_signals_that_are_no_set_are_refused(signals: Any) -> None:
    policy = NeverFreeze()
    policy.signals = signals
    with pytest.raises(TypeError, match="signals of NeverFreeze are .*; give a set of names"):
        as_policy(policy)


def test_a_state_that_no_checkpoint_holds_is_refused_before_training() -> None:
    class Remembering(FreezePolicy):
        def decide(self, context: FreezeContext) -> None:
            return None

        def state_dict(self) -> dict[str, Any]:
            return {"mean": torch.zeros(())}

    with pytest.raises(TypeError, match="state of Remembering does not go into JSON.*let state_d"):
        as_policy(Remembering())


def test_a_replay_freezes_at_the_very_steps(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for step, num in ((0, 0), (2, 5)):
        journal.append({"step": step, "decision": {"num_frozen": num}})
    journal.close()
    whole = path.read_bytes()
    # A decision that was being written was never carried out.
    path.write_bytes(whole + b'{"step": 3')
    assert run(Replay(tmp_path), 4) == run(Replay(path), 4) == [0, 0, 5, 5]
    with pytest.raises(ValueError, match="froze 5 layers at step 2, but this one is asked at"):
        Replay(tmp_path).decide(context_of(3, 0))
    # Nor may what was thawed again pass unseen.
    policy = Replay({0: 0, 10: 4, 15: 0})
    assert policy.decide(context_of(0, 0)).num_frozen == 0
    with pytest.raises(ValueError, match="froze 4 layers at step 10, but this one is asked at"):
        policy.decide(context_of(20, 0))
    path.write_bytes(whole.replace(b'"num_frozen": 5', b'"num_frozen": 4'))
    with pytest.raises(ValueError, match="of step 2 does not fit its check value"):
        Replay(tmp_path)
    path.write_text('{"step": 0, "decision": {"num_frozen": 4}, "check": ""}\n')
    with pytest.raises(ValueError, match="of step 0 does not fit its check value"):
        Replay(tmp_path)


def test_a_replay_leaves_out_what_a_resumed_run_went_back_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for step, num in ((0, 0), (2, 1), (4, 2), (3, 5)):
        journal.append({"step": step, "decision": {"num_frozen": num}})
    journal.close()
    replay = Replay(tmp_path)
    assert [replay.at(step) for step in range(6)] == [0, 0, 1, 5, 5, 5]


def test_a_replay_refuses_a_run_whose_layers_had_rates_of_their_own(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:  # As version 0.2 wrote it.
        journal.append({"step": 0, "sets_rates": True, "decision": {"num_frozen": 0}})
    with pytest.raises(ValueError, match="set learning rates by layer, too"):
        Replay(tmp_path)


@pytest.mark.parametrize("text", [None, "{\n", '{"step": 1}\n'])
def test_what_is_no_journal_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "journal.jsonl").write_text(text)
    with pytest.raises(ValueError, match="is no journal of a run"):
        Replay(tmp_path)


@pytest.mark.parametrize("frozen_from", [{}, {0: -1}, {-1: 2}])
def test_decisions_that_cannot_be_are_refused(frozen_from: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="give numbers of layers by step"):
        Replay(frozen_from)


def test_linear_freezes_at_equal_distances() -> None:
    # 20 steps: the first layer freezes at step 2, the last but one at step 12.
    assert run(Linear(begin=0.1, end=0.6), 20) == [0, 0, *range(1, 12), *[11] * 7]
    with pytest.raises(ValueError, match="give shares"):
        Linear(begin=0.5, end=0.5)


def test_wrapped_functions_see_the_context() -> None:
    seen: list[int] = []

    def policy(context: FreezeContext) -> FreezeDecision:
        seen.append(context.num_frozen)
        return FreezeDecision(2, "two")

    guarded = Guarded(policy)
    for epoch in range(3):
        guarded.decide(context_of(epoch, 2 * (epoch > 0)))
    assert seen == [0, 2, 2]
