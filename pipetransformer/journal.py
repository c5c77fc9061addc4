"""Write every decision to disk before it is executed, so that a resume repeats it.

One JSON object a line, in the order decided; its int "step" says when the decision takes effect.

    {"step": 200, "num_frozen": 4, "length": 2}     fsynced, then executed
    {"step": 400, "num_frozen": 6, "length": 1}     fsynced, then executed
    {"step": 600, "num_fro                          killed while writing: never executed, dropped

A resume from the checkpoint of step s takes the decisions of steps >= s from here and does not ask
the policy again: one that looks at clocks, or at a new measurement, might choose differently.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_LOG = logging.getLogger(__name__)


def encode_json(value: Any, what: str) -> str:
    """Encode plain values as one line of JSON that reads back equal.

    Floats keep every bit; NaN and infinities are written as Python's own json reads them. Only a
    tuple changes: it comes back as a list.

    Args:
        what: name of the value, for messages.
    Raises:
        TypeError: a value that JSON cannot hold (a tensor), or a key that it would turn into a
            string (an int).
    """
    _check_plain(value, what)
    return json.dumps(value)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable; fsync of a file keeps its bytes, not its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read all entries in the order of their writing; drop a torn last line with a warning.

    Raises:
        FileNotFoundError: there is no journal.
        ValueError: a complete line is not an entry, so something else has changed the file.
    """
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        _LOG.warning(
            "journal %s ends in a torn line of %d bytes: that decision was never executed, "
            "and is dropped",
            path,
            len(torn),
        )
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


class Journal:
    """Append decisions durably, and know those recorded for the steps to come. For rank 0 only.

    `Journal(path)` starts a run's journal; `Journal.resume(path, from_step)` continues it.
    """

    def __init__(self, path: Path, *, from_step: int | None = None) -> None:
        """Open the journal for appending; create it and its folder where needed.

        Args:
            from_step: first step that is trained again; None starts a new journal.
        Raises:
            FileExistsError: a new journal was asked for in place of another run's decisions; a
                later resume would replay a mixture of both.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = read_journal(path) if path.exists() else []
        if entries and from_step is None:
            raise FileExistsError(
                f"journal {path} already holds {len(entries)} decisions of a run; "
                "resume that run, or choose another directory"
            )
        first = from_step or 0
        self._recorded = {entry["step"]: entry for entry in entries if entry["step"] >= first}
        _cut_torn_line(path)
        self._file = open(path, "ab")
        fsync_folder(path.parent)

    @classmethod
    def resume(cls, path: Path, from_step: int) -> Journal:
        """Continue a journal: keep its entries and offer those of steps >= from_step."""
        if not path.exists():
            _LOG.warning(
                "journal %s is missing: decisions from step %d on are taken anew, and may differ "
                "from those of the interrupted run",
                path,
                from_step,
            )
        return cls(path, from_step=from_step)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one decision and wait until it is on disk; execute it only after this returns.

        A replayed decision, equal to the one recorded for its step, is not written again.

        Raises:
            ValueError: the entry has no int "step" >= 0.
            TypeError: it holds a value that JSON cannot hold.
        """
        line = encode_json(dict(entry), "journal entry")
        plain: dict[str, Any] = json.loads(line)
        step = _step_of(plain)
        if _canonical(plain) == _canonical(self._recorded.get(step)):
            return
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
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


def _check_plain(value: Any, what: str) -> None:
    if isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"{what} has the key {key!r} of type {type(key).__name__}, which JSON would "
                    "turn into a string; use a str"
                )
            _check_plain(member, f"{what}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, member in enumerate(value):
            _check_plain(member, f"{what}[{index}]")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(
            f"{what} is a {type(value).__name__}; allowed are dict, list, tuple, str, int, float, "
            "bool and None; convert it (.item(), .tolist()) or store a tensor in a shard"
        )


def _cut_torn_line(path: Path) -> None:
    # Appending behind a torn line would join both into one unreadable line in the middle.
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = json.loads(line)
        _step_of(entry)
    except ValueError as error:
        raise ValueError(
            f"{where} is no journal entry ({error}); restore the file, or delete it to have the "
            "decisions after the checkpoint taken anew"
        ) from error
    return entry


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
