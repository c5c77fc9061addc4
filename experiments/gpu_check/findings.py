"""Keep what a phase finds: every line is in a file before the next one is begun.

Neither this nor what starts phases imports torch, whose seconds would be missing elsewhere.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

OK, FAILED, NO_TIME = "ok", "failed", "no time"
_LEAST_S = 2.0
"""Below which nothing is begun."""


@dataclass(frozen=True)
class Setting:
    """Say where and how long a phase runs.

    Args:
        device: "cuda" or "cpu".
        tiny: tiny models, to rehearse.
        data: what `--pack` has made; None takes random weights, images and sentences.
        out: for the report.
        scratch: a folder of the phase's own, removed behind it.
        deadline: as of time.time(), when the phase is killed.
    """

    device: Literal["cuda", "cpu"]
    tiny: bool
    data: str | None
    out: str
    scratch: str
    deadline: float

    @property
    def left_s(self) -> float:
        return self.deadline - time.time()


@dataclass(frozen=True)
class Line:
    """Hold one line of the report.

    Args:
        name: what was checked or timed.
        status: OK, FAILED or NO_TIME.
        figures: by their names, with their units.
        of_ideal: the ideal's time over ours; 1 is the most that can be had. None beside no ideal.
        error: why it failed.
    """

    name: str
    status: str = OK
    figures: Mapping[str, Any] = field(default_factory=dict)
    of_ideal: float | None = None
    error: str = ""


class Findings:
    """Collect a phase's lines in a file.

    Args:
        path: of the file, replaced as a whole by each line.
        left_s: returns the seconds until the phase is killed.
    """

    def __init__(self, path: Path, left_s: Callable[[], float]) -> None:
        self._path, self._left_s = path, left_s
        self._lines: list[Line] = []

    def note(self, name: str, *, of_ideal: float | None = None, **figures: Any) -> None:
        """Add a line that is well."""
        self._add(Line(name, OK, figures, of_ideal))

    def check(self, name: str, action: Callable[[], Mapping[str, Any] | None]) -> None:
        """Add a line with the figures that an action returns; an error costs this line alone.

        Args:
            action: None means that it has noted lines itself.
        """
        if self._left_s() < _LEAST_S:
            self._add(Line(name, NO_TIME))
            return
        start = time.perf_counter()
        try:
            figures = action()
        except Exception as error:  # Whatever it is, the other lines are still worth their time.
            traceback.print_exc()
            self._add(Line(name, FAILED, error=f"{type(error).__name__}: {error}"))
            return
        if figures is not None:
            seconds = round(time.perf_counter() - start, 2)
            self.note(name, **{**figures, "took_s": seconds})

    def end(self) -> None:
        """Say that nothing is missing."""
        self._write(ended=True)

    def _add(self, line: Line) -> None:
        self._lines.append(line)
        self._write(ended=False)

    def _write(self, *, ended: bool) -> None:
        found = {"lines": [asdict(line) for line in self._lines], "ended": ended}
        write_whole(self._path, found)


def write_whole(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file that a reader finds as it was or as it is, never in part."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1))
    os.replace(temporary, path)
