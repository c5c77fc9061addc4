"""Keep what no step changes once in a run's folder, in files that are named by their SHA-256.

    run/
      frozen/<sha256>.safetensors     written by the first save that names it
      checkpoints/step-00001200/      its manifest names files of frozen/

A save writes a group of tensors if its values are not those of the save before. It compares sums
of all values, as writes through `.data` leave no trace in tensors' versions. After writing it
compares them again, as weights that no step changes are written without a copy. A file goes with
the last checkpoint that names it. A kill leaves files too many, never too few.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import final

from torch import Tensor

from autocache import fingerprint
from pipetransformer.checkpoint.format import (
    FROZEN,
    FROZEN_NAME,
    SHARD_NAME,
    ShardRecord,
    Shards,
    file_name,
    named_frozen,
    record_of,
)
from pipetransformer.durable_files import fsync, write_tensors

_OWN_FILE = re.compile(rf"{FROZEN_NAME}|{SHARD_NAME}(\.tmp)?")
_LOG = logging.getLogger(__name__)


@final
class FrozenStore:
    """Write groups of tensors once, and remember what was written.

    Args:
        directory: of the run's checkpoints; the store lies beside it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._folder = directory, directory.parent / FROZEN
        self._sums: dict[str, dict[str, int]] = {}
        self._written: dict[str, tuple[dict[str, int], ShardRecord]] = {}

    def unseen(self, groups: Shards) -> Shards:
        """Return the groups under whose names nothing was written yet."""
        return {name: group for name, group in groups.items() if name not in self._written}

    def changed(self, groups: Shards) -> Shards:
        """Return the groups that `write` needs copies of: those that no file holds as they are."""
        self._sums = {name: _sums_of(group) for name, group in groups.items()}
        return {name: group for name, group in groups.items() if not self._holds(name)}

    def write(self, changed: Shards) -> dict[str, ShardRecord]:
        """Write the groups that `changed` returned; return the records of all it was given.

        Raises:
            OSError: the disk is full, or nothing may be written.
            ValueError: a group has changed since `changed`.
        """
        for name, tensors in changed.items():
            record = self._write_file(name, tensors)
            if _sums_of(tensors) != self._sums[name]:
                raise ValueError(f"{name} was changed while it was written")
            self._written[name] = self._sums[name], record
        self._written = {name: self._written[name] for name in self._sums}
        return {name: record for name, (_, record) in self._written.items()}

    def prune(self) -> None:
        """Delete the files that no checkpoint names; none if a manifest cannot be read."""
        try:
            named = named_frozen(self._directory)
            if named is None or not self._folder.is_dir():
                return
            for path in self._folder.iterdir():
                is_own = _OWN_FILE.fullmatch(path.name) and not path.is_symlink()
                if is_own and path.is_file() and path.name not in named:
                    path.unlink()
        except OSError as error:  # The new checkpoint is safe already.
            _LOG.warning("files of no more use stay in %s: %s", self._folder, error)

    def _holds(self, name: str) -> bool:
        sums, record = self._written.get(name, ({}, None))
        return record is not None and sums == self._sums[name] and self._has_file(record)

    def _has_file(self, record: ShardRecord) -> bool:
        with suppress(OSError):
            return (self._folder / record.file).stat().st_size == record.num_bytes
        return False

    def _write_file(self, name: str, tensors: Mapping[str, Tensor]) -> ShardRecord:
        if not self._folder.is_dir():
            self._folder.mkdir(exist_ok=True)
            fsync(self._folder.parent)
        # Tied tensors may be of one hash on two ranks, so each writes under its group's name.
        path = self._folder / file_name(name)
        path.unlink(missing_ok=True)  # A kill may have left one, or another program a link.
        try:
            write_tensors(path, tensors)
            record = record_of(path)
            record = replace(record, file=f"{record.sha256}.safetensors")
            if not self._has_file(record):
                os.replace(path, self._folder / record.file)
                fsync(self._folder)
        finally:
            path.unlink(missing_ok=True)
        return record


def _sums_of(group: Mapping[str, Tensor]) -> dict[str, int]:
    return {key: fingerprint([tensor]) for key, tensor in group.items()}
