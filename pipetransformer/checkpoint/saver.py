"""Save checkpoints in the background, while training goes on.

    training   | step | copy | step | step | step | step | ...
    rank 0            folder | write | wait for all | manifest, latest |
    other ranks              | write | tell rank 0  |

The ranks' writers talk in a group of their own, which the training loop never uses. One save is
under way at a time. A save that falls due meanwhile is skipped on all ranks, so a slow disk costs
checkpoints and no time. Only the end of the run waits. Of what no step changes, a save copies and
writes only what is not in the store of frozen files as it is. Weights in host memory that never
train are not even copied: a second model would not fit beside a large one.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autodp import broadcast_json, gather_json
from autopipe.engine import Milestone
from pipetransformer.checkpoint.format import (
    ShardRecord,
    Shards,
    checkpoint_folder,
    discard,
    publish,
    write_shards,
)
from pipetransformer.checkpoint.frozen_store import FrozenStore
from pipetransformer.durable_files import check_plain
from pipetransformer.elastic import UNTRAINED
from pipetransformer.errors import CorruptCheckpointError
from pipetransformer.processes import World

_ALIGNMENT_BYTES = 64
_GRACE_S = 10.0
"""How long a process that ends with an error lets a save finish."""
_LOG = logging.getLogger(__name__)


class Snapshot:
    """Copy shards into host memory that is kept from save to save; the copy stops training.

    Fresh memory is several times slower to fill than memory that was used before, so it is
    reserved ahead. A GPU copies faster into pinned memory; where none can be got, other host
    memory takes its place, with a warning.

    Args:
        pinned: copy from a GPU into pinned memory, which torch keeps for good.
        on_gpu: copy from a GPU into other memory.
    """

    def __init__(self, *, pinned: bool = False, on_gpu: bool = False) -> None:
        self._on_gpu, self._pins = pinned or on_gpu, pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied: Milestone | None = None

    def reserve(self, num_bytes: int) -> None:
        """Get memory of at least this size; a larger one replaces the old, with its contents.

        Raises:
            MemoryError: the host has none.
        """
        if num_bytes <= len(self._memory):
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # Never two of them at once.
        try:
            # A page becomes memory when it is first written.
            self._memory = self._new_memory(num_bytes).zero_()
        except RuntimeError as error:
            raise MemoryError(f"no {num_bytes} bytes of host memory: {error}") from error

    def _new_memory(self, num_bytes: int) -> Tensor:
        if self._pins:
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                _LOG.warning(
                    "no %d bytes of pinned memory for checkpoints: %s; other host memory is used, "
                    "into which a GPU copies more slowly while training stands still",
                    num_bytes,
                    error,
                )
        return torch.empty(num_bytes, dtype=torch.uint8)

    def take(self, shards: Shards) -> Shards:
        """Return contiguous copies of the shards, which overwrite an earlier call's.

        Copies from a GPU are queued behind the work of its current stream. Call `finish` before
        reading them; training may go on at once.

        Raises:
            MemoryError: the host has no memory for them.
        """
        self.reserve(num_bytes_of(shards))
        taken: dict[str, dict[str, Tensor]] = {}
        start = 0
        for name, tensors in shards.items():
            taken[name] = {}
            for key, tensor in tensors.items():
                place = self._memory[start : start + tensor.nbytes]
                copy = place.view(tensor.dtype).view(tensor.shape)
                taken[name][key] = copy.copy_(tensor.detach(), non_blocking=True)
                start += _aligned_bytes(tensor)
        if self._on_gpu:
            self._copied = Milestone()
        return taken

    def finish(self) -> None:
        """Wait until a GPU's copies have arrived; in any thread."""
        if self._copied is not None:
            self._copied.wait()


def num_bytes_of(shards: Shards) -> int:
    """Return the memory that a snapshot of the shards takes."""
    return sum(_aligned_bytes(one) for tensors in shards.values() for one in tensors.values())


def _aligned_bytes(tensor: Tensor) -> int:
    # Memory can be viewed as a dtype only from a multiple of that dtype's size.
    return -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True)
class Saved:
    """Report the checkpoint of a step.

    Args:
        stopped_s: how long training stood still, for the save before and for the copy.
        written_s: how long writing took beside training, until the checkpoint counted.
        num_bytes: that all ranks wrote, on rank 0; 0 where a write failed.
    """

    step: int
    stopped_s: float
    written_s: float
    num_bytes: int
    folder: Path


@dataclass(frozen=True)
class _Copies:
    """Hold what a rank writes of a step, or why it has nothing to write."""

    shards: Shards
    frozen: Shards
    failure: str


class Saver:
    """Write one checkpoint at a time in a thread of its own. Built by all ranks together.

    Args:
        directory: shared by all nodes; the newest `keep` checkpoints stay there.
        timeout_s: limit of a wait for the slowest rank's files.
    """

    def __init__(self, directory: Path, world: World, *, keep: int, timeout_s: float) -> None:
        self._directory = directory
        self._world = world
        self._keep = keep
        self._timeout_s = timeout_s
        self._waited_s = 0.0
        self._on_gpu = world.device.type == "cuda"
        self._snapshot = Snapshot(pinned=self._on_gpu)
        self._store = FrozenStore(directory)
        self._frozen_copy = Snapshot(on_gpu=self._on_gpu)
        self._group: dist.ProcessGroup | None = None
        if world.group is not None:
            # Messages of two threads in one group would be mistaken for each other.
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None
        self._saved: Saved | None = None

    @property
    def is_idle(self) -> bool:
        return self._writer is None or not self._writer.is_alive()

    def reserve(self, shards: Shards, frozen: Shards = MappingProxyType({})) -> None:
        """Get memory for copies of these tensors in the background, ahead of the first save."""
        assert self.is_idle
        _, copied = _split_lent(self._store.unseen(frozen))
        sizes = num_bytes_of(shards), num_bytes_of(copied)
        self._start("memory for a checkpoint", self._reserve, *sizes)

    def save(
        self,
        step: int,
        shards: Shards,
        *,
        frozen: Shards = MappingProxyType({}),
        scalars: Mapping[str, Any],
        own: Mapping[str, Any],
    ) -> None:
        """Copy this rank's tensors, and write them while training goes on.

        Args:
            shards: what this rank owns; it may change as soon as this returns.
            frozen: by "shard/group", the rest of them, which is written where it has changed. A
                script that changes weights which never train meanwhile costs that checkpoint.
            scalars: plain values by name; rank 0's are saved.
            own: plain values of this rank; `scalars["ranks"]` lists them in the checkpoint.
        Raises:
            TypeError: JSON cannot hold a value.
            RuntimeError: as `wait`.
        """
        start = time.perf_counter()
        self.wait()
        copies: Shards = {}
        changed: Shards = {}
        failure = ""
        try:
            copies = self._snapshot.take(shards)
            lent, copied = _split_lent(self._store.changed(frozen))
            changed = {**lent, **self._frozen_copy.take(copied)}
        except MemoryError as error:  # For the thread to tell: other ranks wait for these files.
            failure = str(error)
        state = {"scalars": scalars, "own": own}
        check_plain(state, "state")
        # A deep copy, as training goes on changing them.
        state = json.loads(json.dumps(state))
        stopped_s = self._waited_s + time.perf_counter() - start
        self._waited_s = 0.0
        self._start(
            f"the checkpoint of step {step}",
            self._write, step, _Copies(copies, changed, failure), state, stopped_s,
        )  # fmt: skip

    def catches_up(self, *, patience_s: float) -> bool:
        """Wait for this rank's save; return whether all ranks' saves have ended. Collective."""
        start = time.perf_counter()
        if self._writer is not None:
            self._writer.join(patience_s)
        self._waited_s = time.perf_counter() - start
        return all(gather_json(self.is_idle, group=self._world.group))

    def take_saved(self) -> Saved | None:
        """Return the report of the save that ended since the last call, if any."""
        saved, self._saved = self._saved, None
        return saved

    def wait(self) -> None:
        """Wait for the save under way, if there is one.

        Raises:
            RuntimeError: this rank's writer did not end in time, or lost another rank.
        """
        if self._writer is not None:
            self._writer.join(self._timeout_s)
            if self._writer.is_alive():
                raise RuntimeError(
                    f"rank {self._world.rank} is still busy with {self._writer.name} in "
                    f"{self._directory} after {self._timeout_s:g} s; save less often, to a faster "
                    "disk, or raise setup_timeout_s"
                )
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait as `wait` does, and destroy the group. Collective."""
        try:
            self.wait()
        finally:
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None

    def abandon(self) -> None:
        """Give the save under way a moment to finish, and leave it."""
        if self._writer is not None:
            self._writer.join(_GRACE_S)

    def _start(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        # A daemon: a process that has failed must not wait for a disk or for its neighbours.
        self._writer = threading.Thread(target=work, args=arguments, name=name, daemon=True)
        self._writer.start()

    def _reserve(self, num_bytes: int, num_frozen_bytes: int) -> None:
        with suppress(MemoryError):  # The save tries again, and says so.
            self._snapshot.reserve(num_bytes)
            self._frozen_copy.reserve(num_frozen_bytes)

    def _write(self, step: int, copies: _Copies, state: dict[str, Any], stopped_s: float) -> None:
        start = time.perf_counter()
        try:
            folder, num_bytes = self._write_together(step, copies, state)
        except Exception as error:
            # A thread's error goes nowhere, so `wait` raises it in the training loop.
            self._error = RuntimeError(
                f"rank {self._world.rank} could not save a checkpoint of step {step}: {error}; if "
                "no other rank failed, raise setup_timeout_s or save to a faster disk"
            )
            self._error.__cause__ = error
            return
        finally:
            # It may be as large as the model, and the next save needs little of it. Not pinned,
            # as torch keeps pinned memory.
            self._frozen_copy = Snapshot(on_gpu=self._on_gpu)
        self._saved = Saved(step, stopped_s, time.perf_counter() - start, num_bytes, folder)

    def _write_together(
        self, step: int, copies: _Copies, state: dict[str, Any]
    ) -> tuple[Path, int]:
        """Write with all ranks; return the folder and all ranks' bytes, 0 if a write failed."""
        # No OSError leaves here: a full disk must not end the run, nor leave others waiting.
        path = ""
        if self._world.is_main:
            try:
                path = str(checkpoint_folder(self._directory, step))
            except OSError as error:
                _warn(step, [f"rank 0: {error}"])
        path = broadcast_json(path, group=self._group)
        folder = Path(path)
        if not path:
            return folder, 0
        answers = gather_json(
            {**self._write_own(folder, copies), "own": state["own"]}, group=self._group
        )
        if not self._world.is_main:
            return folder, 0
        causes = [f"rank {r}: {one['failure']}" for r, one in enumerate(answers) if one["failure"]]
        scalars = {**state["scalars"], "ranks": [answer["own"] for answer in answers]}
        if not causes:
            records, frozen = _records_of(answers, "records"), _records_of(answers, "frozen")
            try:
                publish(folder, records, scalars, keep=self._keep, frozen=frozen)
            except (OSError, CorruptCheckpointError) as error:
                causes = [f"rank 0: {error}"]
        if causes:
            discard(folder)
            _warn(step, causes)
            return folder, 0
        self._store.prune()
        return folder, sum(answer["num_bytes"] for answer in answers)

    def _write_own(self, folder: Path, copies: _Copies) -> dict[str, Any]:
        """Write this rank's files; return what rank 0 publishes of them."""
        self._snapshot.finish()
        self._frozen_copy.finish()
        if copies.failure:
            return {"failure": copies.failure}
        try:
            frozen = self._store.write(copies.frozen)
            records = write_shards(folder, copies.shards)
        except (OSError, ValueError) as error:
            return {"failure": str(error)}
        files = {frozen[name].file: frozen[name] for name in copies.frozen}
        written = [*records.values(), *files.values()]
        return {
            "failure": "",
            "records": {name: asdict(record) for name, record in records.items()},
            "frozen": {name: asdict(record) for name, record in frozen.items()},
            "num_bytes": sum(record.num_bytes for record in written),
        }


def _split_lent(groups: Shards) -> tuple[Shards, Shards]:
    """Split groups into those that a thread may write as they are, and those to be copied."""

    def can_be_lent(name: str, group: Mapping[str, Tensor]) -> bool:
        # safetensors writes nothing that has gaps, or shares memory.
        memories = {tensor.untyped_storage().data_ptr() for tensor in group.values()}
        is_plain = all(tensor.is_cpu and tensor.is_contiguous() for tensor in group.values())
        return name.rpartition("/")[2] == UNTRAINED and is_plain and len(memories) == len(group)

    lent = {name: group for name, group in groups.items() if can_be_lent(name, group)}
    return lent, {name: group for name, group in groups.items() if name not in lent}


def _records_of(answers: list[dict[str, Any]], kind: str) -> dict[str, ShardRecord]:
    """Return all ranks' records of a kind."""
    return {name: ShardRecord(**record) for rank in answers for name, record in rank[kind].items()}


def _warn(step: int, causes: list[str]) -> None:
    _LOG.warning("no checkpoint of step %d: %s; training goes on", step, "; ".join(causes))
