"""Offer `pipetransformer score`: ask policies at every decision of a recorded run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from autopipe.trace import text_table
from freeze import (
    POLICY_HELP,
    FreezeDecision,
    FreezePolicy,
    checked_decision,
    frozen_since,
    named_policy,
)
from pipetransformer.report.records import RecordedDecision, read_decisions


@dataclass(frozen=True)
class Score:
    """Hold what a policy would have frozen, and the time that takes.

    Attributes:
        frozen: layers frozen from each recorded decision on, by step.
        reasons: why, by step.
        train_s: predicted seconds of all steps.
        unfrozen_s: the same with nothing frozen.
        unseen: decisions at which a policy that needs signals was not asked. The run had layers
            frozen or resting there, without signals, that the policy still trained.
        rests: whether layers rested at some decision; their seconds are those of training.
    """

    name: str
    frozen: dict[int, int]
    reasons: dict[int, str]
    train_s: float
    unfrozen_s: float
    unseen: int
    rests: bool

    @property
    def share(self) -> float:
        """Return train_s as a share of unfrozen_s."""
        return self.train_s / self.unfrozen_s


def score(decisions: Sequence[RecordedDecision], policy: FreezePolicy) -> Score:
    """Ask a policy what it would have frozen, on the run's own signals.

    The run's signals depend on what the run itself froze. Where it froze more than the policy,
    signals of some layers are missing: a policy that needs signals keeps what it has frozen.
    Where it froze less, the layers above would have had other signals.

    Steps up to the next decision take what the planner predicted at this one; see
    `RecordedDecision`. The planner takes the cache to be read if that pays for layers that freeze
    only then. In a run with nothing frozen, filling does not pay in the last epoch, which is
    predicted uncached, and earlier epochs cached. So a policy that freezes for good is charged
    with filling once, but at the end instead of in the first epoch at each depth.

    Not counted are transitions, savings by resting layers, and filling for layers that thaw again.
    Filling is not counted at all if the run has layers cached in its last epoch, or no predictions
    of that epoch.

    Raises:
        TypeError, ValueError: the policy needs a signal that the run has not recorded, or fails,
            or no pipeline was found for what it would freeze.
    """
    have = frozenset[str]().union(*(recorded.signals for recorded in decisions))
    if missing := policy.signals - have:
        raise ValueError(
            f"{policy.name} needs {sorted(missing)}, which the run has not recorded; train with "
            f"signals={sorted(missing)}"
        )
    since, resting = tuple[int, ...](), tuple[int, ...]()
    frozen, reasons, unseen, rests = {}, {}, 0, False
    for recorded in decisions:
        seen = recorded.context
        unknown = {*range(seen.num_frozen), *seen.resting}
        if policy.signals and not unknown <= {*range(len(since)), *resting}:
            unseen += 1
            why = "not asked: the run had more layers frozen or resting"
            decision = FreezeDecision(len(since), why, resting)
        else:
            decision = checked_decision(policy, seen.as_frozen(since, resting))
        since = frozen_since(since, decision.num_frozen, seen.step)
        resting, rests = decision.resting, rests or bool(decision.resting)
        frozen[seen.step], reasons[seen.step] = decision.num_frozen, decision.reason
    return _scored(policy.name, decisions, frozen, reasons, unseen=unseen, rests=rests)


def recorded_score(decisions: Sequence[RecordedDecision]) -> Score:
    """Return the score of the run's own decisions, by the same predicted times."""
    frozen = {decision.context.step: decision.num_frozen for decision in decisions}
    reasons = {decision.context.step: decision.reason for decision in decisions}
    rests = any(decision.context.resting for decision in decisions)
    return _scored("the run", decisions, frozen, reasons, unseen=0, rests=rests)


def _scored(
    name: str,
    decisions: Sequence[RecordedDecision],
    frozen: dict[int, int],
    reasons: dict[int, str],
    *,
    unseen: int,
    rests: bool,
) -> Score:
    train_s = unfrozen_s = 0.0
    steps = [*frozen, decisions[-1].context.max_steps]
    for decision, (begin, end) in zip(decisions, pairwise(steps), strict=True):
        predict = decision.context.predict
        train_s += (end - begin) * predict(frozen[begin])
        unfrozen_s += (end - begin) * predict(0)
    return Score(name, frozen, reasons, train_s, unfrozen_s, unseen, rests)


def add_score_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the folder= of a run")
    parser.add_argument("--policy", nargs="+", default=[], metavar="POLICY", help=POLICY_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_score)


def run_score(options: argparse.Namespace, say: Callable[[str], object]) -> None:
    """Score policies on a run's records, and print the scores and the policies that failed.

    Raises:
        ValueError: there are no decisions, or a policy is not known.
    """
    decisions = read_decisions(options.folder)
    policies = {name: named_policy(name) for name in ["none", *options.policy]}
    scores, failed = {"the run": recorded_score(decisions)}, {}
    for name, policy in policies.items():
        try:
            scores[name] = score(decisions, policy)
        except (TypeError, ValueError) as error:  # What a policy raises is a PolicyError.
            failed[name] = str(error)
    if options.json:
        scored = {name: {**asdict(one), "share": one.share} for name, one in scores.items()}
        say(json.dumps({**scored, **{name: {"error": text} for name, text in failed.items()}}))
        return
    say(_table(scores, failed))
    for name, text in failed.items():
        say(f"{name}: {text}")
    for name, result in scores.items():
        if result.unseen:
            had = "the run had more layers frozen or resting"
            say(f"{name}: not asked {result.unseen} times, when {had}")
        if result.rests:
            say(f"{name}: layers rest, which is not counted: they take as long as in training")


def _table(scores: dict[str, Score], failed: Iterable[str]) -> str:
    rows = [["policy", "frozen from step on", "predicted s", "of nothing frozen"]]
    for name, one in scores.items():
        rows.append([name, _changes(one.frozen), f"{one.train_s:.4g}", f"{one.share:.2f}"])
    return text_table([*rows, *([name, "failed"] for name in failed)])


def _changes(frozen: dict[int, int]) -> str:
    """Write the steps at which the number of frozen layers changes."""
    before, parts = 0, []
    for step, num in frozen.items():
        if num != before:
            parts.append(f"{num} @ {step}")
        before = num
    return ", ".join(parts) or "-"
