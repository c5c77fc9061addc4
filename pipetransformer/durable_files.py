"""Write files that survive a power cut, and refuse to read a changed one: lines, JSON, tensors.

Nothing is written through a symbolic link: another program may have put it there.
"""

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
import torch
from safetensors import SafetensorError
from torch import Tensor

__all__ = [
    "LineFile", "check_plain", "fsync", "hash_json", "open_unlinked", "read_sealed_json",
    "read_tensors", "replace_file", "replace_tensors", "sealed_json", "write_tensors",
]  # fmt: skip

_SEAL = "sha256"
_HEADER_BYTES = 8
"""Bytes at the start of a safetensors file that hold the length of its JSON header."""


class LineFile:
    """Append lines to a file; they survive the process's death.

    A last line without its newline was torn by a kill, and is cut off.

    Raises:
        ValueError: the path is a symbolic link.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        descriptor = open_unlinked(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._path, self._file = path, open(descriptor, "r+b", buffering=0)
        # A line appended to a torn one would make both unreadable.
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def append(self, line: bytes, *, durable: bool = False) -> None:
        """Append one line, newline included; if durable, wait until it is on disk.

        Raises:
            OSError: the disk is full or failed; the line is taken out of the file.
        """
        start = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(start)
            raise _naming(self._path, error) from error

    def close(self) -> None:
        self._file.close()


def open_unlinked(path: Path, flags: int) -> int:
    """Open a file, never through a link, and return its descriptor; a new one has umask's mode.

    Raises:
        ValueError: the path is a symbolic link.
        OSError: it cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP or not path.is_symlink():
            raise
        raise ValueError(
            f"{path} is a symbolic link to {os.readlink(path)}, and a run writes only files of "
            "its own; remove the link, or give another folder"
        ) from error


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that appears in one piece, and wait until it is on disk."""
    with _replacing(path) as temporary:
        descriptor = open_unlinked(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(descriptor, "wb") as file:
            file.write(data)
        fsync(temporary)


def sealed_json(content: Any) -> bytes:
    """Return JSON text with its own SHA-256, for `read_sealed_json`."""
    return json.dumps({_SEAL: hash_json(content), "content": content}).encode()


def read_sealed_json(path: Path) -> Any:
    """Read the content of a `sealed_json` file.

    Raises:
        OSError, ValueError: it cannot be read, or was changed.
    """
    data = path.read_bytes()
    try:
        sealed = json.loads(data)
        content, seal = sealed["content"], sealed[_SEAL]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not what was written: {error!r}") from error
    _expect_seal(path, hash_json(content), seal)
    return content


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None
) -> None:
    """Write a new safetensors file with umask's mode, and wait until it is on disk.

    Args:
        facts: go into its header.
    Raises:
        OSError: the disk is full or failed, or the file exists.
    """
    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    # transformers refuses a file that does not say whose tensors it holds.
    try:
        safetensors.torch.save_file(
            dict(tensors), path, metadata={"format": "pt", **(facts or {})}
        )
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    path.chmod(mode)  # safetensors lets nobody but its owner read a file.
    fsync(path)


def replace_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file that appears in one piece, for `read_tensors`; wait as above.

    Args:
        path: its folder is created if missing.
        tensors: on any device, and in any layout; some may share memory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    copies = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
    with _replacing(path) as temporary:
        write_tensors(temporary, copies, {_SEAL: _hash_tensors(copies)})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of `replace_tensors` into host memory.

    Raises:
        OSError, ValueError: it cannot be read, or was changed.
    """
    data = path.read_bytes()  # Once: a second read may find other bytes than the checked ones.
    try:
        length = int.from_bytes(data[:_HEADER_BYTES], "little")
        header = json.loads(data[_HEADER_BYTES : _HEADER_BYTES + length])
        seal = header["__metadata__"][_SEAL]
        tensors = safetensors.torch.load(data)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not what was written: {error!r}") from error
    _expect_seal(path, _hash_tensors(tensors), seal)
    return tensors


def _hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes of contiguous CPU tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _expect_seal(path: Path, found: str, seal: object) -> None:
    if found != seal:
        raise ValueError(f"{path} has SHA-256 {found}; expected {seal}")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file's path; the file then replaces `path`, or is removed on failure."""
    temporary = path.with_name(path.name + ".tmp")
    # A kill may have left one, or another program a link.
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
    except OSError as error:
        temporary.unlink(missing_ok=True)  # On a full disk others need the room.
        raise _naming(path, error) from error
    os.replace(temporary, path)
    fsync(path.parent)  # The new name is in the folder's own data.


def _naming(path: Path, error: OSError) -> OSError:
    """Add the file's name to an error of its descriptor, which has none."""
    if error.errno is None or error.filename is not None:
        return error
    return OSError(error.errno, error.strerror, str(path))


def fsync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on disk; one does not do the other."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_json(value: Any) -> str:
    """Return the SHA-256 of a value's JSON text; reading and encoding it again gives the same."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def check_plain(value: Any, what: str) -> None:
    """Refuse a value, named `what`, that JSON would change, except tuples, which become lists.

    Raises:
        TypeError: JSON cannot hold a part (a tensor), or would make it a string (an int key).
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
