"""Write every decision to disk before it is executed, so that a resume repeats it.

One JSON object a line, in the order decided; its int "step" says when the decision takes effect,
and "check" is a hash of the rest.

    {"step": 200, "num_frozen": 4, "length": 2, "check": "5f..."}    fsynced, then executed
    {"step": 400, "num_frozen": 7, "length": 1, "check": "b0..."}    a bit has flipped: dropped
    {"step": 600, "num_fro                                           killed here: never executed

A resume from the checkpoint of step s takes the decisions of steps >= s from here: a policy that
looks at clocks, or a planner with new measurements, might choose differently. A decision whose
line is damaged is taken anew, saying so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from pipetransformer.durable import LineFile, encode_json, fsync_folder

_LOG = logging.getLogger(__name__)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read the entries in the order of their writing; warn of each line that is not as written.

    Raises:
        FileNotFoundError: there is no journal.
    """
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        _LOG.warning(
            "journal %s ends in a torn line of %d bytes: that decision was never executed, "
            "and is dropped",
            path,
            len(torn),
        )
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(_unseal(line))
        except ValueError as error:
            _LOG.warning(
                "journal %s, line %d is damaged (%s): its decision is taken anew if its step is "
                "trained again",
                path,
                number,
                error,
            )
    return entries


class Journal:
    """Append decisions durably, and know those recorded for the steps to come. For rank 0 only."""

    def __init__(self, path: Path, *, from_step: int | None = None) -> None:
        """Open the journal for appending; create it and its folder where needed.

        Args:
            from_step: first step that is trained again, whose and later decisions are offered;
                None starts a new journal.
        Raises:
            FileExistsError: a new journal was asked for in place of another run's decisions; a
                later resume would replay a mixture of both.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if from_step and not path.exists():
            _LOG.warning(
                "journal %s is missing: decisions from step %d on are taken anew, and may differ "
                "from those of the interrupted run",
                path,
                from_step,
            )
        entries = read_journal(path) if path.exists() else []
        if from_step is None and path.exists() and b"\n" in path.read_bytes():
            raise FileExistsError(
                f"journal {path} already holds {len(entries)} decisions of a run; continue it "
                "with resume='auto', or choose another directory"
            )
        first = from_step or 0
        self._recorded = {entry["step"]: entry for entry in entries if entry["step"] >= first}
        _cut_torn_line(path)
        self._file = LineFile(path)
        fsync_folder(path.parent)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one decision and wait until it is on disk; execute it only after this returns.

        A replayed decision, equal to the one recorded for its step, is not written again. Where
        the disk is full the decision is not recorded, which is warned of.

        Raises:
            ValueError: the entry has no int "step" >= 0, or a "check" of its own.
            TypeError: it holds a value that JSON cannot hold.
        """
        line = encode_json(dict(entry), "journal entry")
        plain: dict[str, Any] = json.loads(line)
        step = _step_of(plain)
        if "check" in plain:
            raise ValueError("a journal entry holds 'check', which is added to it; rename that")
        if _canonical(plain) == _canonical(self._recorded.get(step)):
            return
        sealed = f'{line[:-1]}, "check": "{_check_value(line)}"}}\n'.encode()
        try:
            self._file.append(sealed, durable=True)
        except OSError as error:
            _LOG.warning(
                "the decision of step %d is not in the journal: %s; a run that is interrupted "
                "before the next checkpoint may decide otherwise",
                step,
                error,
            )
        self._recorded[step] = plain

    def recorded(self, step: int) -> dict[str, Any] | None:
        """Return the last decision recorded for a step >= from_step, or None."""
        return self._recorded.get(step)

    def close(self) -> None:
        """Close the file; every entry is on disk already."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _cut_torn_line(path: Path) -> None:
    # Appending behind a torn line would join both into one unreadable line in the middle.
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _unseal(line: bytes) -> dict[str, Any]:
    """Return the entry of a line; a ValueError unless it is as it was written."""
    entry: dict[str, Any] = json.loads(line)
    _step_of(entry)
    check = entry.pop("check", None)
    # What json.loads reads, json.dumps turns back into the very text that was hashed.
    if check != _check_value(json.dumps(entry)):
        raise ValueError(f"it does not fit its check value {check!r}")
    return entry


def _check_value(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:16]


def _step_of(entry: Any) -> int:
    step = entry.get("step") if isinstance(entry, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(
            f"an entry must hold an int 'step' >= 0, when it takes effect; got {entry!r}; add it"
        )
    return step


def _canonical(entry: dict[str, Any] | None) -> str:
    # As text, NaN equals itself, and 1, 1.0 and True differ.
    return json.dumps(entry, sort_keys=True)
