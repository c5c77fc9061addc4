"""Say what a checkpoint holds of a run beside its tensors, and take it up again.

There are no random generators to save: sample order, dataset reads and dropout are seeded from the
run's seed and the position. Neither is the learning rate, a function of the position.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import torch

from autodp import gather_json
from freeze.signals import IntervalSignals
from pipetransformer.checkpoint.format import Checkpoint, published
from pipetransformer.checkpoint.resume import (
    CHECKPOINTS,
    check_model,
    lock_folder,
    note_launchers,
    note_run,
    open_latest,
    read_shards,
    refuse_another_run,
    remove_run,
    resumes,
)
from pipetransformer.checkpoint.saver import Saved, Saver
from pipetransformer.elastic import Decision, Elasticity, plan_shape
from pipetransformer.feed import Position
from pipetransformer.measure import Measurements
from pipetransformer.model import OptimizerTraits, Task
from pipetransformer.processes import World, cpu_name, is_restarted, told_by_rank_0

_LOGGER = logging.getLogger(__name__)
_LOCK_PATIENCE_S = 120.0
"""How long a restarted run waits for its predecessor to let go of the folder: on a network file
system a lost node's lock stays for a while, with NFSv4 on Linux for 90 s."""

_UNTOLD = ("seed", "folder", "resume", "progress", "label")
"""Settings that cannot change, or do not matter to what is trained."""

_PATIENCE_STEPS = 1.0
"""For how many steps training may stop for the save before."""


class Part(Protocol):
    """Save and restore a part of a run as plain values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RunState:
    """Save and restore what changes while a run trains; its parts do so themselves.

    `continues` says from where, once begun; "" for a run that starts.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        elastic: Elasticity,
        parts: Mapping[str, Part],
        optimizer: OptimizerTraits,
    ) -> None:
        self._task = task
        self._world = world
        self._timeline, self._deployment = elastic.timeline, elastic.deployment
        self._elastic = elastic
        self._parts = {"transitions": elastic, **parts}
        self._optimizer = optimizer
        self._hardware = _describe_hardware(world.device)
        self._lock: FileIO | None = None
        self._saver: Saver | None = None
        self._resumes = False
        self._keeps = False
        self._reserved_for: Decision | None = None
        self.continues = ""

    def open(self) -> Checkpoint | None:
        """Get ready to save, and return the checkpoint to continue from, if any. Collective."""
        config, group = self._task.config, self._world.group
        if config.folder is None:
            return None
        folder = Path(config.folder)
        self._resumes = told_by_rank_0(lambda: self._claim(folder), group=group)
        note_launchers(folder, self._world)
        directory = folder / CHECKPOINTS
        if config.saves:
            keep, timeout_s = config.keep_checkpoints, config.setup_timeout_s
            self._saver = Saver(directory, self._world, keep=keep, timeout_s=timeout_s)
        checkpoint = open_latest(directory, group=group) if self._resumes else None
        if checkpoint is not None:
            self._check(checkpoint)
        return checkpoint

    def _claim(self, folder: Path) -> bool:
        """Lock the folder, and tell whether the run in it is continued."""
        config = self._task.config
        waits = min(_LOCK_PATIENCE_S, config.setup_timeout_s / 2) if is_restarted() else 0.0
        self._lock = lock_folder(folder, patience_s=waits)
        # Asked before, but another run may have come and gone since.
        continues = resumes(config)
        if continues and config.resume in (False, "replace"):
            _LOGGER.warning("the processes were started again: the run in %s continues", folder)
        if config.resume == "replace" and not continues:
            remove_run(folder)
        note_run(folder, self._identity(), self._task.model, continues=continues)
        return continues

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Measure where need be, and continue from a checkpoint if there is one. Collective."""
        self._elastic.begin(self._kept_measurements(checkpoint) if checkpoint else None)
        if checkpoint:
            self._restore(checkpoint)
            self.continues = self._continues_from(checkpoint)
        step = self._timeline.position.step
        self._elastic.open_journal(from_step=step if self._resumes else None)

    def _kept_measurements(self, checkpoint: Checkpoint) -> Measurements | None:
        """Return what was measured before, where it was on as many such ranks. Collective."""
        saved, world = checkpoint.scalars, self._world
        shape, hardware = saved["world"], [rank["hardware"] for rank in saved["ranks"]]
        same = (shape["num_ranks"], shape["slots_per_node"]) == (world.size, world.slots_per_node)
        same = same and hardware[world.rank] == self._hardware
        self._keeps = all(gather_json(same, group=world.group))
        return Measurements.from_json(saved["measurements"]) if self._keeps else None

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint that any number of ranks may have written. Collective."""
        scalars, elastic = checkpoint.scalars, self._elastic
        self._timeline.position = Position(**scalars["position"])
        for name, part in self._parts.items():
            # A run that was saved in another precision has no loss scale: it starts anew.
            if name in scalars["parts"]:
                part.load_state_dict(scalars["parts"][name])
        if scalars["world"] != plan_shape(self._task, self._world):
            elastic.replan()
        decision = elastic.decision
        assert decision is not None
        needed = self._deployment.needed_shards(decision)
        shards = read_shards(checkpoint, needed, self._task.model, group=self._world.group)
        self._deployment.restore(decision, shards)
        signals = [rank["signals"] for rank in scalars["ranks"]]
        self._deployment.active_stage.signals.load(IntervalSignals.joined(signals))
        if not self._keeps:
            elastic.planner.use(elastic.planner.measurements)

    def _continues_from(self, checkpoint: Checkpoint) -> str:
        """Return where the run continues, and what is set otherwise than at the save."""
        before, now = checkpoint.scalars.get("settings", {}), self._settings()
        changed = [
            f"{name} {before[name]} -> {value}"
            for name, value in now.items()
            if name in before and before[name] != value
        ]
        where = f"continues from step {self._timeline.position.step} ({checkpoint.folder.name})"
        return where + (f"; changed since: {', '.join(changed)}" if changed else "")

    def _settings(self) -> dict[str, Any]:
        """Return what a run that continues may set otherwise, as plain values."""
        plain = self._task.config.plain()
        rate = {"peak_learning_rate": self._optimizer.peak_learning_rate}
        return {**{name: plain[name] for name in plain if name not in _UNTOLD}, **rate}

    def save_if_due(self) -> Saved | None:
        """Have a checkpoint written where one is due; return one that has been since."""
        if self._saver is None:
            return None
        decision = self._elastic.decision
        assert decision is not None
        if decision.changes(self._reserved_for) and self._saver.is_idle:
            # Only after a step: there is no optimizer state before the first.
            self._reserved_for = decision
            self._saver.reserve(self._deployment.owned_shards())
        if self._timeline.save_due() and self._may_save(self._saver, decision):
            signals = self._deployment.active_stage.signals.state()
            shared = {
                **self._identity(),
                "settings": self._settings(),
                "world": plan_shape(self._task, self._world),
                "position": asdict(self._timeline.position),
                "parts": {name: part.state_dict() for name, part in self._parts.items()},
                "measurements": self._elastic.planner.measurements.to_json(),
                "state_names": list(self._task.model.model.state_dict()),
            }
            self._saver.save(
                self._timeline.position.step,
                self._deployment.owned_shards(),
                scalars=shared,
                own={"signals": signals, "hardware": self._hardware},
            )
        return self._saver.take_saved()

    def _may_save(self, saver: Saver, decision: Decision) -> bool:
        """Wait a step at most for the save before this one; the run's last save waits longer."""
        patience_s = _PATIENCE_STEPS * decision.plan.predicted_step_s
        may = self._timeline.is_over or saver.catches_up(patience_s=patience_s)
        if not may and self._world.is_main:
            _LOGGER.warning(
                f"no checkpoint of step {self._timeline.position.step}: the one before it is "
                "still being written; training goes on. Save less often, or to a faster disk"
            )
        return may

    def newest_checkpoint(self) -> str | None:
        """Give a save under way a moment, on all ranks; rank 0 names the newest checkpoint."""
        config = self._task.config
        if self._saver is not None:
            self._saver.abandon()
        if config.folder is None or not self._world.is_main:
            return None
        return next((one.name for one in published(Path(config.folder) / CHECKPOINTS)), None)

    def finish(self) -> Saved | None:
        """Wait until the last checkpoint is written, as `Saver.wait` does; return it."""
        if self._saver is None:
            return None
        self._saver.wait()
        return self._saver.take_saved()

    def close(self, *, failed: bool) -> None:
        """End saving; after a failure of this rank the others are not waited for."""
        try:
            if self._saver is not None:
                end = self._saver.abandon if failed else self._saver.close
                end()
        finally:
            # Where a thread still writes, the folder is this process's until it ends.
            if self._lock is not None and (self._saver is None or self._saver.is_idle):
                self._lock.close()

    def _check(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of another model, or after which samples would be lost."""
        check_model(checkpoint, self._task.model)
        saved = f"checkpoint {checkpoint.folder} was saved with"
        refuse_another_run(saved, checkpoint.scalars, self._identity())

    def _identity(self) -> dict[str, Any]:
        """Return what a checkpoint and the run that continues it must have in common."""
        return {
            "seed": self._task.config.seed,
            "num_samples": self._timeline.num_samples,
            "optimizer": {
                "name": self._optimizer.name,
                "entries": list(self._optimizer.entries),
            },
        }


def _describe_hardware(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {"device": name, "cores": torch.get_num_threads(), "torch": torch.__version__}
