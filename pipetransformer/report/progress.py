"""Show how far a run is: a bar on the terminal, and lines above it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any, final

from tqdm import tqdm

_LOGGER = logging.getLogger(__name__)


@final
class Progress:
    """Draw a bar from `open` to `close`; what is said goes above it, or below a finished one.

    Args:
        is_shown: whether this process draws; where it does not, lines go into the log.
        label: what stands before the bar.
    """

    def __init__(self, *, is_shown: bool, label: str | None) -> None:
        self._is_shown, self._label = is_shown, label
        self._bar: Any = None
        self._fields: dict[str, str] = {}

    def open(self, step: int, max_steps: int) -> None:
        """Begin with so many steps done, which do not count for the rate."""
        if not self._is_shown:
            return
        # A log file gets a line every half minute instead of a bar redrawn in place.
        interval_s = 0.2 if sys.stderr.isatty() else 30.0
        self._bar = tqdm(
            total=max_steps,
            initial=step,
            desc=self._label,
            dynamic_ncols=True,
            mininterval=interval_s,
            maxinterval=interval_s,
        )

    def say(self, line: str) -> None:
        """Write a line that does not touch the bar's."""
        if self._is_shown:
            tqdm.write(line)
        else:
            _LOGGER.info(line)

    def show(self, num_done: int, max_steps: int, fields: Mapping[str, str]) -> None:
        """Draw the bar, when its time comes, with fields behind it."""
        if self._bar is not None:
            self._fields = dict(fields)
            self._bar.total = max_steps
            self._bar.set_postfix(self._fields, refresh=False)
            self._bar.update(num_done - self._bar.n)

    def correct(self, field: str, text: str) -> None:
        """Have one of the last step's fields say something else."""
        if self._bar is not None and self._fields:
            self._fields[field] = text
            self._bar.set_postfix(self._fields, refresh=False)

    def close(self, *, is_whole: bool) -> None:
        """Leave the bar as it is, whole where the run is over, and begin a line below it."""
        # An open bar is drawn anew by the next one, and what is printed lands on its line.
        if self._bar is not None:
            if is_whole:
                self._bar.total = self._bar.n
            self._bar.close()
            self._bar = None
