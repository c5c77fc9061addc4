"""Seal a decision in a line of a run's journal, and read it: to resume the run, or repeat it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

JOURNAL_FILE = "journal.jsonl"
"""Its name in a run's folder."""
_CHECK, _CHECK_DIGITS = "check", 16


def sealed_line(entry: Mapping[str, Any]) -> bytes:
    """Return an entry as a line, with a hash of it as its last value."""
    return f"{json.dumps({**entry, _CHECK: _check_of(entry)})}\n".encode()


def read_line(line: bytes) -> dict[str, Any]:
    """Return a line's entry.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not as it was written.
    """
    entry: dict[str, Any] = json.loads(line)
    check = entry.pop(_CHECK)
    if check != _check_of(entry):
        step = entry.get("step")
        raise ValueError(f"the decision of step {step} does not fit its check value {check!r}")
    return entry


def note_decision(course: dict[int, T], step: int, decision: T) -> None:
    """Put a step's decision behind those of the steps before it; those of later steps, which were
    written before, are of a course that ended.
    """
    while course and next(reversed(course)) >= step:
        course.popitem()
    course[step] = decision


def _check_of(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry).encode()).hexdigest()[:_CHECK_DIGITS]
