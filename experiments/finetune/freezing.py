"""Say which layers freeze when: by a policy, or as another run did."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import final

from experiments.finetune.finished_run import read_lines, records_file
from freeze import (
    FreezeContext,
    FreezeDecision,
    FreezePolicy,
    FreezeSchedule,
    NeverFreeze,
    PaperRule,
    as_policy,
)


@final
class Repeat(FreezePolicy):
    """Freeze as a run's records say it did, step by step."""

    def __init__(self, frozen_from: Mapping[int, int]) -> None:
        if not frozen_from:
            raise ValueError("the run to repeat has no decisions; give a run's folder")
        self._frozen_from = dict(sorted(frozen_from.items()))

    def decide(self, context: FreezeContext) -> FreezeDecision:
        """Return what held at this step."""
        return FreezeDecision(self.at(context.step), "as the run that is repeated")

    def at(self, step: int) -> int:
        """Return the frozen layers of a step."""
        return [num for begin, num in self._frozen_from.items() if begin <= step or begin == 0][-1]


def policy_of(freeze: str, replay: str | None) -> FreezePolicy:
    """Return the policy that options name.

    Raises:
        ValueError: they name none.
    """
    if replay is not None:
        return Repeat(read_decisions(Path(replay)))
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
