"""Append lines to a file, each whole or not at all, also where the disk is full."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


class LineFile:
    """A file of lines that is only appended to. What is written survives the process's death."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)

    def append(self, line: bytes, *, durable: bool = False) -> None:
        """Append one line.

        Args:
            line: with its newline.
            durable: wait until it is on disk; else it is the operating system's, and a machine
                that fails may lose it.
        Raises:
            OSError: the disk is full or failed; nothing of the line is left in the file.
        """
        start = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
            if durable:
                os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):
                self._file.truncate(start)
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()
