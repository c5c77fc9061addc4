"""Tell the person watching what happens: a progress bar, and one line for every transition."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


class Progress:
    """Show a bar on the terminal, or nothing where `shown` is False."""

    def __init__(self, total_steps: int, *, shown: bool, label: str) -> None:
        # A log file gets a line every half minute instead of a bar redrawn in place.
        interval_s = 0.2 if sys.stderr.isatty() else 30.0
        self._bar: Any = (
            tqdm(
                total=total_steps,
                desc=label,
                dynamic_ncols=True,
                mininterval=interval_s,
                maxinterval=interval_s,
            )
            if shown
            else None
        )

    def step(self, done: int, total: int, fields: dict[str, str]) -> None:
        """Show that `done` of `total` steps are done, and the fields beside the bar."""
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix(fields, refresh=False)
            self._bar.update(done - self._bar.n)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.write(line)

    def close(self) -> None:
        """Leave the finished bar on the terminal."""
        if self._bar is not None:
            self._bar.close()
