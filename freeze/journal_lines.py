"""Write decisions as lines of a run's journal, and read them to resume or repeat the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

JOURNAL_FILE = "journal.jsonl"
_CHECK, _CHECK_DIGITS = "check", 16


def sealed_line(entry: Mapping[str, Any]) -> bytes:
    """Return an entry as a line that ends with the entry's hash."""
    return f"{json.dumps({**entry, _CHECK: _check_of(entry)})}\n".encode()


def read_line(line: bytes) -> dict[str, Any]:
    """Return a line's entry; a ValueError, KeyError, TypeError or AttributeError if damaged."""
    entry: dict[str, Any] = json.loads(line)
    check = entry.pop(_CHECK)
    if check != _check_of(entry):
        step = entry.get("step")
        raise ValueError(f"the decision of step {step} does not fit its check value {check!r}")
    return entry


def note_decision(course: dict[int, T], step: int, decision: T) -> None:
    """Add a step's decision; drop decisions of this and later steps.

    A resumed run writes those steps again: the old lines are of a course that ended.
    """
    while course and next(reversed(course)) >= step:
        course.popitem()
    course[step] = decision


def _check_of(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry).encode()).hexdigest()[:_CHECK_DIGITS]
