"""Say at the end of a training what freezing and rows have saved, by the times of its own steps.

steps of a depth      what they tell
nothing is frozen     the seconds of the same training unfrozen
all rows computed     the same training, with all rows computed: they are kept, too
rows read             only what they took
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, final

from autocache import CacheStats


@dataclass
class _Pace:
    """Add up steps; `num` of them, which took `sums[0]` seconds, tell what others would take.

    Args:
        seconds, amount: of all these steps; an amount is of samples, or of batches.
        sums: seconds, squares of seconds, and amounts, without the first step of a depth, which
            warms up or looks at the model.
    """

    seconds: float = 0.0
    amount: float = 0.0
    num: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def add(self, seconds: float, amount: float, *, is_usual: bool) -> None:
        self.seconds += seconds
        self.amount += amount
        if is_usual:
            self.num += 1
            more = seconds, seconds**2, amount
            self.sums = [one + other for one, other in zip(self.sums, more, strict=True)]

    def of(self, amount: float) -> _Seconds | None:
        """Return what so much would take; None where fewer than two steps tell."""
        if self.num < 2:
            return None
        seconds, squares, timed = self.sums
        variance = max(0.0, squares / self.num - (seconds / self.num) ** 2) / (self.num - 1)
        share = amount / timed
        return _Seconds(seconds * share, 2 * math.sqrt(variance) * self.num * share)


@dataclass(frozen=True)
class _Seconds:
    """Hold predicted seconds, give or take two standard errors of the steps' mean."""

    seconds: float
    error: float = 0.0

    def __add__(self, other: _Seconds) -> _Seconds:
        return _Seconds(self.seconds + other.seconds, self.error + other.error)

    def __str__(self) -> str:
        error = f"{self.error:.0f}" if self.error >= 10 else f"{self.error:.1g}"
        return f"{_short(self.seconds)} ± {error} s"

    def beside(self, took_s: float) -> str:
        """Say how much less a training took; a difference within the error is none."""
        is_less = self.seconds - took_s > self.error
        return f"{1 - took_s / self.seconds:.0%} less" if is_less else "no less"


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"


@final
class SavedTime:
    """Sort a training's steps by what is frozen, and by whether they read rows."""

    def __init__(self) -> None:
        self._paces = dict[tuple[int, bool], _Pace]()
        self._rows = CacheStats()
        self._depth: int | None = None  # Of the last step; None in a process' first one.
        self._num_ahead = 0  # Rows that were computed for steps to come.

    def add(self, seconds: float, amount: float, *, depth: int, rows: CacheStats) -> None:
        """Count a step.

        Args:
            amount: of samples, or of batches; the same in all steps.
            depth: names what is frozen; 0 is nothing.
            rows: what it has read and computed.
        """
        is_usual, self._depth = depth == self._depth, depth
        num_ahead = self._num_ahead if is_usual else 0
        self._num_ahead = max(0, num_ahead - rows.hits) + rows.ahead
        # A row that an earlier step has computed with its own spares nothing.
        reads = rows.hits > num_ahead or rows.upgrades > 0
        self._paces.setdefault((depth, reads), _Pace()).add(seconds, amount, is_usual=is_usual)
        self._rows += rows

    @property
    def seconds(self) -> float:
        """Return what all steps took."""
        return sum(pace.seconds for pace in self._paces.values())

    def line(self, took_s: float, num_of_others: int) -> str:
        """Write what a training took and saved; "" where nothing was frozen.

        Args:
            took_s: seconds of the training.
            num_of_others: rows that were read, and that another run has kept.
        """
        if not any(depth for depth, _ in self._paces):
            return ""
        beside = [
            ("unfrozen", self._unfrozen()),
            ("with all rows computed", self._computed(took_s)),
        ]
        compared = [
            f"{predicted.beside(took_s)} than {what} ({predicted})"
            for what, predicted in beside
            if predicted is not None
        ]
        text = f"training took {_short(took_s)} s"
        if compared:
            text += f", by its own steps {', and '.join(compared)}"
        return "; ".join(filter(None, (text, self._rows_text(num_of_others))))

    def _rows_text(self, num_of_others: int) -> str:
        """Write how many rows were read and computed; "" where none was asked for."""
        rows = self._rows
        num = rows.hits + rows.upgrades + rows.misses
        if not num:
            return ""
        num_read = max(0, rows.hits - rows.ahead)
        others = f" ({num_of_others} of other runs)" if num_of_others else ""
        return f"{num_read} rows read{others}, {num - num_read} computed"

    def _unfrozen(self) -> _Seconds | None:
        pace = self._paces.get((0, False), _Pace())
        return pace.of(sum(pace.amount for pace in self._paces.values()))

    def _computed(self, took_s: float) -> _Seconds | None:
        """Predict the training without rows; a depth without steps that tell counts as it was."""
        predictions = list[_Seconds]()
        for (depth, reads), pace in self._paces.items():
            if reads and (computed := self._paces.get((depth, False))) is not None:
                if (predicted := computed.of(pace.amount)) is not None:
                    predictions.append(predicted + _Seconds(-pace.seconds))
        return sum(predictions, _Seconds(took_s)) if predictions else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs, serialisable as JSON."""
        paces = [[*key, asdict(pace)] for key, pace in self._paces.items()]
        return {"paces": paces, "rows": asdict(self._rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._paces = {(depth, reads): _Pace(**pace) for depth, reads, pace in state["paces"]}
        self._rows, self._depth = CacheStats(**state["rows"]), None
