"""Add up what a run takes and reaches: its report, and the unfinished epoch by category."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from autocache import CacheStats
from autodp import gather_json
from pipetransformer.elastic import Change, Decision
from pipetransformer.processes import World
from pipetransformer.report.fit_report import FitReport
from pipetransformer.report.saved_time import SavedTime
from pipetransformer.stage import StepResult


class RunSums:
    """Add up a rank's times and counts.

    Attributes:
        report: the whole run's.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._samples, self._loss = 0, 0.0
        self._saved = SavedTime()
        self.report = FitReport()

    def add_step(
        self, result: StepResult, decision: Decision, shape: Mapping[str, int], num_samples: int
    ) -> None:
        """Count a training step over `num_samples` of all replicas."""
        report, upgrades = self.report, result.cache_upgrades
        rows = CacheStats(result.cache_hits, upgrades, result.cache_misses - upgrades)
        rows.ahead = result.cache_ahead
        # Layers that rest have no rows: a depth of their own, below 0.
        depth = decision.num_frozen or -len(decision.resting)
        self._saved.add(result.seconds, num_samples, depth=depth, rows=rows)
        report.seconds += result.seconds
        report.samples += num_samples
        report.cache_hits += result.cache_hits
        report.cache_misses += result.cache_misses
        report.cache_upgrades += upgrades
        for category, spent_s in result.breakdown.items():
            self._spent[category] += spent_s
        self._spent["data"] -= result.stats.seconds
        self._spent["cache"] += result.stats.seconds
        self._samples += num_samples
        self._loss += result.loss * num_samples
        report.training_loss = self._loss / max(self._samples, 1)
        report.frozen, report.length = shape["frozen"], shape["length"]
        report.replicas = shape["replicas"]

    def saved_line(self) -> str:
        """Write what the run took and saved; "" where nothing was frozen."""
        return self._saved.line(self.report.seconds, self.report.cache_hits_of_others)

    def add_change(self, change: Change) -> float:
        """Count a decision and its transition; return the seconds of deciding alone."""
        before = change.before
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
            key: sum(spent.get(key, 0.0) for spent in gathered) / len(gathered)
            for key in sorted({key for spent in gathered for key in spent})
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
        """Return rank 0's part of the unfinished epoch and of steps' times, as plain values."""
        sums = {"samples": self._samples, "loss": self._loss}
        return {"spent": dict(self._spent), **sums, "saved": self._saved.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the epoch of `state_dict`, with rank 0's times on every rank."""
        self._spent = defaultdict(float, state["spent"])
        self._samples, self._loss = state["samples"], state["loss"]
        if "saved" in state:  # Older ones lack it.
            self._saved.load_state_dict(state["saved"])
