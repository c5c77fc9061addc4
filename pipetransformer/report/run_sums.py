"""Add up what a run takes and reaches: its report, and the unfinished epoch by category."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from autodp import gather_json
from autopipe.profile import Profile
from pipetransformer.elastic import Change, Decision
from pipetransformer.processes import World
from pipetransformer.report.fit_report import FitReport
from pipetransformer.stage import StepResult


class RunSums:
    """Add up a rank's times and counts.

    Attributes:
        report: the whole run's.
        profile: tells what forwards are spared; set before the first step.
    """

    profile: Profile

    def __init__(self, world: World) -> None:
        self._world = world
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._samples, self._loss = 0, 0.0
        self._depth_before = 0
        self._unfrozen_s, self._unfrozen_samples, self._is_first = 0.0, 0, True
        self.report = FitReport()

    def add_step(
        self, result: StepResult, decision: Decision, shape: Mapping[str, int], num_samples: int
    ) -> None:
        """Count a training step, of so many samples of all replicas."""
        report, upgrades = self.report, result.cache_upgrades
        # A process's first step also warms up.
        if not (decision.num_frozen or decision.resting or self._is_first):
            self._unfrozen_s += result.seconds
            self._unfrozen_samples += num_samples
        self._is_first = False
        report.seconds += result.seconds
        report.samples += num_samples
        report.cache_hits += result.cache_hits
        report.cache_misses += result.cache_misses
        report.cache_upgrades += upgrades
        if result.cache_hits:
            report.cache_spared_s += result.cache_hits * self._forward_s(decision.num_frozen)
        if upgrades:
            report.cache_spared_s += upgrades * self._forward_s(self._depth_before)
        for category, spent_s in result.breakdown.items():
            self._spent[category] += spent_s
        self._spent["data"] -= result.stats.seconds
        self._spent["cache"] += result.stats.seconds
        self._samples += num_samples
        self._loss += result.loss * num_samples
        report.training_loss = self._loss / max(self._samples, 1)
        report.frozen, report.length = shape["frozen"], shape["length"]
        report.replicas = shape["replicas"]

    def unfrozen_run_s(self) -> float | None:
        """Predict the seconds of an unfrozen run, by its unfrozen steps; None without any."""
        if not self._unfrozen_samples:
            return None
        return self._unfrozen_s / self._unfrozen_samples * self.report.samples

    def add_change(self, change: Change) -> float:
        """Count a decision and its transition; return the seconds of deciding alone."""
        before = change.before
        if before is not None and before.num_frozen < change.decision.num_frozen:
            self._depth_before = before.num_frozen
        # The start's seconds are setup, and not the run's.
        spent_s = change.observe_s + (change.seconds if before else 0.0)
        self.report.seconds += spent_s
        carried_s = change.seconds if before and change.is_transition else 0.0
        self._spent["transition"] += carried_s
        self._spent["deciding"] += spent_s - carried_s
        return spent_s - carried_s

    def of_epoch(self) -> dict[str, Any]:
        """Return the fields of an epoch's record, with times as means over ranks. Collective."""
        gathered = gather_json(dict(self._spent), group=self._world.group)
        breakdown = {
            key: sum(one.get(key, 0.0) for one in gathered) / len(gathered)
            for key in sorted({key for one in gathered for key in one})
        }
        seconds = sum(breakdown.values())
        return {
            "seconds": seconds,
            "breakdown": breakdown,
            "loss": self._loss / max(self._samples, 1),
            "samples_per_s": self._samples / max(seconds, 1e-9),
            "cache_bytes": self.report.cache_bytes,
        }

    def begin_epoch(self) -> None:
        self._spent.clear()
        self._samples, self._loss = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return rank 0's part of the unfinished epoch and of unfrozen steps, as plain values."""
        sums = {"samples": self._samples, "loss": self._loss}
        unfrozen = {"seconds": self._unfrozen_s, "samples": self._unfrozen_samples}
        return {"spent": dict(self._spent), **sums, "unfrozen": unfrozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the epoch of `state_dict`, with rank 0's times on every rank."""
        self._spent = defaultdict(float, state["spent"])
        self._samples, self._loss = state["samples"], state["loss"]
        unfrozen = state.get("unfrozen", {"seconds": 0.0, "samples": 0})  # Older ones lack it.
        self._unfrozen_s, self._unfrozen_samples = unfrozen["seconds"], unfrozen["samples"]

    def _forward_s(self, num_frozen: int) -> float:
        """Return the measured seconds of a forward through the frozen layers, per sample."""
        profile = self.profile
        costs = [one.forward_s[-1] for one in profile.sublayers if one.layer < num_frozen]
        return sum(costs) / profile.batch_sizes[-1]
