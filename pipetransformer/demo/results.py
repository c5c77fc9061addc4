"""Hold what the demo's runs came to, and write them beside each other."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from autopipe.trace import text_table

RESULT_FILE = "result.json"
MOST_HELD_UP = 0.1
"""Share of a run's seconds that other programs may hold it up before its time says nothing."""
TITLES = {
    "unfrozen": ("nothing frozen, a pipeline of two", "yes"),
    "elastic": ("layers freeze, elastic", "yes"),
    "plain": ("layers freeze, a loop and a cache by hand", "no"),
}
"""The runs in the table, and whether each process keeps to the memory limit."""


class RunQueueWait:
    """Measure how long this thread waited for a core that another program had.

    Attributes:
        share: of the seconds between entering and leaving; None where the system does not say.
    """

    share: float | None = None

    def __enter__(self) -> RunQueueWait:
        self._start, self._waited_s = time.perf_counter(), _waited_s()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        waited_s = _waited_s()
        if waited_s is not None and self._waited_s is not None:
            self.share = (waited_s - self._waited_s) / (time.perf_counter() - self._start)


def _waited_s() -> float | None:
    """Return the seconds in which this thread could have run and did not; None if not known."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


@dataclass(frozen=True)
class Result:
    """Hold what a run came to.

    Args:
        seconds: of steps and transitions, without measuring and evaluations.
        accuracy: on the test scans, 0 to 1.
        held_up: as of RunQueueWait, on the first process.
    """

    seconds: float
    accuracy: float
    held_up: float | None

    def write(self, folder: Path) -> None:
        """Write it into a run's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT_FILE).write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Result:
        """Read what a run's folder holds."""
        return cls(**json.loads((folder / RESULT_FILE).read_text()))


def table(results: Mapping[str, Result]) -> str:
    """Return the table of all runs, and what follows from it."""
    most = max(one.held_up or 0.0 for one in results.values())
    is_spoiled = most > MOST_HELD_UP
    rows = [["", "memory limit", "seconds", "accuracy"]]
    for run, one in results.items():
        seconds = "" if is_spoiled else f"{one.seconds:.1f}"
        rows.append([*TITLES[run], seconds, f"{one.accuracy:.1%}"])
    if is_spoiled:
        follows = (
            f"Other programs held a run up for {most:.0%} of its time, so no times are shown; "
            "run it again on an idle machine. The accuracies stand."
        )
    else:
        ours = results["elastic"].seconds
        unfrozen, plain = (results[one].seconds / ours for one in ("unfrozen", "plain"))
        follows = (
            f"Beside the elastic run, training without freezing takes {unfrozen:.2f} times as "
            "long. Without the memory limit no pipeline is needed: a loop and a cache by hand, on "
            f"all cores, take {plain:.2f} times as long."
        )
    return f"{text_table(rows)}\n\n{follows}"
