"""Save and read checkpoints that survive a kill, a flipped bit and another number of ranks.

    directory/
      latest                                       names the checkpoints, newest first
      step-00001200/
        manifest.json                              step, scalars; file, size, SHA-256 of each shard
        blocks.3.attention_weights-<id>.safetensors
        blocks.3.attention_optimizer-<id>.safetensors
    frozen/<sha256>.safetensors                    beside the directory; see `frozen_store`

A folder is written once, never changed, and holds no pickle. Both JSON files carry their own
SHA-256. A shard belongs to one sublayer, so that on any topology a rank reads only its own. The
manifest also names files of `frozen`, which hold what no step changes of a shard, in groups.

A kill before the manifest is written leaves the previous checkpoint in force. A kill before
`latest` is replaced costs nothing: the manifest names the checkpoint that it follows. Files of
other programs are never deleted, whatever their names.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipetransformer.checkpoint.tensor_file import describe, fill
from pipetransformer.durable_files import (
    fsync,
    read_sealed_json,
    replace_file,
    sealed_json,
    write_tensors,
)
from pipetransformer.errors import CorruptCheckpointError

Shards = Mapping[str, Mapping[str, Tensor]]
"""Tensors by shard, then by name within it."""

FORMAT_VERSION = 7
_READABLE = (6, FORMAT_VERSION)
"""Format 6 has all of a shard in the checkpoint's folder."""

FROZEN = "frozen"
_POINTER = "latest"
_MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_OWN_MANIFEST = re.compile(rb'\{"sha256": "[0-9a-f]{64}", "content": \{"format": \d')
SHARD_NAME, FROZEN_NAME = r"[A-Za-z0-9._]*-[0-9a-f]{16}\.safetensors", r"[0-9a-f]{64}\.safetensors"
"""Patterns of the names that `file_name` gives, and of files that are named by their SHA-256."""
_OWN_FILE = re.compile(rf"manifest\.json(\.tmp)?|{SHARD_NAME}")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardRecord:
    """Describe a written file, in the checkpoint's folder or in the folder of frozen ones."""

    file: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """Read a complete checkpoint, shard by shard; `open_checkpoint` makes it.

    Attributes:
        records: by shard, of the file in the folder.
        frozen: by "shard/group", of the file among the frozen ones.
    """

    folder: Path
    step: int
    scalars: dict[str, Any]
    records: dict[str, ShardRecord]
    frozen: dict[str, ShardRecord]

    @property
    def shards(self) -> set[str]:
        """Return the names of all shards."""
        return {*self.records, *map(_shard_of, self.frozen)}

    def describe(self, name: str) -> dict[str, Tensor]:
        """Return meta tensors of a shard's names, shapes and dtypes.

        Raises:
            CorruptCheckpointError: a file is missing or changed.
        """
        tensors: dict[str, Tensor] = {}
        for path, _ in self._files_of(name):
            with _reading(path):
                tensors |= describe(path)
        return tensors

    def load(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a shard's values into tensors that are as `describe` says, on any device.

        Raises:
            CorruptCheckpointError: a file is missing or changed; some values are written then.
        """
        for path, record in self._files_of(name):
            with _reading(path):
                # What is hashed is what was used, so a disk that fails later does no harm.
                _expect(path, "SHA-256", fill(path, tensors), record.sha256)

    def read(self, name: str) -> dict[str, Tensor]:
        """Read one shard into new tensors on CPU; errors are those of `load`."""
        tensors = {
            key: torch.empty_like(one, device="cpu") for key, one in self.describe(name).items()
        }
        self.load(name, tensors)
        return tensors

    def _files_of(self, name: str) -> list[tuple[Path, ShardRecord]]:
        records = [self.records[name]] if name in self.records else []
        groups = [record for group, record in self.frozen.items() if _shard_of(group) == name]
        if not records and not groups:
            raise KeyError(name)
        return self._located(records, groups)

    def verify(self, *, part: int = 0, num_parts: int = 1) -> None:
        """Read all files, or a rank's share of them; errors are those of `read`."""
        # By size, so that the ranks' shares are about equal.
        by_size = sorted(self._all_located(), key=lambda one: (-one[1].num_bytes, one[1].file))
        for path, record in by_size[part::num_parts]:
            with _reading(path):
                _expect(path, "SHA-256", _hash_file(path), record.sha256)

    def compare_sizes(self) -> None:
        """Raise a CorruptCheckpointError if a file is missing, or of another size."""
        for path, record in self._all_located():
            with _reading(path):
                _expect(path, "size in bytes", path.stat().st_size, record.num_bytes)

    def _all_located(self) -> list[tuple[Path, ShardRecord]]:
        return self._located(self.records.values(), self.frozen.values())

    def _located(
        self, records: Iterable[ShardRecord], frozen: Iterable[ShardRecord]
    ) -> list[tuple[Path, ShardRecord]]:
        store = self.folder.parent.parent / FROZEN
        return [
            *((self.folder / record.file, record) for record in records),
            *((store / record.file, record) for record in frozen),
        ]


def checkpoint_folder(directory: Path, step: int) -> Path:
    """Create the folder of a new save, on rank 0.

    After an earlier attempt at that step the name gets a suffix `-2`, `-3`, ... The earlier folder
    stays: it may be the only good checkpoint until this save is published.
    """
    directory.mkdir(parents=True, exist_ok=True)
    attempts = [attempt for at, attempt in map(_order, _folders(directory)) if at == step]
    suffix = f"-{max(attempts) + 1}" if attempts else ""
    folder = directory / f"step-{step:08d}{suffix}"
    folder.mkdir()
    return folder


def write_shards(folder: Path, shards: Shards) -> dict[str, ShardRecord]:
    """Write the shards that this rank owns, and wait until they are on disk."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"checkpoint folder {folder} does not exist for this rank; let rank 0 call "
            "checkpoint_folder first, in a directory that all nodes share"
        )
    records = {}
    for name, tensors in shards.items():
        path = folder / file_name(name)
        write_tensors(path, tensors)
        records[name] = record_of(path)
    return records


def record_of(path: Path) -> ShardRecord:
    """Describe a file that was just written."""
    return ShardRecord(path.name, _hash_file(path), path.stat().st_size)


def discard(folder: Path) -> None:
    """Remove the folder of a save that failed, unless a resume may find it already."""
    with suppress(CorruptCheckpointError):
        if folder in published(folder.parent):
            return
    if folder.exists():
        _delete(folder)


def publish(
    folder: Path,
    records: Mapping[str, ShardRecord],
    scalars: Mapping[str, Any],
    *,
    keep: int,
    frozen: Mapping[str, ShardRecord] | None = None,
) -> None:
    """Let a resume find this save from now on, then delete old ones. For rank 0.

    It comes once all ranks have written. It deletes unfinished saves, and checkpoints up to this
    step except the `keep` newest complete ones. Checkpoints of later steps, before which training
    went back, stay on disk, but no resume uses them.

    Raises:
        OSError, CorruptCheckpointError: the disk is full, or a shard is not what was written.
    """
    directory, step = folder.parent, _order(folder)[0]
    saved = Checkpoint(folder, step, dict(scalars), dict(records), dict(frozen or {}))
    saved.compare_sizes()
    earlier = [f for f in published(directory) if _order(f)[0] < step and _is_complete(f)]
    staying = [folder, *earlier[: keep - 1]]
    manifest = {
        "step": step,
        "scalars": saved.scalars,
        "shards": {name: asdict(record) for name, record in saved.records.items()},
        "frozen": {name: asdict(record) for name, record in saved.frozen.items()},
        "after": earlier[0].name if earlier else None,
    }
    _write_sealed(folder / _MANIFEST, manifest)
    # After a power cut, the pointer must not name a folder whose own name was lost.
    fsync(directory)
    _write_sealed(directory / _POINTER, {"checkpoints": [f.name for f in staying]})
    # Only now: a kill before the pointer still needs the old ones.
    for other in _folders(directory):
        is_old = _order(other)[0] <= step or not has_manifest(other)
        if is_old and other not in staying and _is_own(other):
            _delete(other)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a complete checkpoint; the content of a shard is verified when it is read.

    Raises:
        CorruptCheckpointError: a file is missing, the manifest changed, or a shard's size did.
        ValueError: the manifest has another format, or names a file outside of its folder.
    """
    checkpoint = _read_manifest(folder)
    checkpoint.compare_sizes()
    return checkpoint


def _read_manifest(folder: Path) -> Checkpoint:
    content = _read_sealed(folder / _MANIFEST)
    records = {name: ShardRecord(**record) for name, record in content["shards"].items()}
    for record in records.values():
        # Any file could be read as a shard by a path that leads out of the folder.
        if Path(record.file).name != record.file or record.file in ("", ".."):
            raise _foreign(folder / _MANIFEST, record.file, "file")
    frozen = {name: ShardRecord(**record) for name, record in content.get("frozen", {}).items()}
    for record in frozen.values():
        if not re.fullmatch(FROZEN_NAME, record.file):
            raise _foreign(folder / _MANIFEST, record.file, "frozen file")
    return Checkpoint(folder, content["step"], content["scalars"], records, frozen)


def named_frozen(directory: Path) -> set[str] | None:
    """Return the frozen files that any checkpoint names; None if a manifest is damaged.

    Raises:
        OSError: a manifest cannot be read.
    """
    named: set[str] = set()
    for folder in _folders(directory):
        if not has_manifest(folder):
            continue
        try:
            named |= {record.file for record in _read_manifest(folder).frozen.values()}
        except (CorruptCheckpointError, ValueError):
            if _OWN_MANIFEST.match((folder / _MANIFEST).read_bytes()):
                return None
    return named


def holds_checkpoint(directory: Path) -> bool:
    """Return whether a save was ever completed here, damaged or not."""
    return (directory / _POINTER).exists() or any(map(has_manifest, _folders(directory)))


def has_manifest(folder: Path) -> bool:
    """Return whether a folder is a save that was completed, damaged or not."""
    return (folder / _MANIFEST).exists()


def published(directory: Path) -> list[Path]:
    """List the folders to resume from, best first: in the pointer's order or, without it, by step.

    Newer saves come first that a kill kept out of the pointer.

    Raises:
        CorruptCheckpointError: the pointer is damaged, and there is no complete save.
        ValueError: the pointer names a folder elsewhere.
    """
    pointer = directory / _POINTER
    try:
        names = _read_sealed(pointer)["checkpoints"]
    except CorruptCheckpointError as error:
        complete = [*filter(has_manifest, _folders(directory))]
        if complete:
            _LOG.warning("%s; the highest step is taken as the newest checkpoint", error)
        elif pointer.exists():
            raise
        return complete
    if foreign := [name for name in names if not _FOLDER.fullmatch(name)]:
        raise _foreign(pointer, foreign[0], "checkpoint")
    folders = [directory / name for name in names]
    return [*_unpublished(folders[0]), *folders] if folders else []


def _unpublished(newest: Path) -> list[Path]:
    """List the complete saves that follow the newest one of the pointer, best first.

    Other folders of later steps belong to a run that went back before them.
    """
    following: list[Path] = []
    for folder in reversed(_folders(newest.parent)):
        if _order(folder) > _order(newest):
            with suppress(CorruptCheckpointError, ValueError):
                after = _read_sealed(folder / _MANIFEST).get("after")
                if after in {folder.name for folder in (newest, *following)}:
                    following.insert(0, folder)
    return following


def clear(directory: Path) -> None:
    """Delete all checkpoints of a directory, and no file of another program."""
    for folder in _folders(directory):
        if _is_own(folder):
            _delete(folder)
    (directory / _POINTER).unlink(missing_ok=True)


def _folders(directory: Path) -> list[Path]:
    """List the folders, complete or not, the newest step and attempt first."""
    folders = [folder for folder in directory.glob("step-*") if _FOLDER.fullmatch(folder.name)]
    return sorted(folders, key=_order, reverse=True)


def _order(folder: Path) -> tuple[int, int]:
    """Return (step, attempt) from a folder's name."""
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1]), int(match[2] or 1)


def _is_complete(folder: Path) -> bool:
    try:
        return bool(open_checkpoint(folder))
    except CorruptCheckpointError:
        return False


def _is_own(folder: Path) -> bool:
    """Return whether a folder is a save: complete, unfinished, or killed before its first file.

    Another program's folder may have such a name, so in doubt it is not ours.
    """
    manifest = folder / _MANIFEST
    if folder.is_symlink():
        return False
    try:
        if not manifest.exists():
            return all(map(_is_own_file, folder.iterdir()))
        return _OWN_MANIFEST.match(manifest.read_bytes()) is not None
    except OSError:
        return False


def _is_own_file(path: Path) -> bool:
    is_file = path.is_file() and not path.is_symlink()
    return is_file and _OWN_FILE.fullmatch(path.name) is not None


def _delete(folder: Path) -> None:
    try:
        # The manifest first: a kill then leaves an unfinished save, not a damaged checkpoint.
        for path in sorted(folder.iterdir(), key=lambda path: path.name != _MANIFEST):
            if _is_own_file(path):
                path.unlink()
        folder.rmdir()
    except OSError as error:
        # The new checkpoint is safe already; a file in use must not end the training.
        text = "%s is of no more use, but it, or what others put in it, stays on disk: %s"
        _LOG.warning(text, folder, error)


def file_name(shard: str) -> str:
    """Return a file's name that no other shard or group has."""
    # The readable part alone may be equal for two names, or on a file system that ignores case.
    readable = re.sub(r"[^A-Za-z0-9._]", "_", shard)[:100]
    return f"{readable}-{hashlib.sha256(shard.encode()).hexdigest()[:16]}.safetensors"


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:  # A piece at a time, to bound the memory.
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _write_sealed(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, sealed_json({"format": FORMAT_VERSION, **content}))


def _read_sealed(path: Path) -> dict[str, Any]:
    try:
        with _reading(path):
            content: dict[str, Any] = read_sealed_json(path)
    except ValueError as error:
        raise CorruptCheckpointError(str(error)) from error
    if content["format"] not in _READABLE:
        raise ValueError(
            f"{path} has format {content['format']}, and only {' and '.join(map(str, _READABLE))} "
            "can be read here; use the version of pipetransformer that wrote it"
        )
    return content


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error}") from error


def _shard_of(group: str) -> str:
    return group.rpartition("/")[0]


def _expect(path: Path, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise CorruptCheckpointError(f"{path} has {what} {found}; expected {expected}")


def _foreign(path: Path, name: str, kind: str) -> ValueError:
    return ValueError(
        f"{path} names {name!r}, which is no {kind} of its folder; it was not written by this "
        "program: do not use it"
    )
