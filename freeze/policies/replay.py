"""Repeat what another run decided."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import final

from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy


@final
class Replay(FreezePolicy):
    """Freeze what another run froze, from the very steps on.

    Args:
        frozen_from: numbers of frozen layers by the steps from which they hold.
    Raises:
        ValueError: there are none, or one is negative; or, later, a decision falls between two
            steps at which this run is asked, so that it would come late.
    """

    def __init__(self, frozen_from: Mapping[int, int]) -> None:
        if not frozen_from or min(*frozen_from, *frozen_from.values()) < 0:
            raise ValueError(
                f"the decisions to repeat are {dict(frozen_from)}; give numbers of layers by step"
            )
        self._frozen_from = dict(sorted(frozen_from.items()))

    @staticmethod
    def of_run(folder: str | Path) -> Replay:
        """Repeat the decisions in the journal of a run's folder.

        Raises:
            ValueError: there is no journal, or a line of it is damaged.
        """
        path = Path(folder) / "journal.jsonl"
        try:
            entries = [json.loads(line) for line in path.read_text().splitlines()]
            return Replay({one["step"]: one["decision"]["num_frozen"] for one in entries})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no journal of a run ({error})") from error

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
