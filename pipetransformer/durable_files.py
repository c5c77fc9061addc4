"""Write what survives a power cut: whole lines, whole files, plain values."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor


class LineFile:
    """A file of lines that is only appended to. What is written survives the process's death.

    A last line without its newline was torn by a kill, and is cut off.
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            # Appending behind it would join both into one unreadable line in the middle.
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = open(path, "ab", buffering=0)

    def append(self, line: bytes, *, durable: bool = False) -> None:
        """Append one line with its newline; if durable, wait until it is on disk.

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
        self._file.close()


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that appears under its name in one piece, and wait until it is on disk."""
    with _replacing(path) as temporary:
        temporary.write_bytes(data)
        fsync(temporary)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a new safetensors file, readable as the umask says, and wait until it is on disk.

    Raises:
        OSError: the disk is full or failed, or there is such a file.
    """
    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    # transformers refuses a file that does not say whose tensors it holds.
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    path.chmod(mode)  # safetensors lets nobody but its owner read a file.
    fsync(path)


def replace_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file that appears under its name in one piece, and is then on disk.

    Its folder is created if missing.

    Args:
        tensors: anywhere, and in any layout; some may share memory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path) as temporary:
        temporary.unlink(missing_ok=True)
        write_tensors(
            temporary, {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
        )


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a file to be written; it then takes the path's place, or is gone where that failed."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
    except OSError:
        temporary.unlink(missing_ok=True)  # On a full disk others need the room.
        raise
    os.replace(temporary, path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Wait until a file's bytes are on disk, or the names in a folder; neither does the other."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_json(value: Any) -> str:
    """Return the SHA-256 of a value's JSON text, which reading and encoding again gives back."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def check_plain(value: Any, what: str) -> None:
    """Refuse a value, named `what`, that does not read back from JSON but for tuples as lists.

    Raises:
        TypeError: it holds what JSON cannot (a tensor), or would turn into a string (an int key).
    """
    if isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"{what} has the key {key!r} of type {type(key).__name__}, which JSON would "
                    "turn into a string; use a str"
                )
            check_plain(member, f"{what}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, member in enumerate(value):
            check_plain(member, f"{what}[{index}]")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(
            f"{what} is a {type(value).__name__}; allowed are dict, list, tuple, str, int, float, "
            "bool and None; convert it (.item(), .tolist()) or store a tensor in a shard"
        )
