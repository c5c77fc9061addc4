"""Repeat what another run decided."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, final

from freeze.journal_lines import JOURNAL_FILE, note_decision, read_line
from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy

_Held: TypeAlias = tuple[int, tuple[int, ...]]
"""The number of frozen layers, and the layers that rest."""


@final
class Replay(FreezePolicy):
    """Freeze what another run froze, at the same steps.

    Args:
        run: a run's folder, or its journal; or numbers of frozen layers by the step from which
            they hold. Of a resumed run the last course counts.
    Raises:
        ValueError: the journal is missing or damaged; there are no decisions, or a negative one;
            or the run's policy also set learning rates, as version 0.2 allowed. Later: a decision
            would come late, as this run is not asked at its step.
    """

    _remembered = ("asked",)

    def __init__(self, run: str | Path | Mapping[int, int]) -> None:
        if isinstance(run, Mapping):
            held: dict[int, _Held] = {step: (num, ()) for step, num in sorted(run.items())}
        else:
            held = {}
            for step, decision in _read_journal(Path(run)):
                note_decision(held, step, decision)
        frozen = {step: num for step, (num, _) in held.items()}
        if not frozen or min(*frozen, *frozen.values()) < 0:
            raise ValueError(
                f"the decisions to repeat are {frozen}; give numbers of layers by step"
            )
        self._held = held
        self._asked: int | None = None

    def at(self, step: int) -> int:
        return self._held_at(step)[0]

    def check(self, num_layers: int) -> None:
        largest = max(num for num, _ in self._held.values())
        if largest > num_layers:
            raise ValueError(
                f"the run that is repeated froze up to {largest} layers, but {num_layers} layers "
                "can freeze here; give the run of such a model"
            )

    def decide(self, context: FreezeContext) -> FreezeDecision:
        asked = -1 if self._asked is None else self._asked
        present = (context.num_frozen, context.resting)
        # A change between two steps at which this run is asked would come late.
        for step, held in self._held.items():
            if asked < step < context.step and held != present:
                raise ValueError(
                    f"the run that is repeated froze {held[0]} layers at step {step}, but this "
                    f"one is asked at step {context.step}; decide at the same steps (with the "
                    "same freeze_interval_steps and global batch)"
                )
        self._asked = context.step
        num_frozen, resting = self._held_at(context.step)
        return FreezeDecision(num_frozen, "as the run that is repeated", resting)

    def _held_at(self, step: int) -> _Held:
        return [(0, ()), *(held for begin, held in self._held.items() if begin <= step)][-1]


def _read_journal(path: Path) -> list[tuple[int, _Held]]:
    """Return the decisions with their steps; a last line without end was never carried out."""
    path = path / JOURNAL_FILE if path.is_dir() else path
    try:
        entries = [read_line(line) for line in path.read_bytes().split(b"\n")[:-1]]
        decisions = [
            (entry["step"], (decided["num_frozen"], tuple(decided.get("resting", ()))))
            for entry in entries
            for decided in (entry["decision"],)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no journal of a run ({error})") from error
    if any(entry.get("sets_rates") for entry in entries):
        raise ValueError(
            f"the policy of the run in {path} set learning rates by layer, too, which its journal "
            "does not hold; give that policy itself"
        )
    return decisions
