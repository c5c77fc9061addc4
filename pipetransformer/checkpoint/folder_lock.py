"""Keep a second run out of a folder in which one trains."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import final

_LOCK = "lock"
_POLL_S = 0.2
_LOG = logging.getLogger(__name__)


@final
class FolderLock:
    """Hold a folder for this process and those it forks; the system lets go when they have ended.

    Two runs in one folder would overwrite each other's records and checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def take(self, *, patience_s: float = 0.0) -> None:
        """Lock the folder, which is made if it is missing.

        Where the file system has no locks, this warns and does nothing.

        Args:
            patience_s: how long to wait for another holder to end. A node that was lost keeps what
                it locked on a network file system until the server gives it up.
        Raises:
            ValueError: another run holds the folder, or it cannot be written to.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(
                f"folder {str(self._folder)!r} cannot be written to: {error}; give another folder"
            ) from error
        try:
            if not self._lock(descriptor, patience_s):
                os.close(descriptor)
                return
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        with suppress(OSError):  # On a full disk the holder stays unnamed.
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def close(self) -> None:
        """Let go of the folder; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _lock(self, descriptor: int, patience_s: float) -> bool:
        """Tell whether the file could be locked, for which others are waited."""
        deadline, has_warned = time.monotonic() + patience_s, False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    _LOG.warning(
                        "folder %s cannot be locked: %s; start no second run in it",
                        self._folder,
                        error,
                    )
                    return False
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            trains = f"{holder or 'another process'} is training in folder {str(self._folder)!r}"
            if time.monotonic() >= deadline:
                raise ValueError(f"{trains}; wait for it to end, end it, or give another folder")
            if not has_warned:
                _LOG.warning("%s; waiting up to %.0f s for it to end", trains, patience_s)
            has_warned = True
            time.sleep(_POLL_S)


def clear_folder(folder: Path) -> None:
    """Delete what a folder holds, if no run trains in it or in a folder just below.

    Raises:
        ValueError: one does.
    """
    with ExitStack() as locks:
        for locked in (folder, *(path.parent for path in folder.glob(f"*/{_LOCK}"))):
            lock = FolderLock(locked)
            locks.callback(lock.close)
            lock.take()
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()
