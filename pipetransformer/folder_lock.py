"""Keep a second run out of a folder in which one trains."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import final

from pipetransformer.resume import agree
from pipetransformer.world import World

_LOCK = "lock"
_LOG = logging.getLogger(__name__)


@final
class FolderLock:
    """Hold a run's folder for rank 0; the system lets go of it when that process ends, however.

    A restarted run finds it free. Two runs would overwrite each other's records and checkpoints.
    Collective.

    Args:
        folder: created if missing; None locks nothing.
        world: the ranks of the run.
    Raises:
        ValueError: another process holds it, or it cannot be written to; on every rank.
    """

    def __init__(self, folder: Path | None, world: World) -> None:
        self._descriptor: int | None = None
        if folder is not None:
            agree(lambda: self._take(folder) if world.is_main else None, group=world.group)

    def close(self) -> None:
        """Let go of the folder; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _take(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(
                f"folder {str(folder)!r} cannot be written to: {error}; give another folder"
            ) from error
        try:
            # Of the process, and not of the open file, which a forked child would keep locked.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 1000).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                _LOG.warning("folder %s cannot be locked: %s; start no second run in it",
                             folder, error)
                return
            raise ValueError(
                f"{holder or 'another process'} is training in folder {str(folder)!r}; wait for "
                "it to end, end it, or give another folder"
            ) from None
        self._descriptor = descriptor
        with suppress(OSError):  # On a full disk the holder stays unnamed.
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
