"""Keep rows in a folder, where later runs find them by what they were made from.

FOLDER/
  lock                     held while a set is looked for, made or removed
  rows-<hash>/             one set: a data set's rows at one depth of one frozen prefix
    rows                   a `RowStore`; the run that writes it holds a lock on it
    about.json             what the hash was made of; written last, so a set without it is no set

Any number of processes use a set at once. Each holds a shared lock on its folder, so no set is
thrown out that is in use. One run at a time writes a set: its processes share a lock on `rows`,
and know it for theirs by the run's number there. The kernel drops all locks of a process that
dies.

The folder is on a file system of this machine: locks and mappings do not reach over a network.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from autocache.layout import BLOCK_BYTES, FileShape, RowField, RowLayout
from autocache.store import RowStore

_LOGGER = logging.getLogger(__name__)

_LOCK, _ROWS, _ABOUT, _PREFIX = "lock", "rows", "about.json", "rows-"
_LOCK_TIMEOUT_S = 120.0
"""The lock is held while a file is reserved: seconds for a large one on a slow disk."""
_POLL_S = 0.01
_MOST_ROWS = 1 << 40
_SPARE = 1.1
"""Times the expected bytes that a set of unequal rows may take below a limit."""

MadeFrom = Mapping[str, Any]
"""All that decides what rows hold, as plain values of JSON. "stamp" is that of the layers."""


@dataclass(frozen=True)
class SetFacts:
    """Describe a set.

    Attributes:
        name: of its folder.
        about: what a person wants to know of it; decides nothing.
        num_rows, num_whole: rows that it has room for, and that are written.
        num_bytes: that its file takes.
        last_used: when a process began or ended to use it, in seconds since 1970.
        is_used: whether a process uses it now.
    """

    name: str
    about: Mapping[str, Any]
    num_rows: int
    num_whole: int
    num_bytes: int
    last_used: float
    is_used: bool


@final
class OpenSet:
    """Hold a set's store, and keep the set from being thrown out until it is closed.

    Args:
        descriptors: of its folder, whose lock says that it is in use, and of its file, whose lock
            says that a run writes it.
        is_used: whether this counts as a use of the set.
    Attributes:
        is_writable: whether this process' run writes the set.
    """

    def __init__(
        self, folder: Path, store: RowStore, descriptors: tuple[int, int], *, is_used: bool
    ) -> None:
        self.folder, self.store, self._is_used = folder, store, is_used
        self._file, self.is_writable = descriptors[1], False
        # Also where nobody closes it.
        self._let_go = weakref.finalize(self, _let_go, *descriptors)
        self._note_use()

    def lock(self, run: int) -> bool:
        """Have a run write the set, unless another does; `run` is a number of its own."""
        if not self.is_writable:
            if _lock(self._file, fcntl.LOCK_EX):
                self.store.writer = run
            # Shared, so that the run's other processes join, and keep it when this one dies. Only
            # who has it alone changes the number, so from here on it stays.
            self.is_writable = _lock(self._file, fcntl.LOCK_SH) and self.store.writer == run
            if not self.is_writable:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        return self.is_writable

    def close(self) -> None:
        if self._let_go.alive:
            self.store.close()
            self._note_use()
            self._let_go()

    def _note_use(self) -> None:
        if self._is_used:
            with suppress(OSError):  # It was condemned and removed, say.
                os.utime(self.folder / _ABOUT)


def _let_go(folder: int, file: int) -> None:
    # By hand: a forked process, such as a loader's worker, has these descriptors, too.
    for descriptor in (file, folder):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@final
class RowSets:
    """Find, make and remove sets of rows in a folder.

    Args:
        folder: made if it is missing.
        limit_bytes: most bytes of all its sets. The least recently used ones make room.
    """

    def __init__(self, folder: Path, *, limit_bytes: int | None = None) -> None:
        self.folder, self._limit_bytes = folder, limit_bytes

    def obtain(
        self, made_from: MadeFrom, layout: RowLayout, num_rows: int, about: Mapping[str, Any]
    ) -> OpenSet:
        """Return the set of these rows; make it where there is none.

        A new set has as many of `num_rows` as the limit leaves room for. One that is found keeps
        its number of rows, unless nobody uses it and there is room for twice as many by now.

        Raises:
            OSError: there is no room for a row, or the disk failed.
        """
        with self._locked():
            found = self._opened(made_from, layout)
            if found is not None and 2 * found.store.num_rows <= num_rows:
                found = self._unless_too_small(found, layout, num_rows)
            return found or self._made(made_from, layout, num_rows, about)

    def find(self, made_from: MadeFrom, layout: RowLayout) -> OpenSet | None:
        """Return the set of these rows, if there is one."""
        with self._locked():
            return self._opened(made_from, layout)

    def facts(self) -> list[SetFacts]:
        """Describe all sets, the last used first; damaged ones are left out, with a warning."""
        with self._locked():
            facts = [_facts_of(one) for one in self._set_folders()]
        found = [one for one in facts if one is not None]
        return sorted(found, key=lambda one: -one.last_used)

    def remove(self, name: str) -> bool:
        """Remove a set; False if a process uses it.

        Raises:
            FileNotFoundError: there is no such set.
        """
        folder = self.folder / name
        if folder not in self._set_folders():
            raise FileNotFoundError(f"{self.folder} holds no set of rows named {name!r}")
        with self._locked():
            return self._removed(folder)

    def discard(self, folder: Path) -> None:
        """Take a set out of the folder though processes use it: these keep what they mapped."""
        with self._locked():
            _delete(folder)

    def _opened(self, made_from: MadeFrom, layout: RowLayout) -> OpenSet | None:
        folder = self.folder / _name_of(made_from, layout)
        if not (folder / _ABOUT).exists():
            return None
        try:
            return _open(folder)
        except (FileNotFoundError, ValueError) as error:
            # Any other OSError, such as too many open files, says nothing of the set.
            _LOGGER.warning("cached rows in %s are not used, and removed: %s", folder, error)
            _delete(folder)
            return None

    def _unless_too_small(
        self, found: OpenSet, layout: RowLayout, num_rows: int
    ) -> OpenSet | None:
        """Remove a set that was made for a smaller limit; return it where it stays."""
        wanted = FileShape(layout, num_rows).rows_start + num_rows * _claimed(layout)
        others = sum(_size_of(folder) for folder in self._set_folders() if folder != found.folder)
        fits = self._limit_bytes is None or others + wanted <= self._limit_bytes
        free = shutil.disk_usage(self.folder).free
        if not fits or wanted > free:
            return found
        found.close()
        return None if self._removed(found.folder) else _open(found.folder)

    def _made(
        self, made_from: MadeFrom, layout: RowLayout, num_rows: int, about: Mapping[str, Any]
    ) -> OpenSet:
        folder = self.folder / _name_of(made_from, layout)
        for other in self._set_folders():
            if not (other / _ABOUT).exists():  # Its maker was killed.
                _delete(other)
        row_bytes, beside = _claimed(layout), FileShape(layout, num_rows).rows_start
        room = self._room(beside + num_rows * row_bytes) - beside
        num_rows = min(num_rows, room // row_bytes)
        if num_rows < 1:
            raise OSError(
                f"the limit of {self._limit_bytes} bytes leaves no room for a row of {row_bytes} "
                f"bytes in {self.folder}: raise cache_limit_bytes, or remove sets that are in use"
            )
        folder.mkdir(mode=0o700, exist_ok=True)  # A file that is not ours may have kept it.
        try:
            with open(folder / _ROWS, "xb+", opener=partial(os.open, mode=0o600)) as file:
                limit_bytes = None if self._limit_bytes is None else num_rows * row_bytes
                shape = FileShape(layout, num_rows, limit_bytes)
                shape.reserve(file.fileno(), folder / _ROWS)
            facts = {**_described(made_from, layout), "num_rows": num_rows, "about": about}
            facts["claimed_bytes"] = shape.rows_start + num_rows * row_bytes
            (folder / _ABOUT).write_text(json.dumps(facts, indent=1))
        except BaseException:
            _delete(folder)
            raise
        return _open(folder)

    def _room(self, wanted_bytes: int) -> int:
        if self._limit_bytes is None:
            return wanted_bytes
        sets = sorted(self._set_folders(), key=_last_used)
        sizes = {folder: _size_of(folder) for folder in sets}
        for folder in sets:
            if sum(sizes.values()) + wanted_bytes <= self._limit_bytes:
                break
            if self._removed(folder):
                del sizes[folder]
        return max(0, min(wanted_bytes, self._limit_bytes - sum(sizes.values())))

    def _removed(self, folder: Path) -> bool:
        """Remove a set unless it is in use."""
        if _is_used(folder):
            return False
        _delete(folder)
        return True

    def _set_folders(self) -> list[Path]:
        folders = self.folder.glob(f"{_PREFIX}*")
        return [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let no other process find, make or remove sets within the block."""
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.folder / _LOCK, flags, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_TIMEOUT_S
            while not _lock(descriptor, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {self.folder / _LOCK} for {_LOCK_TIMEOUT_S:g} "
                        "seconds; see which with `fuser`, and end it"
                    )
                time.sleep(_POLL_S)
            yield
        finally:
            # By hand: a process that was forked meanwhile has the descriptor, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _facts_of(folder: Path) -> SetFacts | None:
    """Describe a set; None, with a warning, where it is damaged."""
    is_used = _is_used(folder)
    try:
        description = _read_about(folder)
        num_rows, stamps = description.shape.num_rows, (int(description.made_from["stamp"], 16),)
        with closing(_open(folder, is_used=False)) as open_set:
            return SetFacts(
                name=folder.name,
                about=description.about,
                num_rows=num_rows,
                num_whole=int(open_set.store.find(torch.arange(num_rows), stamps).sum()),
                num_bytes=_taken_by(folder),
                last_used=_last_used(folder),
                is_used=is_used,
            )
    except (OSError, ValueError) as error:
        _LOGGER.warning("%s: %s", folder, error)
        return None


def _open(folder: Path, *, is_used: bool = True) -> OpenSet:
    """Open a set that its folder describes; an OSError or ValueError where it is damaged."""
    shape = _read_about(folder).shape
    with ExitStack() as undone:
        own = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        undone.callback(os.close, own)
        if not _lock(own, fcntl.LOCK_SH):
            raise ValueError(f"{folder} is being removed")
        file = os.open(folder / _ROWS, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        undone.callback(os.close, file)
        mapping = shape.open(file, folder / _ROWS)
        store = RowStore(folder / _ROWS, shape, mapping=mapping, descriptor=file)
        if store.is_condemned():
            raise ValueError("they were found to be wrong")
        found = OpenSet(folder, store, (own, file), is_used=is_used)
        undone.pop_all()
    return found


def _described(made_from: MadeFrom, layout: RowLayout) -> dict[str, Any]:
    """Return what a set's name is the hash of, as plain values."""
    fields = [field.to_json() for field in layout.fields]
    plain: dict[str, Any] = json.loads(json.dumps({"made_from": made_from, "fields": fields}))
    return plain


def _name_of(made_from: MadeFrom, layout: RowLayout) -> str:
    return _PREFIX + _hash(_described(made_from, layout))


def _hash(described: Mapping[str, Any]) -> str:
    text = json.dumps(described, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class _Description:
    """Hold what a set's folder says of it."""

    made_from: MadeFrom
    about: Mapping[str, Any]
    shape: FileShape


def _read_about(folder: Path) -> _Description:
    """Read a set's description.

    An OSError or ValueError where it cannot be read, or does not match the folder's name.
    """
    try:
        facts = json.loads((folder / _ABOUT).read_text())
        described = {"made_from": facts["made_from"], "fields": facts["fields"]}
        if folder.name != _PREFIX + _hash(described):
            raise ValueError("it is of another set")
        fields = tuple(map(RowField.from_json, facts["fields"]))
        # Both were checked by no hash: the rows' file is, by its size and its header.
        num_rows, about = facts["num_rows"], dict(facts["about"])
        if type(num_rows) is not int or not 0 < num_rows < _MOST_ROWS:
            raise ValueError(f"it has {num_rows} rows")
    except (TypeError, LookupError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder / _ABOUT} is damaged: {error!r}") from error
    return _Description(facts["made_from"], about, FileShape(RowLayout(fields), num_rows))


def _lock(descriptor: int, kind: int) -> bool:
    """Lock an open file or folder at once, if nobody else has it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_used(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return not _lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _last_used(folder: Path) -> float:
    try:
        return (folder / _ABOUT).stat().st_mtime
    except FileNotFoundError:  # Its maker was killed.
        return 0.0


def _claimed(layout: RowLayout) -> int:
    """Return the bytes that a limit counts for each row of a set, whether it is written or not."""
    if not layout.varies:
        return layout.row_bytes
    return min(layout.row_bytes, math.ceil(_SPARE * layout.expected_bytes))


def _size_of(folder: Path) -> int:
    """Return what a set takes, or may take yet by what its maker has claimed for it."""
    try:
        claimed = json.loads((folder / _ABOUT).read_text())["claimed_bytes"]
    except (OSError, TypeError, LookupError, ValueError, RecursionError):
        claimed = 0  # Of an earlier version, or damaged.
    taken = _taken_by(folder)
    return max(taken, claimed) if type(claimed) is int else taken


def _taken_by(folder: Path) -> int:
    """Return the bytes that a set's file takes on its disk: of unequal rows not its whole size."""
    try:
        found = (folder / _ROWS).stat()
    except FileNotFoundError:
        return 0
    return min(found.st_size, found.st_blocks * BLOCK_BYTES)


def _delete(folder: Path) -> None:
    """Delete a set: first its description, so that a kill in between leaves no set."""
    if folder.is_symlink():
        folder.unlink()
        return
    for name in (_ABOUT, _ROWS):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # It holds a file that is not ours.
        folder.rmdir()
