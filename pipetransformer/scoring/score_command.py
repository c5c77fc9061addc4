"""Offer `pipetransformer score`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from autopipe.trace import text_table
from freeze import POLICY_HELP, named_policy
from pipetransformer.report import new_figure, open_frame, read_decisions
from pipetransformer.scoring.policy_scores import Score, recorded_score, score


def add_score_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the folder= of a run")
    parser.add_argument("--policy", nargs="+", default=[], metavar="POLICY", help=POLICY_HELP)
    parser.add_argument(
        "--picture", type=Path, help="draw frozen layers over steps into this file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_score)


def run_score(options: argparse.Namespace, say: Callable[[str], object]) -> None:
    """Score policies on a run's records; one that fails, or lacks a signal, is reported as such.

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
    if options.picture is not None:
        _draw(scores, options.picture, decisions[-1].context.max_steps)
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
    """Write where the number of frozen layers changes."""
    before, parts = 0, []
    for step, num in frozen.items():
        if num != before:
            parts.append(f"{num} @ {step}")
        before = num
    return ", ".join(parts) or "-"


def _draw(scores: dict[str, Score], path: Path, max_steps: int) -> None:
    figure = new_figure(9, 4)
    axes = figure.add_subplot()
    for name, result in scores.items():
        steps: Sequence[int] = [*result.frozen, max_steps]
        values = [*result.frozen.values(), list(result.frozen.values())[-1]]
        label = f"{name}: {result.share:.0%} of the time"
        axes.plot(steps, values, drawstyle="steps-post", label=label)
    axes.set(xlabel="step", ylabel="frozen layers", ylim=(0, None))
    open_frame(axes)
    axes.legend(frameon=False)
    figure.savefig(path)
