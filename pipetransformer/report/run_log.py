"""Turn a run's steps and events into records, progress, and one line for every transition.

What they add up to is in run_sums.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autodp import Topology
from autopipe.trace import as_bytes
from freeze import FreezeContext
from pipetransformer.checkpoint import Saved
from pipetransformer.config import TrainConfig
from pipetransformer.elastic import Change, Decision
from pipetransformer.feed import Clock, RowBudget, may_lie_on_gpus
from pipetransformer.processes import World, on_rank_0
from pipetransformer.report.fit_report import nothing_frozen_line
from pipetransformer.report.progress import Progress
from pipetransformer.report.records import RecordListener, Records, decision_fields
from pipetransformer.report.run_sums import RunSums
from pipetransformer.stage import StepResult

_LOGGER = logging.getLogger(__name__)


class RunLog:
    """Write and show a run's course on rank 0.

    Args:
        freezes: whether the policy may freeze something.
    Attributes:
        sums: what the run adds up to, on every rank.
        report: the sums' part for users.
    """

    def __init__(self, world: World, config: TrainConfig, *, freezes: bool) -> None:
        self._world, self._config, self._freezes = world, config, freezes
        self._records: Records | None = None
        self._listener: RecordListener | None = None
        self._progress = Progress(is_shown=config.progress and world.is_main, label=config.label)
        self._is_finished = False
        self._num_done = 0
        self._accuracy = "-"
        self._changed_step = 0
        self._has_frozen, self._num_asked = False, 0
        self._last_asked: tuple[int, str, FreezeContext] | None = None
        self._described: tuple[Decision, dict[str, int]] | None = None
        self.sums = RunSums(world)
        self.report = self.sums.report

    def listen(self, listener: RecordListener) -> None:
        """Call a listener with rank 0's records; comes before `open`."""
        self._listener = listener

    def open(self, verified: str, warnings: Sequence[str]) -> None:
        """Open the records with what the checks have found; seconds count from now on. Collective.

        Args:
            verified: how a recorded model equals its own forward, or "".
            warnings: sentences for the user.
        """
        self._records = on_rank_0(self._open, group=self._world.group)
        if verified:
            self._record("verified", 0, how=verified)
        for warning in warnings if self._world.is_main else ():
            _LOGGER.warning(warning)

    def _open(self) -> Records | None:
        folder, tensorboard = self._config.folder, self._config.tensorboard
        if folder is None and self._listener is None:
            return None
        path = None if folder is None else Path(folder)
        return Records(path, listener=self._listener, tensorboard=tensorboard)

    def start(
        self,
        clock: Clock,
        *,
        rows: RowBudget,
        saved_share: float | None = None,
        unused: Sequence[str],
    ) -> None:
        """Begin to show progress.

        Args:
            clock: of the coming step.
            rows: that a node's cache will have.
            saved_share: of all epochs, by rows; None where that is not known.
            unused: columns of the training set that the model does not take.
        """
        self._num_done = clock.step
        if unused:
            self.say(f"columns that the model does not take: {', '.join(unused)}")
        if rows.num_samples:
            self.say(_cache_text(rows, self._config, self._world, saved_share))
        self._progress.open(clock.step, clock.max_steps)

    def say(self, line: str) -> None:
        """Write a line on rank 0, beside the bar or in the log; "" writes nothing."""
        if line and self._world.is_main:
            self._progress.say(line)

    def finish(self) -> None:
        """Show that the run is over, maybe before its last epoch, with its closing lines."""
        if self._is_finished:
            return
        self._is_finished = True
        self._record("end", self._num_done)
        self.say(self.sums.saved_line())
        has_frozen = self._has_frozen or any(one["frozen"] for one in self.report.transitions)
        if self._freezes and not has_frozen and self._last_asked is not None:
            self.say(nothing_frozen_line(self._num_asked, *self._last_asked))
        self._progress.close(is_whole=True)

    def stop_showing(self) -> None:
        """Leave the bar on the terminal, wherever the run is."""
        self._progress.close(is_whole=False)

    def close(self) -> None:
        """Close the records, and leave the bar on the terminal."""
        self.stop_showing()
        if self._records is not None:
            self._records.close()
        self._records = None

    def step(
        self, result: StepResult, *, decision: Decision, clock: Clock, num_samples: int
    ) -> None:
        """Record a training step; the clock is of that step."""
        self._num_done = clock.step + 1
        shape = self._shape(decision)
        self.sums.add_step(result, decision, shape, num_samples)
        if self._config.cache_keep and clock.epoch == 0:
            self.report.cache_hits_of_others += result.cache_hits - result.cache_ahead
        if self._records is not None:
            self._records.log(
                "step",
                clock.step,
                epoch=clock.epoch,
                samples=num_samples,
                learning_rate=clock.learning_rate,
                loss=result.loss,
                seconds=result.seconds,
                **shape,
                cache_hits=result.cache_hits,
                cache_misses=result.cache_misses,
                cache_upgrades=result.cache_upgrades,
                gradient_norm=result.gradient_norm,
            )
        fields = partial(self._fields, result, shape, clock.epoch, num_samples)
        self._progress.show(clock.step + 1, clock.max_steps, fields)

    def _fields(
        self, result: StepResult, shape: Mapping[str, int], epoch: int, num_samples: int
    ) -> dict[str, str]:
        """Return what the bar says of a step."""
        every, upgrades = result.cache_hits + result.cache_misses, result.cache_upgrades
        part = f" ({upgrades / every:.0%} in part)" if upgrades else ""
        return {
            "epoch": str(epoch),
            "loss": f"{result.loss:.3f}",
            "acc": self._accuracy,
            "frozen": str(shape["frozen"]),
            **self._pipeline_fields(shape),
            "samples/s": f"{num_samples / result.seconds:.0f}",
            "hits": f"{result.cache_hits / max(every, 1):.0%}{part}",
        }

    def change(self, change: Change) -> None:
        """Record a decision and its transition between two steps."""
        decision, before = change.decision, change.before
        self._has_frozen |= bool(decision.num_frozen or decision.resting)
        deciding_s = self.sums.add_change(change)
        if change.context is not None:
            self._num_asked += 1
            self._last_asked = decision.step, decision.reason, change.context
            if self._records is not None:
                self._record_decision(change, change.context, deciding_s)
        if change.is_transition:
            topology = self._topology(decision)
            if topology.spares and (before is None or before.plan.length != topology.length):
                self._warn_of_spares(topology)
            self._record_transition(change)

    def _record_decision(self, change: Change, context: FreezeContext, seconds: float) -> None:
        decision, before = change.decision, change.before
        num_steps = decision.step - before.step if before else 0
        seen = decision_fields(
            context,
            num_frozen=decision.num_frozen,
            reason=decision.reason,
            interval_s=num_steps * (change.step_before_s or 0.0),
        )
        more = {"look_seconds": change.look_s, "seconds": seconds}
        self._record(
            "decision", decision.step, **seen, **more, scales_batch=self._config.scale_batch
        )

    def _record_transition(self, change: Change) -> None:
        """Add a transition to the report and the records, and say it in a line."""
        decision, before, plan = change.decision, change.before, change.decision.plan
        shape, seconds = self._shape(decision), change.seconds
        entry: dict[str, Any] = {"step": decision.step, **shape, "seconds": seconds}
        if before:
            self.report.transitions.append(entry)
        self._changed_step = decision.step
        self._record(
            "transition",
            **entry,
            frozen_before=before.num_frozen if before else 0,
            boundaries=list(plan.boundaries),
            bytes_moved=change.bytes_moved,
            predicted_seconds=change.predicted_s,
            predicted_step_s=plan.predicted_step_s,
            predicted_step_before_s=before.plan.predicted_step_s if before else None,
            measured_step_before_s=change.step_before_s,
            resting=list(decision.resting),
            reason=decision.reason,
        )
        was = self._shape_text(before) if before else "start"
        cached = ", prefix cached" if decision.use_cache else ""
        now = f"{self._shape_text(decision)}{cached} in {seconds * 1e3:.0f} ms"
        self.say(f"step {decision.step}: {was} -> {now}")
        if change.confidence:
            self.say(f"step {decision.step}: {change.confidence}")

    def outcome(self, step: int, decision: Decision, measured_step_s: float) -> None:
        """Record the lasting time of steps after a transition, beside the predicted one."""
        self._record(
            "outcome",
            step,
            changed_step=self._changed_step,
            predicted_step_s=decision.plan.predicted_step_s,
            measured_step_s=measured_step_s,
        )

    def epoch(self, step: int, epoch: int, *, partial: bool = False) -> None:
        """Record an epoch that is over, or is partial as the run ends within it. Collective."""
        more = {"partial": True} if partial else {}
        self._record("epoch", step, epoch=epoch, **self.sums.of_epoch(), **more)
        if not partial:  # A resume goes on with a partial epoch's sums.
            self.sums.begin_epoch()

    def evaluation(self, step: int, epoch: int, metrics: dict[str, float], seconds: float) -> None:
        self.report.metrics, self.report.evaluated_at = metrics, step
        self._accuracy = f"{metrics['accuracy']:.3f}" if "accuracy" in metrics else "-"
        self._progress.correct("acc", self._accuracy)
        self._record("evaluation", step, epoch=epoch, seconds=seconds, **metrics)

    def checkpoint(self, saved: Saved | None) -> None:
        if saved is None or not saved.num_bytes:
            return
        seconds = {"seconds": saved.stopped_s, "written_s": saved.written_s}
        self._record("checkpoint", saved.step, **seconds, bytes=saved.num_bytes)

    def _record(self, kind: str, step: int, **fields: Any) -> None:
        if self._records is not None:
            self._records.log(kind, step, **fields)

    def _topology(self, decision: Decision) -> Topology:
        return self._world.topology(decision.plan.length)

    def _shape(self, decision: Decision) -> dict[str, int]:
        """Return the fields of a decision that records share."""
        # It is the same for many steps.
        if self._described is None or self._described[0] is not decision:
            shape = {
                "frozen": decision.num_frozen,
                "length": decision.plan.length,
                "replicas": self._topology(decision).replicas,
                "micro_batches": decision.plan.num_micro_batches,
            }
            self._described = decision, shape
        return self._described[1]

    def _pipeline_fields(self, shape: Mapping[str, int]) -> dict[str, str]:
        """Return the bar's fields of pipelines: none where one process has all layers."""
        if self._world.size == 1:
            return {}
        kxr = f"{shape['length']}x{shape['replicas']}"
        return {"KxR": kxr, "M": str(shape["micro_batches"])}

    def _shape_text(self, decision: Decision) -> str:
        if self._world.size == 1:
            num_micro_batches = decision.plan.num_micro_batches
            parts = f", in {num_micro_batches} parts" if num_micro_batches > 1 else ""
            again = ", recomputed" if decision.plan.recomputes else ""
            return f"frozen {decision.num_frozen}{parts}{again}"
        text = "frozen {frozen}, K x R = {length}x{replicas}, M = {micro_batches}"
        workers = self._topology(decision).workers
        shared = f", workers {'-'.join(map(str, workers))}" if max(workers) > 1 else ""
        versions = self._config.weight_versions
        schedule = decision.plan.manner + (f", {versions} weights" if versions else "")
        return f"{text.format(**self._shape(decision))}{shared} ({schedule})"

    def _warn_of_spares(self, topology: Topology) -> None:
        if self._world.is_main:
            _LOGGER.warning(
                "no pipeline that uses all %d processes is feasible: K x R = %d x %d train, and "
                "ranks %s stay idle; a higher memory_limit_bytes or max_replicas, or another "
                "number of processes, may change that",
                topology.num_ranks,
                topology.length,
                topology.replicas,
                ", ".join(map(str, topology.spares)),
            )


def _cache_text(
    rows: RowBudget, config: TrainConfig, world: World, saved_share: float | None
) -> str:
    if not rows.num_rows:
        return (
            f"no cache: cache_limit_bytes={config.cache_limit_bytes} has room for less than a "
            f"tenth of the rows of {rows.num_samples} samples"
        )
    folders = config.cache_folders
    on_gpus, free = may_lie_on_gpus(config, world), None
    text = f"the cache will have {rows} at most in "
    text += "GPUs' memory, and without room there in " if on_gpus else ""
    text += " and ".join(map(str, folders))
    if all(folder.is_dir() for folder in folders):
        free = sum(shutil.disk_usage(folder).free for folder in folders)
        text += f", where {as_bytes(free)} are free"
    if saved_share is not None:
        text += f"; this saves about {100 * saved_share:.0f} % of {config.epochs} epochs"
    if free is not None and rows.num_bytes > free and not on_gpus:
        text += (
            "; with room for less than a tenth nothing is cached: cache_limit_bytes=, "
            "cache_dtype= or another cache_folder= make it fit"
        )
    return text
