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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from pipetransformer.journal import encode_json, fsync_folder

FORMAT_VERSION = 1

_POINTER = "latest"
_MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_PIECE_BYTES = 1 << 20
_LOG = logging.getLogger(__name__)


class CorruptCheckpointError(RuntimeError):
    """Report a checkpoint's file that is missing, truncated or changed; the message names it."""


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

    def verify(self) -> None:
        """Compare every file's hash with the manifest, a piece at a time to bound the memory.

        Raises:
            CorruptCheckpointError: a file is missing, or is not the one that was written.
        """
        for record in self.records.values():
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


def write_shards(
    folder: Path, shards: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, ShardRecord]:
    """Write the shards that this rank owns, and wait until they are on disk.

    Args:
        shards: shard name ("blocks.3.attention/weights") -> tensor name -> tensor of any device
            and strides; tensors that share memory are each written in full.
    Raises:
        FileNotFoundError: the folder is not visible to this rank.
        FileExistsError: another rank has written a shard of that name; a shard has one owner.
        ValueError: a meta tensor, whose values this rank does not hold.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"checkpoint folder {folder} does not exist for this rank; let rank 0 call "
            "checkpoint_folder first, in a directory that all nodes share"
        )
    records = {}
    for name, tensors in shards.items():
        copies = {key: _own_copy(f"{name}: {key}", tensor) for key, tensor in tensors.items()}
        data = safetensors.torch.save(copies)
        record = ShardRecord(_file_name(name), hashlib.sha256(data).hexdigest(), len(data))
        _write_durably(folder / record.file, data, "xb")
        records[name] = record
    return records


def publish(
    directory: Path,
    step: int,
    records: Mapping[str, ShardRecord],
    scalars: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Make this step's save the one that a resume finds, then delete what is too old.

    Rank 0 calls it once all ranks have written. Deleted are unfinished saves, and all checkpoints
    up to this step but the `keep` newest complete ones. Those of later steps (training went back
    before them) stay on disk, but no resume falls back to them.

    Args:
        records: what `write_shards` returned, of all ranks together.
        scalars: plain values by name; see `journal.encode_json`.
        keep: number of checkpoints to keep, at least 1: this one.
    Raises:
        ValueError: keep < 1, or `checkpoint_folder` was not called for this step.
        TypeError: a scalar that JSON cannot hold.
        CorruptCheckpointError: a shard is missing, or has another size than was written.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; pass 1 or more, as this checkpoint itself is kept")
    folder = next(iter(_folders(directory, step)), None)
    if folder is None or (folder / _MANIFEST).exists():
        raise ValueError(
            f"no save of step {step} is under way in {directory}; "
            "call checkpoint_folder, write_shards and publish with the same step"
        )
    _compare_sizes(folder, records)
    earlier = [f for f in _published(directory) if _order(f)[0] < step and _is_complete(f)]
    kept = [folder, *earlier[: keep - 1]]
    shards = {name: asdict(record) for name, record in records.items()}
    _write_sealed(folder / _MANIFEST, {"step": step, "scalars": dict(scalars), "shards": shards})
    # After a power cut, the pointer must not name a folder whose own name was lost.
    fsync_folder(directory)
    _write_sealed(directory / _POINTER, {"checkpoints": [f.name for f in kept]})
    for other in _folders(directory):
        if other not in kept and (_order(other)[0] <= step or not (other / _MANIFEST).exists()):
            _delete(other)
    return folder


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a complete checkpoint; the content of a shard is verified when it is read.

    Raises:
        CorruptCheckpointError: the manifest is missing or changed, or a shard is missing or has
            another size.
        ValueError: the manifest has a format that this version does not read.
    """
    content = _read_sealed(folder / _MANIFEST)
    records = {name: ShardRecord(**record) for name, record in content["shards"].items()}
    _compare_sizes(folder, records)
    return Checkpoint(folder, content["step"], content["scalars"], records)


def open_latest(directory: Path, *, verify: bool = True) -> Checkpoint | None:
    """Find the newest usable checkpoint; warn about each newer one that is not.

    Args:
        verify: compare every file's hash, not only its size. For rank 0, which then announces
            the folder; the other ranks call `open_checkpoint` on it.
    Returns:
        None if no save was ever completed in this directory.
    Raises:
        CorruptCheckpointError: there are checkpoints, and none is usable.
    """
    folders = _published(directory)
    for folder in folders:
        try:
            checkpoint = open_checkpoint(folder)
            if verify:
                checkpoint.verify()
            return checkpoint
        except CorruptCheckpointError as error:
            _LOG.warning("checkpoint %s cannot be used, trying an older: %s", folder.name, error)
    if folders:
        raise CorruptCheckpointError(
            f"no checkpoint in {directory} is usable ({', '.join(f.name for f in folders)}); the "
            "warnings name the files; restore one, or start anew in another directory"
        )
    return None


def _published(directory: Path) -> list[Path]:
    """List the folders to resume from, best first: as the pointer says or, without it, by step."""
    pointer = directory / _POINTER
    try:
        return [directory / name for name in _read_sealed(pointer)["checkpoints"]]
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
        _LOG.warning("old checkpoint %s stays on disk, delete it by hand: %s", folder, error)


def _own_copy(what: str, tensor: Tensor) -> Tensor:
    """Copy a tensor into contiguous CPU memory of its own, as safetensors requires."""
    if tensor.is_meta:
        raise ValueError(
            f"{what} is a meta tensor, so this rank does not hold its values; "
            "let the owner of the sublayer write its shards"
        )
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _file_name(shard: str) -> str:
    # The readable part alone may be equal for two names, or on a file system that ignores case.
    readable = re.sub(r"[^A-Za-z0-9._]", "_", shard)[:100]
    return f"{readable}-{hashlib.sha256(shard.encode()).hexdigest()[:16]}.safetensors"


def _write_durably(path: Path, data: bytes, mode: str) -> None:
    with open(path, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file with its own SHA-256; it appears under its name in one piece."""
    text = encode_json({"format": FORMAT_VERSION, **content}, path.name)
    seal = hashlib.sha256(text.encode()).hexdigest()
    temporary = path.with_name(path.name + ".tmp")
    _write_durably(temporary, f'{{"sha256": "{seal}", "content": {text}}}'.encode(), "wb")
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
