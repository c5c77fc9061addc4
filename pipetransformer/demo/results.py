"""Hold what the demo's runs came to, and write them beside each other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from autopipe.trace import text_table

RESULT_FILE = "result.json"
MOST_HELD_UP = 0.1
"""Share of a run's seconds that other programs may hold it up before its time says nothing."""
LOOPS = {
    "loop": "a loop of your own, 6 of 8 blocks frozen",
    "rows": "the same with two lines more",
    "kept": "another learning rate, from rows that were kept",
}
"""The loops of one process, which come first."""
TITLES = {
    "unfrozen": ("nothing frozen, a pipeline of two", "yes"),
    "elastic": ("layers freeze, elastic", "yes"),
    "plain": ("layers freeze, a loop and a cache by hand", "no"),
}
"""The runs of two processes, and whether each of these keeps to the memory limit."""


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
        differ: by how much a step's loss differs from that of the first loop, at most.
    """

    seconds: float
    accuracy: float
    held_up: float | None
    differ: float = 0.0

    def write(self, folder: Path) -> None:
        """Write it into a run's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT_FILE).write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Result:
        """Read what a run's folder holds."""
        return cls(**json.loads((folder / RESULT_FILE).read_text()))


def table(results: Mapping[str, Result]) -> str:
    """Return a table of the loops and one of the runs, and what follows from each."""
    loops, runs = ([results[name] for name in names] for names in (LOOPS, TITLES))
    rows = [["one process"], *([title] for title in LOOPS.values())]
    first = _part(rows, loops, _about_loops)
    rows = [["", "memory limit"], *([*both] for both in TITLES.values())]
    return f"{first}\n\n{_part(rows, runs, _about_runs)}"


def _part(
    rows: list[list[str]], results: Sequence[Result], about: Callable[[Sequence[Result]], str]
) -> str:
    """Return a table whose rows begin so, and what follows from it."""
    most = max(one.held_up or 0.0 for one in results)
    is_spoiled = most > MOST_HELD_UP
    seconds = ["" if is_spoiled else f"{one.seconds:.1f}" for one in results]
    accuracies = [f"{one.accuracy:.1%}" for one in results]
    columns = zip(rows, ["seconds", *seconds], ["accuracy", *accuracies], strict=True)
    text = text_table([[*begin, *end] for begin, *end in columns])
    return f"{text}\n\n{_spoiled(most) if is_spoiled else about(results)}"


def _spoiled(share: float) -> str:
    return (
        f"Other programs had the cores for {share:.0%} of the time that one of these took, so "
        "that its seconds say nothing, and none are shown. Run the demo again while nothing else "
        "runs. The accuracies stand."
    )


def _about_loops(results: Sequence[Result]) -> str:
    plain, rows, kept = results
    return (
        f"With two lines more the loop takes {rows.seconds / plain.seconds:.2f} of its time, "
        f"and a later one, over kept rows, {kept.seconds / plain.seconds:.2f}. "
        f"Losses of the first two differ by {rows.differ:.0e} at most."
    )


def _about_runs(results: Sequence[Result]) -> str:
    unfrozen_s, elastic_s, plain_s = (one.seconds for one in results)
    unfrozen, plain = unfrozen_s / elastic_s, plain_s / elastic_s
    return (
        f"Beside the elastic run, training without freezing takes {unfrozen:.2f} times as long. "
        "Without the memory limit no pipeline is needed: a loop and a cache by hand, on all "
        f"cores, take {plain:.2f} times as long."
    )
