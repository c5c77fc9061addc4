"""Show a run's progress: a bar on the terminal, and lines above it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

from tqdm import tqdm

_LOGGER = logging.getLogger(__name__)

_SHOWN_EVERY_S = 0.1


@final
class Progress:
    """Draw a bar from `open` to `close`; lines go above it.

    Args:
        is_shown: whether this process draws; otherwise lines go into the log.
        label: stands before the bar.
    """

    def __init__(self, *, is_shown: bool, label: str | None) -> None:
        self._is_shown, self._label = is_shown, label
        self._bar: Any = None
        self._fields: dict[str, str] = {}
        self._shown_s = 0.0
        self._to_show: Callable[[], None] | None = None

    def open(self, step: int, max_steps: int) -> None:
        """Begin the bar at a step; earlier steps do not count for the rate."""
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
        """Write a line above the bar."""
        if self._is_shown:
            tqdm.write(line)
        else:
            _LOGGER.info(line)

    def show(self, num_done: int, max_steps: int, fields: Callable[[], Mapping[str, str]]) -> None:
        """Update the bar, and the fields behind it, ten times a second."""
        if self._bar is None:
            return
        self._to_show = partial(self._show, num_done, max_steps, fields)
        if time.perf_counter() - self._shown_s >= _SHOWN_EVERY_S:
            self._show_last()

    def _show(
        self, num_done: int, max_steps: int, fields: Callable[[], Mapping[str, str]]
    ) -> None:
        self._fields = dict(fields())
        self._bar.total = max_steps
        self._bar.set_postfix(self._fields, refresh=False)
        self._bar.update(num_done - self._bar.n)

    def _show_last(self) -> None:
        """Show the last step, if the bar shows an earlier one."""
        if self._to_show is not None:
            self._to_show()
            self._to_show, self._shown_s = None, time.perf_counter()

    def correct(self, field: str, text: str) -> None:
        """Change one of the last step's fields, once there are some."""
        self._show_last()
        if self._bar is not None and self._fields:
            self._fields[field] = text
            self._bar.set_postfix(self._fields, refresh=False)

    def close(self, *, is_whole: bool) -> None:
        """End the bar where it stands, or as a whole one, and begin a line below it."""
        self._show_last()
        # An open bar is redrawn by the next one, and printed text lands on its line.
        if self._bar is not None:
            if is_whole:
                self._bar.total = self._bar.n
            self._bar.close()
            self._bar = None
