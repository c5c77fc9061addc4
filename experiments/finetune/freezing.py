"""Say which layers freeze when: by a policy, or as another run did."""

from __future__ import annotations

import importlib
from fractions import Fraction
from pathlib import Path

from experiments.finetune.finished_run import read_lines, records_file
from freeze import (
    FreezePolicy,
    FreezeSchedule,
    NeverFreeze,
    PaperRule,
    Replay,
    as_policy,
)


def policy_of(freeze: str, replay: str | None) -> FreezePolicy:
    """Return the policy that options name.

    Raises:
        ValueError: they name none.
    """
    if replay is not None:
        return Replay(read_decisions(Path(replay)))
    kind, _, value = freeze.partition(":")
    try:
        if kind == "none":
            return NeverFreeze()
        if kind == "paper":
            return PaperRule(float(Fraction(value)))
        if kind == "schedule":
            return FreezeSchedule([int(one) for one in value.split(",")])
        return as_policy(getattr(importlib.import_module(kind), value))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--freeze is {freeze!r} ({error}); give none, paper:1/3, schedule:0,0,4,8 or "
            "module:policy"
        ) from error


def read_decisions(folder: Path) -> dict[int, int]:
    """Return the frozen layers from each step on at which a run decided."""
    path = records_file(folder)
    if not path.exists():
        raise ValueError(f"{folder} holds no records.jsonl of a run to repeat")
    frozen: dict[int, int] = {}
    last = -1
    for record in read_lines(path):
        if record["kind"] == "step" and record["frozen"] != last:
            last = frozen[record["step"]] = record["frozen"]
    return frozen
