"""Run a function in several processes, and fetch what it found."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pipetransformer import launch

T = TypeVar("T")


def found_by(function: Callable[..., T], arguments: Sequence[Any], *, num_slots: int = 2) -> T:
    """Start processes that each call a function, and return what it returned on rank 0.

    Raises:
        WorkerFailedError: a process failed; what it printed says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        launch(_call, (function, arguments, answer), num_slots=num_slots)
        found: T = pickle.loads(answer.read_bytes())
        return found


def _call(function: Callable[..., Any], arguments: Sequence[Any], answer: Path) -> None:
    found = function(*arguments)
    if os.environ["RANK"] == "0":
        answer.write_bytes(pickle.dumps(found))
