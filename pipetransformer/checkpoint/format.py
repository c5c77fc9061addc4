"""Save and read checkpoints that survive a kill, a flipped bit and another number of ranks.

    directory/
      latest                                       names the checkpoints, newest first
      step-00001200/
        manifest.json                              step, scalars; file, size, SHA-256 of each shard
        blocks.3.attention_weights-<id>.safetensors
        blocks.3.attention_optimizer-<id>.safetensors

    rank 0       folder ..................................... manifest, latest, delete the oldest
    every rank   ...... its own sublayers' weights, optimizer            ^ from here on it counts

A folder is written once, never changed, and holds no pickle. A kill before `latest` is replaced
leaves the previous checkpoint in force. Both JSON files carry their own SHA-256. A shard belongs
to one sublayer, so that on any topology a rank reads just what it owns.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from pipetransformer.checkpoint.snapshot import HostShard
from pipetransformer.durable import encode_json, fsync_folder
from pipetransformer.errors import CorruptCheckpointError

FORMAT_VERSION = 2

_POINTER = "latest"
_MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_PIECE_BYTES = 1 << 20
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardRecord:
    """Describe a written shard: its file name within the folder, and that file's hash and size."""

    file: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """Read a complete checkpoint, shard by shard; `open_checkpoint` makes it."""

    folder: Path
    step: int
    scalars: dict[str, Any]
    records: dict[str, ShardRecord]

    @property
    def shard_names(self) -> tuple[str, ...]:
        """List the names under which the shards were written."""
        return tuple(self.records)

    def read(self, name: str) -> dict[str, Tensor]:
        """Read one shard to CPU; the bytes that are decoded are the bytes that were verified.

        Raises:
            ValueError: the checkpoint has no such shard.
            CorruptCheckpointError: the file is missing, or is not the one that was written.
        """
        if name not in self.records:
            raise ValueError(
                f"checkpoint {self.folder} has no shard {name!r}; it has "
                f"{', '.join(self.records) or 'none'}; resume with the model that was saved"
            )
        path = self.folder / self.records[name].file
        with _reading(path):
            data = path.read_bytes()
        _expect(path, "SHA-256", hashlib.sha256(data).hexdigest(), self.records[name].sha256)
        return safetensors.torch.load(data)

    def verify(self, *, part: int = 0, num_parts: int = 1) -> None:
        """Compare files' hashes with the manifest, a piece at a time to bound the memory.

        Args:
            part, num_parts: which share of the files, for ranks that share the work; all of them
                by default.
        Raises:
            CorruptCheckpointError: a file is missing, or is not the one that was written.
        """
        by_size = sorted(self.records.values(), key=lambda one: (-one.num_bytes, one.file))
        for record in by_size[part::num_parts]:
            path = self.folder / record.file
            digest = hashlib.sha256()
            with _reading(path), open(path, "rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
            _expect(path, "SHA-256", digest.hexdigest(), record.sha256)


def checkpoint_folder(directory: Path, step: int) -> Path:
    """Create the folder of a new save; rank 0 calls it and tells the other ranks.

    Returns:
        `step-00001234`; with a suffix `-2`, `-3`, ... after an earlier attempt at that step, which
        stays as it is: it may be the only good checkpoint until this save is published.
    """
    directory.mkdir(parents=True, exist_ok=True)
    earlier = _folders(directory, step)
    suffix = f"-{_order(earlier[0])[1] + 1}" if earlier else ""
    folder = directory / f"step-{step:08d}{suffix}"
    folder.mkdir()
    return folder


def write_shards(folder: Path, shards: Iterable[HostShard]) -> dict[str, ShardRecord]:
    """Write the shards that this rank owns, and wait until they are on disk.

    Args:
        shards: what `Snapshot.take` returned.
    Raises:
        FileNotFoundError: the folder is not visible to this rank.
        FileExistsError: another rank has written a shard of that name; a shard has one owner.
        OSError: the disk is full or gone.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"checkpoint folder {folder} does not exist for this rank; let rank 0 call "
            "checkpoint_folder first, in a directory that all nodes share"
        )
    records = {}
    for shard in shards:
        digest = hashlib.sha256(shard.header)
        file_name = _file_name(shard.name)
        with open(folder / file_name, "xb") as file:
            file.write(shard.header)
            for start in range(0, len(shard.data), _PIECE_BYTES):
                piece = shard.data[start : start + _PIECE_BYTES]
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        num_bytes = len(shard.header) + len(shard.data)
        records[shard.name] = ShardRecord(file_name, digest.hexdigest(), num_bytes)
    return records


def discard(directory: Path, folder: Path) -> None:
    """Remove the folder of a save that failed, unless the pointer names it already."""
    try:
        named = _read_sealed(directory / _POINTER)["checkpoints"]
    except CorruptCheckpointError:
        named = []
    if folder.name not in named and folder.exists():
        _delete(folder)


def publish(
    folder: Path, records: Mapping[str, ShardRecord], scalars: Mapping[str, Any], *, keep: int
) -> None:
    """Make a save the one that a resume finds, then delete what is too old.

    Rank 0 calls it once all ranks have written. Deleted are unfinished saves, and all checkpoints
    up to this step but the `keep` newest complete ones. Those of later steps (training went back
    before them) stay on disk, but no resume falls back to them.

    Args:
        folder: the one that `checkpoint_folder` created.
        records: what `write_shards` returned, of all ranks together.
        scalars: plain values by name; see `journal.encode_json`.
        keep: number of checkpoints to keep, at least 1: this one.
    Raises:
        ValueError: keep < 1, or the folder has been published before.
        TypeError: a scalar that JSON cannot hold.
        CorruptCheckpointError: a shard is missing, or has another size than was written.
        OSError: the disk is full or gone.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; pass 1 or more, as this checkpoint itself is kept")
    if (folder / _MANIFEST).exists():
        raise ValueError(f"{folder} is a checkpoint already; call checkpoint_folder for another")
    _compare_sizes(folder, records)
    directory, step = folder.parent, _order(folder)[0]
    earlier = [f for f in published(directory) if _order(f)[0] < step and _is_complete(f)]
    kept = [folder, *earlier[: keep - 1]]
    shards = {name: asdict(record) for name, record in records.items()}
    _write_sealed(folder / _MANIFEST, {"step": step, "scalars": dict(scalars), "shards": shards})
    # After a power cut, the pointer must not name a folder whose own name was lost.
    fsync_folder(directory)
    _write_sealed(directory / _POINTER, {"checkpoints": [f.name for f in kept]})
    for other in _folders(directory):
        if other not in kept and (_order(other)[0] <= step or not (other / _MANIFEST).exists()):
            _delete(other)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a complete checkpoint; the content of a shard is verified when it is read.

    Raises:
        CorruptCheckpointError: the manifest is missing or changed, or a shard is missing or has
            another size.
        ValueError: the manifest has a format that this version does not read, or names a file
            outside of its folder.
    """
    content = _read_sealed(folder / _MANIFEST)
    records = {name: ShardRecord(**record) for name, record in content["shards"].items()}
    for record in records.values():
        if Path(record.file).name != record.file or record.file in ("", ".."):
            raise ValueError(
                f"{folder / _MANIFEST} names {record.file!r}, which is no file of its folder; it "
                "was not written by this program: do not use it"
            )
    _compare_sizes(folder, records)
    return Checkpoint(folder, content["step"], content["scalars"], records)


def holds_checkpoint(directory: Path) -> bool:
    """Tell whether a save was ever completed here; it may be damaged by now."""
    return (directory / _POINTER).exists() or any(
        (folder / _MANIFEST).exists() for folder in _folders(directory)
    )


def published(directory: Path) -> list[Path]:
    """List the folders to resume from, best first: as the pointer says or, without it, by step.

    Raises:
        CorruptCheckpointError: the pointer is damaged, and there is no complete save.
        ValueError: the pointer names a folder elsewhere.
    """
    pointer = directory / _POINTER
    try:
        names = _read_sealed(pointer)["checkpoints"]
        if foreign := [name for name in names if not _FOLDER.fullmatch(name)]:
            raise ValueError(
                f"{pointer} names {foreign[0]!r}, which is no checkpoint of its folder; it was "
                "not written by this program: do not use it"
            )
        return [directory / name for name in names]
    except CorruptCheckpointError as error:
        complete = [folder for folder in _folders(directory) if (folder / _MANIFEST).exists()]
        if complete:
            _LOG.warning("%s; the highest step is taken as the newest checkpoint", error)
        elif pointer.exists():
            raise
        return complete


def _folders(directory: Path, step: int | None = None) -> list[Path]:
    """List the folders, complete or not, the newest step and attempt first; or only a step's."""
    names = os.listdir(directory) if directory.is_dir() else []
    folders = [directory / name for name in names if _FOLDER.fullmatch(name)]
    chosen = [folder for folder in folders if step is None or _order(folder)[0] == step]
    return sorted(chosen, key=_order, reverse=True)


def _order(folder: Path) -> tuple[int, int]:
    """Read the step and the attempt from a folder's name."""
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1]), int(match[2] or 1)


def _is_complete(folder: Path) -> bool:
    try:
        return bool(open_checkpoint(folder))
    except CorruptCheckpointError:
        return False


def _delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        # The new checkpoint is safe already; a file in use must not end the training.
        _LOG.warning("%s is of no more use, but stays on disk; delete it: %s", folder, error)


def _file_name(shard: str) -> str:
    # The readable part alone may be equal for two names, or on a file system that ignores case.
    readable = re.sub(r"[^A-Za-z0-9._]", "_", shard)[:100]
    return f"{readable}-{hashlib.sha256(shard.encode()).hexdigest()[:16]}.safetensors"


def _write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file with its own SHA-256; it appears under its name in one piece."""
    text = encode_json({"format": FORMAT_VERSION, **content}, path.name)
    seal = hashlib.sha256(text.encode()).hexdigest()
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(f'{{"sha256": "{seal}", "content": {text}}}'.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)


def _read_sealed(path: Path) -> dict[str, Any]:
    with _reading(path):
        data = path.read_bytes()
    try:
        sealed = json.loads(data)
        content, seal = sealed["content"], sealed["sha256"]
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptCheckpointError(f"{path} is not what was written: {error!r}") from error
    # What json.loads reads, json.dumps turns back into the very text that was hashed.
    _expect(path, "SHA-256", hashlib.sha256(json.dumps(content).encode()).hexdigest(), seal)
    if content["format"] != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format {content['format']}, and only {FORMAT_VERSION} can be read here; "
            "use the version of pipetransformer that wrote it"
        )
    return content


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error}") from error


def _compare_sizes(folder: Path, records: Mapping[str, ShardRecord]) -> None:
    for record in records.values():
        path = folder / record.file
        with _reading(path):
            found = path.stat().st_size
        _expect(path, "size in bytes", found, record.num_bytes)


def _expect(path: Path, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise CorruptCheckpointError(f"{path} has {what} {found}; expected {expected}")
