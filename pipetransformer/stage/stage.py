"""Train one stage of one replica: what a rank does between two transitions."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from autodp import Groups, Topology, gather_json
from autopipe.engine import StageReport, StageRun
from autopipe.loss import BatchMean, SplitProbe, mean_and_correction
from autopipe.plan import PipelinePlan
from autopipe.schedule import forward_only, schedule_of
from autopipe.trace import Recorder, Span, Trace
from pipetransformer.feed import ComingStep, Rows, SampleError
from pipetransformer.model import LossScale, Task, in_mode, modes_of, set_modes
from pipetransformer.processes import World
from pipetransformer.stage.batch_cut import BatchCut, RankShare
from pipetransformer.stage.device_end import DeviceEnd
from pipetransformer.stage.refusals import Refusals
from pipetransformer.stage.stage_watch import StageWatch
from pipetransformer.stage.step_end import HostEnd, StepEnd
from pipetransformer.stage.step_graphs import StepGraphs, tell_why_not
from pipetransformer.stage.step_result import StepResult
from pipetransformer.stage.trained_part import TrainedPart
from pipetransformer.stage.wiring import StageWiring
from pipetransformer.stage.work import (
    EvaluationWork,
    LayerWork,
    LookWork,
    MicroBatches,
    Results,
    TrainWork,
)


class Stage:
    """Hold what a rank does for one plan: its links, what it trains, and how a step ends.

    Attributes:
        index: which stage of its pipeline this rank is.
        share: which samples this rank reads.
        trained: the part of the model that this rank trains.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        plan: PipelinePlan,
        topology: Topology,
        groups: Groups,
        loss_scale: LossScale,
    ) -> None:
        self.plan, self.topology = plan, topology
        self._task, self._world, self._loss_scale = task, world, loss_scale
        self._wiring = wiring = StageWiring(task, world, plan, topology, groups)
        self.index, indices = wiring.index, wiring.indices
        # Schedules count all workers of a pipeline, stage by stage.
        self._worker = sum(topology.workers[: self.index]) + topology.worker_of(world.rank)
        self._cut = BatchCut(
            topology.replicas, plan.num_micro_batches, task.config.micro_batch_size
        )
        self.share = RankShare(self._cut, wiring.replica, wiring.turn)
        self._links = wiring.links()
        self.trained = TrainedPart(wiring)
        self._compiled = task.compiled(indices)
        # Stage 0 holds the frozen prefix, which nothing may write into either.
        prefix = range(plan.boundaries[0] if self.index == 0 else 0)
        self._modes = modes_of(task.model, indices, training=True)
        self._evaluation_modes = modes_of(task.model, indices, training=False)
        self._watch = StageWatch(task, prefix, indices)
        self._has_unseen = False
        self._probe = SplitProbe(task.loss_fn)
        self._has_evaluated = False
        self._refusals = Refusals(wiring, self._probe)
        self._end, self._later_end = self._step_ends()
        self._graphs = self._step_graphs()

    def _step_ends(self) -> tuple[StepEnd, StepEnd]:
        """Return what ends the first step, and later ones. Collective over NCCL.

        That is the device on GPUs that sum over NCCL, or one alone, unless the host must decide.
        """
        world, wiring, part = self._world, self._wiring, self.trained
        versions, everyone = self._task.config.weight_versions, wiring.groups.everyone
        host_decides = self._loss_scale.is_dynamic or versions is not None
        fits = not host_decides and DeviceEnd.fits(part)
        if everyone is not None:  # Stages may hold other tensors.
            fits = not any(wiring.sums_of([float(not fits)]))
        host = HostEnd(wiring, part, self._refusals, self._loss_scale)
        is_alone = world.size == 1 and world.device.type == "cuda" and part.optimizer is not None
        if not fits or not (is_alone or everyone):
            return host, host
        device = DeviceEnd(wiring, part, self._refusals)
        # A first step shows whether gradients grow after they were sent: the host sums them anew.
        return (device if is_alone else host), device

    def _step_graphs(self) -> StepGraphs | None:
        """Return what captures steps, if that is set, and can be."""
        task = self._task
        if not task.config.cuda_graph:
            return None
        if self._world.size > 1 or not isinstance(self._end, DeviceEnd):
            if self._world.is_main:
                tell_why_not(task.config, self._world.device, size=self._world.size)
            return None
        sublayers = [task.model.sublayers[index] for index in self._wiring.indices]
        return StepGraphs(
            self.trained,
            self._world.device,
            train=self._train_on_device,
            loss=self._loss_on_device,
            modules=[module for one in sublayers for module in one.module.modules()],
            repeats=bool(self._wiring.repeated),
        )

    def _train_on_device(self, work: TrainWork) -> Tensor:
        """Launch a whole step; return its numbers, see `LateNumbers`."""
        assert isinstance(self._end, DeviceEnd) and self.trained.optimizer is not None
        with self._compiled():
            self._launch(work, None).run()
        values = self._end.scaled(work)
        self.trained.optimizer.step()
        return values

    def _loss_on_device(self, work: TrainWork) -> Tensor:
        """Launch a step's forwards; return the mean loss, 0-dim."""
        with self._compiled():
            self._launch_forwards(work)
        loss, _ = mean_and_correction(*work.loss.sums(), work.loss.divisor)
        assert isinstance(loss, Tensor)
        return loss

    def close(self) -> None:
        """Free the stage's own memory, even if the stage itself is kept."""
        if self._graphs is not None:
            self._graphs.close()
        self.trained.close()

    def end_training(self) -> None:
        """Take the hooks off parameters, for others to train them; the stage still evaluates."""
        self.trained.end_training()

    def train_step(
        self,
        coming: ComingStep,
        rows: Rows,
        *,
        next_ids: Tensor | None = None,
        stops: bool = False,
        looks: bool = True,
        recorder: Recorder | None = None,
    ) -> StepResult:
        """Train on one global batch. Collective.

        Args:
            rows: gives stage 0 its samples.
            next_ids: the next global batch, where the same stages will train on it.
            stops: whether this rank asks to end the run.
            looks: whether to look for what was changed or written; else a later step does, or
                `settle`. One process alone may leave it out.
        Raises:
            ValueError: on every rank: a forward has written into its own parameters or buffers,
                the model was changed between two steps, or the loss has no gradient, or depends on
                how the batch is split.
            NonFiniteError: a loss or gradient is not finite, with on_nonfinite="raise". Where the
                device ends steps, `check` of the result raises this and most of the others.
            PeerError: a rank is gone, or silent for longer than a step may take.
        """
        start, looks = time.perf_counter(), looks or self._world.size > 1
        self._end.begin()
        intrusion = self._begin_step(looks=looks)
        work = self._begin_work(coming, rows, next_ids)
        report = self._replay(coming, work, is_usual=recorder is None and not intrusion)
        if report is None:
            # Sums over replicas go on beside the last backward, which completes the gradients.
            arm = None if self.trained.reducer is None else self.trained.reducer.arm
            draws = nullcontext() if self._graphs is None else self._graphs.note_draws(work)
            with draws, self._compiled():
                report = self._launch(work, recorder).run(before_last_backward=arm)
            work.finish_step()
            report = self._with_kernels(report, recorder)
        wrong = intrusion or (self._watch.find_written() if looks else "")
        self._has_unseen = not looks
        work.spent_s["compute"] += report.compute_s
        work.spent_s["bubble"] += report.wait_s
        numbers = self._end.finish(coming, work, wrong=wrong, stops=stops)
        self._end = self._later_end
        return StepResult(numbers, time.perf_counter() - start, work.spent_s, work.stats)

    def _replay(
        self, coming: ComingStep, work: TrainWork, *, is_usual: bool
    ) -> StageReport | None:
        """Run all of a step by a graph, unless something is to be noted of it; None if not."""
        if not work.batches.sizes:  # This replica has no samples.
            return StageReport(0.0, 0.0, 0)
        start = time.perf_counter()
        if self._graphs is None or not is_usual or self._probe.is_watching:
            return None
        has_run = self._graphs.run(work, coming)
        return StageReport(time.perf_counter() - start, 0.0, 1) if has_run else None

    def settle(self) -> None:
        """Look at what steps have left out, and raise as they do."""
        if self._graphs is not None:
            self._graphs.settle()
        if self._has_unseen:
            self._has_unseen = False
            if wrong := self._watch.find_written(trained=False) or self._watch.begin():
                raise ValueError(wrong)

    def _begin_step(self, *, looks: bool = True) -> str:
        """Prepare the modules for a step; say what the user has changed since the last, or ""."""
        self.trained.drop_gradients()
        set_modes(self._modes)
        self.trained.signals.begin_step()
        return self._watch.begin() if looks else ""

    def _begin_work(
        self, coming: ComingStep, rows: Rows, next_ids: Tensor | None, first: int | None = None
    ) -> TrainWork:
        """Return what this rank computes of a global batch, with its samples.

        Args:
            first: see `MicroBatches`.
        """
        own, first_sample = self.share.slice_of(coming.ids)
        self._probe.begin_step(in_first_epoch=coming.epoch == 0, starts_epoch=coming.starts_epoch)
        work = TrainWork(
            self._wiring,
            MicroBatches(own, self._cut.sizes(len(own)), rows, first),
            step=coming.step,
            first_sample=first_sample,
            loss=BatchMean(len(coming.ids), scale=self._loss_scale.value),
            probe=self._probe,
        )
        self._bring_samples(work, next_ids)
        return work

    def _bring_samples(self, work: LayerWork, next_ids: Tensor | None = None) -> None:
        """Read a work's samples on stage 0; elsewhere wait for the header of what it will send."""
        start, batches, side_in = time.perf_counter(), work.batches, self._wiring.side_in
        own_ids = self._wiring.turn.samples(batches.ids, batches.sizes)
        if self.index == 0 and len(own_ids):
            # All at once: single micro-batches would fill few of the frozen prefix's chunks.
            try:
                whole = batches.rows.fetch(own_ids)
            except SampleError as error:
                raise SampleError(f"{work.where}{error}") from error
            if next_ids is not None and len(ahead := self.share.read_of(next_ids)):
                batches.rows.read_ahead(ahead)
            work.take(whole)
        elif side_in is not None and batches.first is None:  # A stream has begun for all steps.
            side_in.begin(batches.sizes, work.own)
        work.spent_s["data"] += time.perf_counter() - start

    def evaluate(self, num_samples: int, rows: Rows, results: Results) -> None:
        """Collect the results of this replica's share of the examples 0..num_samples-1."""
        probe = SplitProbe(self._task.loss_fn)
        with torch.no_grad(), in_mode(self._evaluation_modes):
            # Ranks meet in each round, so a spare, or a replica without examples, never waits for
            # longer than a round takes. All count the largest replica's rounds.
            for ids in self.rounds(num_samples):
                differs = False
                if len(ids):
                    batches = MicroBatches(ids, self._cut.sizes(len(ids)), rows)
                    probe.begin_step(in_first_epoch=not self._has_evaluated)
                    work = EvaluationWork(self._wiring, batches, results=results, probe=probe)
                    self._run_forwards(work)
                    differs = probe.finds_difference()
                if any(self._wiring.sums_of([float(differs)])):
                    probe.refuse()
        self._has_evaluated = True

    def rounds(self, num_samples: int) -> list[Tensor]:
        """Return this replica's share of the examples 0..num_samples-1, in evaluation batches."""
        config = self._task.config
        return self.share.rounds(num_samples, config.eval_batch_size or config.global_batch_size)

    def look(self, ids: Tensor, rows: Rows) -> dict[int, Tensor]:
        """Return this stage's active layers' Gram matrices, (n, n) each, over n samples.

        Every replica runs all samples, in one micro-batch and without dropout.
        """
        if self._wiring.is_spare or self._wiring.turn.number:
            return {}  # Each stage's first worker takes the only micro-batch.
        with torch.no_grad(), in_mode(self._evaluation_modes):
            work = LookWork(self._wiring, MicroBatches(ids, (len(ids),), rows))
            self._run_forwards(work)
        return work.grams

    def gather_trace(self, trace: Trace) -> Trace:
        """Return what the first pipeline's stages did, on every rank. Collective."""
        # A stage of several workers is traced by its first.
        spans = [span.to_json() for span in trace.spans] if self.speaks_for_stage else []
        gathered = gather_json(spans, group=self._world.group)
        return Trace.of(Span.from_json(span) for spans in gathered for span in spans)

    def _run_forwards(self, work: LayerWork) -> None:
        self._bring_samples(work)
        self._launch_forwards(work)
        work.finish_step()
        self._wiring.settle()

    def _launch_forwards(self, work: LayerWork) -> None:
        sizes = work.batches.sizes
        program = forward_only(self.topology.workers, len(sizes))[self._worker]
        StageRun(program, work, self._links, sizes).run()

    def _launch(self, work: TrainWork, recorder: Recorder | None) -> StageRun:
        """Return the schedule of a step's micro-batches, ready to run."""
        workers, sizes = self.topology.workers, work.batches.sizes
        program = schedule_of(self.plan.schedule, workers, len(sizes))[self._worker]
        return StageRun(program, work, self._links, sizes, recorder=recorder)

    def _with_kernels(self, report: StageReport, recorder: Recorder | None) -> StageReport:
        """Return a report in which the wait for the GPU's kernels is part of computing."""
        on_cuda = self._world.device.type == "cuda"
        if not on_cuda or recorder is None:
            return report
        start = time.perf_counter()
        torch.cuda.current_stream().synchronize()
        return replace(report, compute_s=report.compute_s + time.perf_counter() - start)

    @property
    def speaks_for_stage(self) -> bool:
        """Return whether this rank is the first of those that hold the same stage."""
        return self._wiring.speaks_for_stage
