"""Say which layers freeze when: by a policy, or as another run did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from experiments.finetune.finished_run import FinishedRun
from freeze import FreezePolicy, FreezeSchedule, NeverFreeze, Replay, named_policy

FrozenAt: TypeAlias = Callable[[int, int], int]
"""(step, epoch) -> frozen layers."""


def policy_of(freeze: str, replay: str | None) -> FreezePolicy:
    """Return the policy that options name.

    Raises:
        ValueError: they name none.
    """
    if replay is None:
        try:
            return named_policy(freeze)
        except ValueError as error:
            raise ValueError(f"--freeze: {error}") from error
    try:
        return Replay(replay)
    except ValueError as error:
        raise ValueError(f"--replay repeats a run of ours: {error}") from error


def frozen_at(freeze: str, replay: str | None) -> FrozenAt:
    """Return what freezes in a plain loop, where it follows from the position alone.

    Raises:
        ValueError: a policy decides it; another run's decisions are repeated by --replay.
    """
    policy = policy_of(freeze, replay)
    if isinstance(policy, Replay):
        return lambda step, epoch: policy.at(step)
    if isinstance(policy, FreezeSchedule):
        return lambda step, epoch: policy.at(epoch)
    if isinstance(policy, NeverFreeze):
        return lambda step, epoch: 0
    raise ValueError(
        f"--freeze {freeze} decides while ours trains, and a plain loop follows schedules alone; "
        "give the baseline --replay RUN of such a run"
    )


def refuse_rest(replay: str) -> None:
    """Refuse to repeat in a plain loop a run that let layers above the frozen ones rest."""
    for record in FinishedRun(Path(replay)).records:
        if record["kind"] == "transition" and record["resting"]:
            raise ValueError(
                f"--replay {replay}: the layers {record['resting']} rest from step "
                f"{record['step']} on, and a plain loop freezes bottom layers alone; leave "
                "--baseline out"
            )
