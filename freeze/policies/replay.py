"""Repeat what another run decided."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import final

from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy


@final
class Replay(FreezePolicy):
    """Freeze what another run froze, from the very steps on.

    Args:
        run: a run's folder, or its journal, whose decisions are read; or numbers of frozen layers
            by the steps from which they hold.
    Raises:
        ValueError: there is no journal, or a line of it is damaged; there are no decisions, or one
            is negative; or, later, a decision falls between two steps at which this run is asked,
            so that it would come late.
    """

    def __init__(self, run: str | Path | Mapping[int, int]) -> None:
        frozen_from = run if isinstance(run, Mapping) else _read_journal(Path(run))
        if not frozen_from or min(*frozen_from, *frozen_from.values()) < 0:
            raise ValueError(
                f"the decisions to repeat are {dict(frozen_from)}; give numbers of layers by step"
            )
        self._frozen_from = dict(sorted(frozen_from.items()))

    def at(self, step: int) -> int:
        """Return what was frozen at a step."""
        return [0, *(num for begin, num in self._frozen_from.items() if begin <= step)][-1]

    def decide(self, context: FreezeContext) -> FreezeDecision:
        begun = [step for step in self._frozen_from if step <= context.step]
        num_frozen = self.at(context.step)
        if begun and begun[-1] < context.step and num_frozen != context.num_frozen:
            raise ValueError(
                f"the run that is repeated froze {num_frozen} layers at step {begun[-1]}, but "
                f"this one is asked at step {context.step}; decide at the same steps (with the "
                "same freeze_interval_steps and global batch)"
            )
        return FreezeDecision(num_frozen, "as the run that is repeated")


def _read_journal(path: Path) -> dict[int, int]:
    """Return what each decision froze; a torn last line was never carried out."""
    path = path / "journal.jsonl" if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
        return dict(_read_line(line) for line in lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no journal of a run ({error})") from error


def _read_line(line: bytes) -> tuple[int, int]:
    entry = json.loads(line)
    check = entry.pop("check")
    if not hashlib.sha256(json.dumps(entry).encode()).hexdigest().startswith(check):
        raise ValueError(f"the decision of step {entry['step']} does not fit its check value")
    return entry["step"], entry["decision"]["num_frozen"]
