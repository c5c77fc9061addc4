"""Keep a run's log, for a run that goes on from its checkpoint.

file                 read by                       written
trainer_state.json   other programs                as transformers writes it, with a checkpoint
log_history.jsonl    the run that goes on          a line at each log, with its own hash

A line is there before the checkpoint that follows it, so that a killed run lacks none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from transformers import TrainerState

from freeze import read_line, sealed_line
from pipetransformer.durable_files import LineFile, replace_file
from pipetransformer.report import RECORDS_FILE, read_records, run_is_over

STATE_FILE, HISTORY_FILE = "trainer_state.json", "log_history.jsonl"

Entry = dict[str, Any]

_LOGGER = logging.getLogger(__name__)


@final
class LogHistory:
    """Write and read the log in a run's folder; where that fails, warn. For rank 0 only."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / HISTORY_FILE
        self._lines: LineFile | None = None

    def begin(self, entries: list[Entry]) -> None:
        """Write what a run begins with, in the place of what an earlier one has left."""
        self.close()
        try:
            replace_file(self._path, b"".join(map(_line_of, entries)))
            self._lines = LineFile(self._path)
        except OSError as error:
            self._warn(error)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append an entry, once begun."""
        if self._lines is not None:
            try:
                self._lines.append(_line_of(entry))
            except OSError as error:
                self._warn(error)
                self.close()

    def close(self) -> None:
        """Append nothing more."""
        if self._lines is not None:
            self._lines.close()
        self._lines = None

    def read(self, step: int) -> list[Entry]:
        """Return the entries up to a step, without lines that are damaged."""
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError as error:
            _LOGGER.warning("what was logged until step %d is lost: %s", step, error)
            return []
        entries = []
        for number, line in enumerate(lines, start=1):
            try:
                entries.append(read_line(line)["log"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                _LOGGER.warning(
                    "%s, line %d is damaged, and left out of the log: %r",
                    self._path,
                    number,
                    error,
                )
        return [entry for entry in entries if entry["step"] <= step]

    def write_state(self, state: TrainerState) -> None:
        """Write all of transformers' state, for other programs."""
        text = json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"
        try:
            replace_file(self._folder / STATE_FILE, text.encode())
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        _LOGGER.warning("what was logged is not kept: %s; training goes on", error)


def _line_of(entry: Mapping[str, Any]) -> bytes:
    # Within another object, as a script may log a number by the name of the hash.
    return sealed_line({"step": entry["step"], "log": entry})


def was_over(folder: Path) -> bool:
    """Return whether the last run in a folder came to its end."""
    try:
        return run_is_over(read_records(folder / RECORDS_FILE))
    except ValueError:
        return False
