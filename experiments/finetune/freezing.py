"""Say which layers freeze when: by a policy, or as another run did."""

from __future__ import annotations

from pathlib import Path

from experiments.finetune.finished_run import FinishedRun
from freeze import FreezePolicy, Replay, named_policy


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


def refuse_rest(replay: str) -> None:
    """Refuse to repeat in a plain loop a run that let layers above the frozen ones rest."""
    for record in FinishedRun(Path(replay)).records:
        if record["kind"] == "transition" and record["resting"]:
            raise ValueError(
                f"--replay {replay}: the layers {record['resting']} rest from step "
                f"{record['step']} on, and a plain loop freezes bottom layers alone; leave "
                "--baseline out"
            )
