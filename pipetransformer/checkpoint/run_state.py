"""Gather what a checkpoint holds of a run, and continue a run from it.

It holds no random generators: sample order, dataset reads and dropout are seeded from the run's
seed and the position. It holds no learning rate either, a function of the position.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import torch

from autocache import fingerprint
from autodp import gather_json
from autopipe.profile import Profile
from freeze.signals import IntervalSignals
from pipetransformer.checkpoint.format import Checkpoint, published
from pipetransformer.checkpoint.resume import (
    CHECKPOINTS,
    OPAQUE,
    check_model,
    load_shards,
    lock_folder,
    note_launchers,
    note_run,
    open_latest,
    refuse_another_run,
    remove_run,
    resumes,
)
from pipetransformer.checkpoint.saver import Saved, Saver
from pipetransformer.elastic import Decision, Elasticity, plan_shape, split_by_change
from pipetransformer.feed import Position
from pipetransformer.model import (
    OptimizerTraits,
    Task,
    is_opaque,
    named_tensors,
    plain_tensors,
    state_of,
)
from pipetransformer.processes import World, cpu_name, is_restarted, told_by_rank_0

_LOGGER = logging.getLogger(__name__)
_LOCK_PATIENCE_S = 120.0
"""How long a restarted run waits for the folder's lock. A lost node's lock stays for a while on a
network file system, with NFSv4 on Linux for 90 s."""

_UNTOLD = ("seed", "folder", "resume", "progress", "label")
"""Settings that cannot change, or do not affect training."""

_PATIENCE_STEPS = 1.0
"""The most steps' time for which training waits for the save before."""


class Part(Protocol):
    """Save and restore a part of a run as plain values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RunState:
    """Save and restore what changes while a run trains.

    Attributes:
        continues: once begun, a sentence that says where the run continues; "" where it starts.
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
        self._opaque = _hash_of_opaque(task)
        self._lock: FileIO | None = None
        self._saver: Saver | None = None
        self._resumes = False
        self._keeps = False
        self._reserved_for: Decision | None = None
        self.continues = ""

    def open(self) -> Checkpoint | None:
        """Claim the folder; return the checkpoint to continue from, if any. Collective."""
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
            check_model(checkpoint, self._task.model)
            saved = f"checkpoint {checkpoint.folder} was saved with"
            refuse_another_run(saved, checkpoint.scalars, self._identity())
        return checkpoint

    def _claim(self, folder: Path) -> bool:
        """Lock the folder, and return whether this run continues the one in it. For rank 0."""
        config = self._task.config
        waits = min(_LOCK_PATIENCE_S, config.setup_timeout_s / 2) if is_restarted() else 0.0
        self._lock = lock_folder(folder, patience_s=waits)
        # Checked before the ranks met, too, but another run may have come and gone since.
        continues = resumes(config, has_lock=True)
        if continues and config.resume in (False, "replace"):
            _LOGGER.warning("the processes were started again: the run in %s continues", folder)
        if config.resume == "replace" and not continues:
            remove_run(folder)
        note_run(folder, self._identity(), self._task.model, continues=continues)
        return continues

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Measure what is not known, and restore a checkpoint if there is one. Collective."""
        self._elastic.begin(self._kept_profile(checkpoint) if checkpoint else None)
        if checkpoint:
            self._restore(checkpoint)
            self.continues = self._continues_from(checkpoint)
        step = self._timeline.position.step
        self._elastic.open_journal(from_step=step if self._resumes else 0)

    def _kept_profile(self, checkpoint: Checkpoint) -> Profile | None:
        """Return a checkpoint's costs if all ranks' hardware is the same. Collective."""
        saved, world = checkpoint.scalars, self._world
        shape, hardware = saved["world"], [rank["hardware"] for rank in saved["ranks"]]
        same = (shape["num_ranks"], shape["slots_per_node"]) == (world.size, world.slots_per_node)
        same = same and hardware[world.rank] == self._hardware
        self._keeps = all(gather_json(same, group=world.group))
        costs = saved["measurements"]
        # Version 0.2 saved the rates of the cache's rows beside the profile.
        costs = {**costs.get("profile", {}), **{n: costs[n] for n in costs if n != "profile"}}
        return Profile.from_json(costs) if self._keeps else None

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint that any number of ranks may have written. Collective."""
        scalars, elastic = checkpoint.scalars, self._elastic
        self._timeline.position = Position(**scalars["position"])
        for name, part in self._parts.items():
            # A run that was saved in another precision has no loss scale.
            if name in scalars["parts"]:
                part.load_state_dict(scalars["parts"][name])
        if scalars["world"] != plan_shape(self._task, self._world):
            elastic.replan()
        decision = elastic.decision
        assert decision is not None
        needed = self._deployment.needed_shards(decision)
        shards = load_shards(checkpoint, needed, self._task, group=self._world.group)
        self._deployment.restore(decision, shards)
        elastic.feed.follow_prefix()
        signals = [rank["signals"] for rank in scalars["ranks"]]
        self._deployment.active_stage.trained.signals.load(IntervalSignals.joined(signals))
        if not self._keeps:
            elastic.planner.use(elastic.planner.profile)

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
        """Return the settings that a continued run may change, as plain values."""
        plain = self._task.config.plain()
        rate = {"peak_learning_rate": self._optimizer.peak_learning_rate}
        return {**{name: plain[name] for name in plain if name not in _UNTOLD}, **rate}

    def save_if_due(self) -> Saved | None:
        """Start to write a checkpoint if one is due; return the one that was completed since."""
        if self._saver is None:
            return None
        decision = self._elastic.decision
        assert decision is not None
        if decision.changes(self._reserved_for) and self._saver.is_idle:
            # Here, after a step: before the first one the shards lack the optimizer's state.
            self._reserved_for = decision
            self._saver.reserve(*split_by_change(self._task, self._deployment.owned_shards()))
        if self._timeline.save_due() and self._may_save(self._saver, decision):
            signals = self._deployment.active_stage.trained.signals.state()
            trained, frozen = split_by_change(self._task, self._deployment.owned_shards())
            shared = {
                **self._identity(),
                "settings": self._settings(),
                "world": plan_shape(self._task, self._world),
                "position": asdict(self._timeline.position),
                "parts": {name: part.state_dict() for name, part in self._parts.items()},
                "measurements": self._elastic.planner.profile.to_json(),
                "state_names": list(state_of(self._task.model.model, movable=True)),
            }
            self._saver.save(
                self._timeline.position.step,
                trained,
                frozen=frozen,
                scalars=shared,
                own={"signals": signals, "hardware": self._hardware},
            )
        return self._saver.take_saved()

    def _may_save(self, saver: Saver, decision: Decision) -> bool:
        """Wait at most a step for the save before this one; the run's last save always waits."""
        patience_s = _PATIENCE_STEPS * decision.plan.predicted_step_s
        may = self._timeline.is_over or saver.catches_up(patience_s=patience_s)
        if not may and self._world.is_main:
            _LOGGER.warning(
                f"no checkpoint of step {self._timeline.position.step}: the one before it is "
                "still being written; training goes on. Save less often, or to a faster disk"
            )
        return may

    def where_it_stopped(self) -> str:
        """Return rank 0's sentence on the run's step and how to continue it; "" on other ranks.

        It gives a save under way a moment, on all ranks.
        """
        config = self._task.config
        if self._saver is not None:
            self._saver.abandon()
        if not self._world.is_main:
            return ""
        stopped = f"stopped at step {self._timeline.position.step}"
        if config.folder is not None:
            newest = next(iter(published(Path(config.folder) / CHECKPOINTS)), None)
            if newest is not None:
                return (
                    f"{stopped}; the newest checkpoint is {newest.name}: continue it with "
                    "resume='auto', or with train(resume_from_checkpoint=True) of "
                    "pipetransformer.hf"
                )
            if config.saves:
                return f"{stopped}, before the first checkpoint; resume='auto' starts the run anew"
        return (
            f"{stopped}; there is no checkpoint: a run that is to be continued needs folder= and "
            "checkpoint_every_steps= or checkpoint_every_epochs="
        )

    def finish(self) -> Saved | None:
        """Wait until the last checkpoint is written, as `Saver.wait`; return it."""
        if self._saver is None:
            return None
        self._saver.wait()
        return self._saver.take_saved()

    def close(self, *, failed: bool) -> None:
        """End saving, after a failure of this rank without waiting for the others."""
        try:
            if self._saver is not None:
                end = self._saver.abandon if failed else self._saver.close
                end()
        finally:
            self.unlock()

    def unlock(self) -> None:
        """Let another run enter the folder, unless a thread still writes there."""
        if self._lock is not None and (self._saver is None or self._saver.is_idle):
            self._lock.close()

    def _identity(self) -> dict[str, Any]:
        """Return what a checkpoint and the run that continues it must have in common."""
        traits = self._optimizer
        return {
            "seed": self._task.config.seed,
            "num_samples": self._timeline.num_samples,
            "optimizer": {"name": traits.name, "entries": list(traits.entries)},
            **({} if self._opaque is None else {OPAQUE: self._opaque}),
        }


def _hash_of_opaque(task: Task) -> str | None:
    """Return a hash of what no checkpoint holds, as it never trains or moves; None without it."""
    held = {n: one for n, one in named_tensors(task.model.model).items() if is_opaque(one)}
    values = fingerprint(plain for one in held.values() for plain in plain_tensors(one))
    return f"{values:016x}" if held else None


def _describe_hardware(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {"device": name, "cores": torch.get_num_threads(), "torch": torch.__version__}
