"""Keep a second run out of a folder in which one trains."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path

from pipetransformer.durable_files import open_unlinked

LOCK_FILE = "lock"
_POLL_S = 0.2
_LOG = logging.getLogger(__name__)


def lock_folder(folder: Path, *, patience_s: float = 0.0) -> FileIO:
    """Hold a folder, made if it is missing, until the returned file is closed.

    The system closes it once this process and those it forked have ended. Where the file system
    has no locks, this warns and holds nothing.

    Raises:
        ValueError: another run still holds the folder after `patience_s`, it cannot be written, or
            its lock is a symbolic link.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = FileIO(open_unlinked(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT), "r+")
    except OSError as error:
        raise ValueError(
            f"folder {str(folder)!r} cannot be written to: {error}; give another folder"
        ) from error
    try:
        if _wait_for(file, folder, patience_s):
            with suppress(OSError):  # On a full disk the holder stays unnamed.
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except BaseException:
        file.close()
        raise
    return file


def _wait_for(file: FileIO, folder: Path, patience_s: float) -> bool:
    """Tell whether the file could be locked, for which others are waited."""
    deadline, has_warned = time.monotonic() + patience_s, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                text = "folder %s cannot be locked: %s; start no second run in it"
                _LOG.warning(text, folder, error)
                return False
        holder = os.pread(file.fileno(), 1000, 0).decode(errors="replace").strip()
        trains = f"{holder or 'another process'} is training in folder {str(folder)!r}"
        if time.monotonic() >= deadline:
            raise ValueError(f"{trains}; wait for it to end, end it, or give another folder")
        if not has_warned:
            _LOG.warning("%s; waiting up to %.0f s for it to end", trains, patience_s)
        has_warned = True
        time.sleep(_POLL_S)
