"""Find out whether and where a run continues, and agree on it among all ranks.

    resume    the folder holds     the run
    False     nothing              starts
    False     a run                is refused; a restarted process continues it if its own
                                   launcher began it
    "replace" a run                starts, and that run is removed; restarted as above
    True      no checkpoint        is refused
    "auto"    no checkpoint        starts from the beginning, with the decisions of the journal
                                   if run.json says that it is this run's
    either    checkpoints          continues from the newest usable one

An error of one rank is raised on all. A lock keeps a second run out of the folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autodp import Shard, gather_json
from freeze import JOURNAL_FILE
from freeze.signals import is_signal_tensor
from pipetransformer.checkpoint.best_model import BEST_FOLDER
from pipetransformer.checkpoint.format import (
    FROZEN,
    Checkpoint,
    clear,
    holds_checkpoint,
    open_checkpoint,
    published,
)
from pipetransformer.checkpoint.frozen_store import FrozenStore
from pipetransformer.config import TrainConfig
from pipetransformer.durable_files import (
    open_unlinked,
    read_sealed_json,
    replace_file,
    sealed_json,
)
from pipetransformer.elastic import OPTIMIZER, WEIGHTS, shard_name, split_shard_name
from pipetransformer.errors import CorruptCheckpointError
from pipetransformer.model import LayeredModel, Task, trained_parameters
from pipetransformer.processes import (
    World,
    agree,
    is_restarted,
    launcher_name,
    on_rank_0,
    told_by_rank_0,
)

CHECKPOINTS = "checkpoints"
OPAQUE = "quantized weights"
"""A hash of those in a run's identity: they are in no checkpoint."""

_LAUNCHERS, _RUN = "launchers.json", "run.json"
_SUBLAYERS = "sublayers"
_LOG = logging.getLogger(__name__)


def resumes(config: TrainConfig, *, has_lock: bool = False) -> bool:
    """Return whether a run continues from its folder, before anything is started.

    Args:
        has_lock: whether this run has locked the folder.
    Raises:
        ValueError: the folder holds another run and resume is False, or it holds no checkpoint
            and resume is True; or a link stands where a run keeps its weights.
    """
    if config.folder is None:
        return False
    folder = Path(config.folder)
    for name in (CHECKPOINTS, FROZEN):
        _refuse_link(folder / name)
    if config.load_best_model_at_end:
        _refuse_link(folder / BEST_FOLDER)
    if config.resume is True and not holds_checkpoint(folder / CHECKPOINTS):
        raise ValueError(
            f"resume=True, but folder {str(folder)!r} holds no checkpoint to continue from; "
            "give the folder of the run, or resume='auto', which starts anew where there is none"
        )
    present = [name for name in (CHECKPOINTS, JOURNAL_FILE) if (folder / name).exists()]
    if config.resume in (True, "auto") or not present:
        return config.resume in (True, "auto")
    if is_restarted() and launcher_name() in _noted_launchers(folder):
        return True
    if config.resume == "replace":
        return False
    if not has_lock:  # To replace it, or to continue it, would be refused, too.
        _refuse_live(folder)
    if not holds_checkpoint(folder / CHECKPOINTS):
        anew = "; resume='auto' starts it anew, with the decisions of its journal"
        raise ValueError(
            f"folder {str(folder)!r} holds the records of a run without checkpoints: give another "
            f"folder, or resume='replace', which removes them{anew if config.saves else ''}"
        )
    raise ValueError(
        f"folder {str(folder)!r} already holds a run ({', '.join(present)}); continue it with "
        "resume='auto', or with train(resume_from_checkpoint=True) of pipetransformer.hf; replace "
        "it with resume='replace', or give another folder"
    )


def _refuse_link(path: Path) -> None:
    """Refuse a folder elsewhere, in which old weights would be deleted as if they were the run's.

    The run's own folder may be a link: all in it is then of one run.
    """
    if path.is_symlink():
        raise ValueError(
            f"{path} is a symbolic link to {os.readlink(path)}, and a run writes and deletes "
            "weights only in folders of its own; remove the link, or give another folder=, which "
            "may itself be a link to another disk"
        )


def remove_run(folder: Path) -> None:
    """Remove checkpoints and journal, from which a run would continue; its records stay."""
    clear(folder / CHECKPOINTS)
    FrozenStore(folder / CHECKPOINTS).prune()
    for name in (_LAUNCHERS, JOURNAL_FILE, _RUN):
        (folder / name).unlink(missing_ok=True)


def note_launchers(folder: Path, world: World) -> None:
    """Write down who started this run's processes, so that restarts may continue it. Collective.

    Raises:
        OSError: the disk is full, or nothing may be written.
    """
    launchers = sorted(set(gather_json(launcher_name(), group=world.group)))

    def note() -> None:
        if _noted_launchers(folder) != launchers:  # Started again, maybe on a full disk.
            _note(folder / _LAUNCHERS, json.dumps(launchers).encode())

    on_rank_0(note, group=world.group)


def note_run(
    folder: Path, identity: Mapping[str, Any], model: LayeredModel, *, continues: bool
) -> None:
    """Write down which run owns a folder, before anything is saved in it. For rank 0.

    A run that continues with a journal alone must be the run that began it.

    Args:
        identity: what a run and its continuation have in common, without the sublayers.
        continues: whether the run continues from the folder.
    Raises:
        ValueError: it is another run's folder, or its file is damaged.
        OSError: the disk is full, or nothing may be written.
    """
    path, has_saved = folder / _RUN, holds_checkpoint(folder / CHECKPOINTS)
    sublayers = [sublayer.name for sublayer in model.sublayers]
    if not continues or not (has_saved or ((folder / JOURNAL_FILE).exists() and path.exists())):
        _note(path, sealed_json({**identity, _SUBLAYERS: sublayers}))
    elif not has_saved:  # A checkpoint says more, and is compared when it is opened.
        begun, what = read_sealed_json(path), f"the run that was begun in {folder}"
        if begun[_SUBLAYERS] != sublayers:
            raise _of_another_model(what, begun[_SUBLAYERS], sublayers)
        refuse_another_run(f"{what} had", begun, identity)


def open_latest(directory: Path, *, group: dist.ProcessGroup | None) -> Checkpoint | None:
    """Find the newest checkpoint that every rank can use; warn of unusable ones. Collective.

    Each rank verifies its share of the files, so that a large checkpoint is read once in all.

    Returns:
        None where no save was ever completed in this directory.
    Raises:
        CorruptCheckpointError: there are checkpoints, and none is usable.
    """
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def verified(folder: Path) -> Checkpoint:
        checkpoint = open_checkpoint(folder)
        checkpoint.verify(part=rank, num_parts=size)
        return checkpoint

    # The others take rank 0's list: on a shared disk they might still see an older one.
    names = told_by_rank_0(lambda: [folder.name for folder in published(directory)], group=group)
    for name in names:
        try:
            return agree(partial(verified, directory / name), group=group)
        except CorruptCheckpointError as error:  # On every rank, so all try the next together.
            if rank == 0:
                _LOG.warning("checkpoint %s cannot be used, trying an older: %s", name, error)
    if names:
        raise CorruptCheckpointError(
            f"no checkpoint in {directory} is usable ({', '.join(names)}); the warnings name the "
            "files; restore one, or start anew in another directory"
        )
    return None


def check_model(checkpoint: Checkpoint, model: LayeredModel) -> None:
    """Refuse a checkpoint of a model whose sublayers have other names."""
    sublayers = [sublayer.name for sublayer in model.sublayers]
    names = {shard_name(name, kind) for name in sublayers for kind in (WEIGHTS, OPTIMIZER)}
    if names != checkpoint.shards:
        saved = {split_shard_name(name)[0] for name in checkpoint.shards}
        raise _of_another_model(f"checkpoint {checkpoint.folder}", saved, sublayers)


def _of_another_model(what: str, saved: Iterable[str], ours: Iterable[str]) -> ValueError:
    return ValueError(
        f"{what} is of a model with the sublayers {sorted(saved)}, but this one has "
        f"{sorted(ours)}; resume with the model that was saved"
    )


def refuse_another_run(what: str, begun: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise a ValueError where a run's identity is not that of the run which it continues.

    Args:
        what: begins the message, as "checkpoint X was saved with".
    """
    other = {name: own for name, own in ours.items() if begun.get(name) != own}
    if other:
        had = {name: begun.get(name) for name in other}
        raise ValueError(
            f"{what} {had}, but this run has {other}; resume with the same seed and training set, "
            "which give the order of the samples, the same optimizer, and the same quantized "
            "weights, if any, or start a new run from its weights"
        )


def load_shards(
    checkpoint: Checkpoint,
    names: Sequence[str],
    task: Task,
    *,
    group: dist.ProcessGroup | None,
) -> dict[str, Shard]:
    """Load the weights that this rank will hold into the model, in place. Collective.

    An error is raised on all ranks. All shards are compared with the model before the first weight
    is written: at no time are there two of the model.

    Returns:
        the optimizer's shards.
    """
    model, weights = task.model, dict[str, Shard]()

    def check() -> None:
        for index, sublayer in enumerate(model.sublayers):
            name, moments = (shard_name(sublayer.name, kind) for kind in (WEIGHTS, OPTIMIZER))
            if name in names:
                weights[name] = model.movable(index)
                _check_fit(name, checkpoint.describe(name), weights[name])
            if moments in names:
                saved = checkpoint.describe(moments)
                _check_trained(checkpoint, saved, trained_parameters(task, (index,)))

    def load() -> dict[str, Shard]:
        for name, tensors in weights.items():
            checkpoint.load(name, tensors)
        return {name: checkpoint.read(name) for name in names if name not in weights}

    agree(check, group=group)
    return agree(load, group=group)


def _check_fit(name: str, saved: Shard, held: Shard) -> None:
    ours, theirs = (
        {(key, f"{tuple(t.shape)} {t.dtype}") for key, t in shard.items()}
        for shard in (held, saved)
    )
    if ours != theirs:
        raise ValueError(
            f"{name} was saved with {sorted(theirs - ours)}, but this model has "
            f"{sorted(ours - theirs)}; resume with the model that was saved"
        )


def _check_trained(checkpoint: Checkpoint, moments: Shard, trained: Collection[str]) -> None:
    names = (key for key in moments if not is_signal_tensor(key))
    left = [key for key in names if not any(key.startswith(f"{name}/") for name in trained)]
    if left:
        raise ValueError(
            f"checkpoint {checkpoint.folder} holds the optimizer's {left[0]!r}, but this run does "
            "not train that weight; set its requires_grad to True before the Trainer is built, or "
            "start a new run from the saved weights"
        )


def _note(path: Path, data: bytes) -> None:
    try:
        replace_file(path, data)
    except OSError as error:
        text = f"{error.strerror}; free some space there, or give another folder"
        raise OSError(error.errno, text, str(path)) from error


def _noted_launchers(folder: Path) -> list[str]:
    """Return who started the folder's run, [] where that cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        return list(json.loads((folder / _LAUNCHERS).read_text()))
    return []


LOCK_FILE = "lock"
_POLL_S = 0.2


def lock_folder(folder: Path, *, patience_s: float = 0.0) -> FileIO:
    """Lock a folder, created if missing, until the returned file is closed.

    The kernel closes it once this process and its forks have ended. On a file system without locks
    this warns, and locks nothing.

    Raises:
        ValueError: another run still holds the folder after `patience_s`; it cannot be written; or
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
                file.write(f"{_this_process()}\n".encode())
    except BaseException:
        file.close()
        raise
    return file


def _refuse_live(folder: Path) -> None:
    """Raise a ValueError if another run holds the lock of a folder."""
    with suppress(OSError), FileIO(open_unlinked(folder / LOCK_FILE, os.O_RDWR), "r+") as file:
        _wait_for(file, folder, 0.0)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _wait_for(file: FileIO, folder: Path, patience_s: float) -> bool:
    """Wait for the lock; return whether there is one, or raise a ValueError when time is up."""
    deadline, has_warned = time.monotonic() + patience_s, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            # These two say that another holds it; any other, that there are no locks here.
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                text = "folder %s cannot be locked: %s; start no second run in it"
                _LOG.warning(text, folder, error)
                return False
        holder = os.pread(file.fileno(), 1000, 0).decode(errors="replace").strip()
        trains = f"{holder or 'another process'} is training in folder {str(folder)!r}"
        if time.monotonic() >= deadline:
            advice = "wait for it to end, end it"
            if holder == _this_process():
                advice = "that is this process: call close() of the Trainer before"
            raise ValueError(f"{trains}; {advice}, or give another folder")
        if not has_warned:
            _LOG.warning("%s; waiting up to %.0f s for it to end", trains, patience_s)
        has_warned = True
        time.sleep(_POLL_S)
