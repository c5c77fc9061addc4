"""Repeat what another run decided."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy


@final
class Replay(FreezePolicy):
    """Freeze what another run froze, from the very steps on; of a resumed one its last course.

    Args:
        run: a run's folder, or its journal, whose decisions are read; or numbers of frozen layers
            by the steps from which they hold, without layers that rest.
    Raises:
        ValueError: there is no journal, or a line of it is damaged; there are no decisions, or one
            is negative; the run's policy also set learning rates; or, later, a decision falls
            between two steps at which this run is asked, so that it would come late.
    """

    _remembered = ("asked",)

    def __init__(self, run: str | Path | Mapping[int, int]) -> None:
        resting: dict[int, tuple[int, ...]] = {}
        if isinstance(run, Mapping):
            frozen_from = dict(run)
        else:
            frozen_from = {}
            for step, num_frozen, own in _read_journal(Path(run)):
                # Later steps' decisions that were written before are of a course that ended.
                while frozen_from and next(reversed(frozen_from)) >= step:
                    frozen_from.popitem()
                frozen_from[step], resting[step] = num_frozen, own
        if not frozen_from or min(*frozen_from, *frozen_from.values()) < 0:
            raise ValueError(
                f"the decisions to repeat are {dict(frozen_from)}; give numbers of layers by step"
            )
        self._frozen_from = dict(sorted(frozen_from.items()))
        self._resting = resting
        self._asked: int | None = None

    def at(self, step: int) -> int:
        return [0, *(num for begin, num in self._frozen_from.items() if begin <= step)][-1]

    def decide(self, context: FreezeContext) -> FreezeDecision:
        begun = [step for step in self._frozen_from if step <= context.step]
        num_frozen = self.at(context.step)
        resting = self._resting.get(begun[-1], ()) if begun else ()
        asked = -1 if self._asked is None else self._asked
        held = (context.num_frozen, context.resting)
        for step in begun:
            late = asked < step < context.step
            if late and (self._frozen_from[step], self._resting.get(step, ())) != held:
                raise ValueError(
                    f"the run that is repeated froze {self._frozen_from[step]} layers at step "
                    f"{step}, but this one is asked at step {context.step}; decide at the same "
                    "steps (with the same freeze_interval_steps and global batch)"
                )
        self._asked = context.step
        return FreezeDecision(num_frozen, "as the run that is repeated", resting)


_Entry = tuple[int, int, tuple[int, ...]]
"""A step, how many layers are frozen from it on, and which rest."""


def _read_journal(path: Path) -> list[_Entry]:
    """Return the decisions; a torn last line was never carried out."""
    path = path / "journal.jsonl" if path.is_dir() else path
    try:
        entries = [_read_line(line) for line in path.read_bytes().split(b"\n")[:-1]]
        decisions = [(entry["step"], *_read_decision(entry["decision"])) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no journal of a run ({error})") from error
    if any(entry.get("sets_rates") for entry in entries):
        raise ValueError(
            f"the policy of the run in {path} set learning rates by layer, too, which its journal "
            "does not hold; give that policy itself"
        )
    return decisions


def _read_line(line: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(line)
    check = entry.pop("check")
    if not hashlib.sha256(json.dumps(entry).encode()).hexdigest().startswith(check):
        raise ValueError(f"the decision of step {entry['step']} does not fit its check value")
    return entry


def _read_decision(decision: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    return decision["num_frozen"], tuple(decision.get("resting", ()))
