"""Write what survives a power cut, and read it only as it was written: lines, files, tensors.

Where another program has put a symbolic link, nothing is written: it may lead anywhere.
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

_SEAL = "sha256"
_HEADER_BYTES = 8
"""A safetensors file begins with the length of its JSON header in so many bytes."""


class LineFile:
    """A file of lines that is only appended to. What is written survives the process's death.

    A last line without its newline was torn by a kill, and is cut off.

    Raises:
        ValueError: the path is a symbolic link.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        descriptor = open_unlinked(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._path, self._file = path, open(descriptor, "r+b", buffering=0)
        # Appending behind it would join both into one unreadable line in the middle.
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def append(self, line: bytes, *, durable: bool = False) -> None:
        """Append one line with its newline; if durable, wait until it is on disk.

        Raises:
            OSError: the disk is full or failed; nothing of the line is left in the file.
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
    """Open a file, created readable as the umask says, but no other one that a link leads to.

    Returns:
        Its descriptor.
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
    """Write a file that appears under its name in one piece, and wait until it is on disk."""
    with _replacing(path) as temporary:
        descriptor = open_unlinked(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(descriptor, "wb") as file:
            file.write(data)
        fsync(temporary)


def sealed_json(content: Any) -> bytes:
    """Return JSON text that holds its own SHA-256."""
    return json.dumps({_SEAL: hash_json(content), "content": content}).encode()


def read_sealed_json(path: Path) -> Any:
    """Read the content of a file of `sealed_json`.

    Raises:
        OSError, ValueError: it cannot be read, or is not what was written.
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
    """Write a new safetensors file, readable as the umask says, and wait until it is on disk.

    Args:
        facts: go into its header.
    Raises:
        OSError: the disk is full or failed, or there is such a file.
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
    """Write a safetensors file that appears under its name in one piece, and is then on disk.

    Its folder is created if missing. Its header has a SHA-256 of the tensors, for `read_tensors`.

    Args:
        tensors: anywhere, and in any layout; some may share memory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    copies = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
    with _replacing(path) as temporary:
        write_tensors(temporary, copies, {_SEAL: _hash_tensors(copies)})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read what `replace_tensors` wrote, into host memory.

    Raises:
        OSError, ValueError: it cannot be read, or is not what was written.
    """
    data = path.read_bytes()  # What is checked is what is used, whatever the disk does next.
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
    """Return the SHA-256 of names, dtypes, shapes and bytes of contiguous tensors on the CPU."""
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
    """Give a new file to be written; it then takes the path's place, or is gone where that failed.

    What a kill has left under its name, or a link that another program put there, is removed.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
    except OSError as error:
        temporary.unlink(missing_ok=True)  # On a full disk others need the room.
        raise _naming(path, error) from error
    os.replace(temporary, path)
    fsync(path.parent)


def _naming(path: Path, error: OSError) -> OSError:
    """Return the error with the file's name, which that of a descriptor lacks."""
    if error.errno is None or error.filename is not None:
        return error
    return OSError(error.errno, error.strerror, str(path))


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
