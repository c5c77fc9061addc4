"""Hold what the demo's runs came to, and write them beside each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from autopipe.trace import text_table
from pipetransformer.demo.settings import RUNS

RESULT_FILE = "result.json"
MOST_HELD_UP = 0.1
"""Share of a run's seconds that other programs may hold it up before its time says nothing."""


@dataclass(frozen=True)
class Result:
    """Hold what a run came to.

    Args:
        seconds: of steps and transitions, without measuring and evaluations.
        accuracy: on the test scans, 0 to 1.
        held_up: as of HeldUp, on the first process.
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

    @property
    def is_spoiled(self) -> bool:
        """Tell whether other programs held it up for so long that its seconds say nothing."""
        return self.held_up is not None and self.held_up > MOST_HELD_UP


def told(results: Mapping[str, Result]) -> str:
    """Return the table of all runs, and what follows from it."""
    spoiled = {run: one.held_up for run, one in results.items() if one.is_spoiled}
    rows = [["", "memory limit", "seconds", "accuracy"]]
    for run, one in results.items():
        seconds = "" if spoiled else f"{one.seconds:.1f}"
        limit = "yes" if RUNS[run].is_limited else "no"
        rows.append([RUNS[run].title, limit, seconds, f"{one.accuracy:.1%}"])
    if spoiled:
        most = max(share or 0.0 for share in spoiled.values())
        follows = (
            f"Other programs held a run up for {most:.0%} of its time, so no times are shown; "
            "run it again on an idle machine. The accuracies stand."
        )
    else:
        follows = _compared(results)
    return f"{text_table(rows)}\n\n{follows}"


def _compared(results: Mapping[str, Result]) -> str:
    ours = results["elastic"].seconds
    unfrozen, torch, plain = (
        results[one].seconds / ours for one in ("unfrozen", "torch", "plain")
    )
    return (
        f"Beside the elastic run, training without freezing takes {unfrozen:.2f} times as long, "
        f"and torch's pipeline with the same freezing {torch:.2f} times. Without the memory limit "
        "no pipeline is needed: a loop and a cache by hand, on all cores, take "
        f"{plain:.2f} times as long."
    )
