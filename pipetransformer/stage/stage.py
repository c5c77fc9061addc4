"""Train one stage of one replica: what a rank does between two transitions."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autodp import GradientReducer, Groups, Topology, mix_seed, waiting_for
from autopipe.engine import StageReport, StageRun
from autopipe.loss import SplitProbe, mean_of
from autopipe.plan import PipelinePlan
from autopipe.schedule import forward_only, schedule_of
from autopipe.trace import Recorder
from freeze.signals import IntervalSignals
from pipetransformer.errors import NonFiniteError
from pipetransformer.feed import ComingStep, Rows, SampleError, seed_torch
from pipetransformer.model import (
    LAYER,
    LossScale,
    Task,
    build_optimizer,
    in_mode,
    large_embeddings,
    modes_of,
    owned_parameters,
    set_modes,
    trained_parameters,
)
from pipetransformer.processes import World
from pipetransformer.stage.batch_cut import BatchCut, RankShare
from pipetransformer.stage.device_end import DeviceEnd, LateNumbers, where_in
from pipetransformer.stage.diagnosis import (
    Origin,
    StageWatch,
    before_the_step,
    first_cause,
    where_it_began,
)
from pipetransformer.stage.step_result import Numbers, StepNumbers, StepResult, StepSums
from pipetransformer.stage.tied_gradients import TiedGradients
from pipetransformer.stage.wiring import StageWiring
from pipetransformer.stage.work import (
    EvaluationWork,
    LayerWork,
    LookWork,
    MicroBatches,
    Results,
    TrainWork,
)

_LOGGER = logging.getLogger(__name__)


class Stage:
    """Hold a rank's links, optimizer and reducer for one plan.

    Attributes:
        index: which stage of its pipeline this rank is.
        share: which samples this rank reads.
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
        self.plan = plan
        self.topology = topology
        self._task = task
        self._world = world
        self._wiring = StageWiring(task, world, plan, topology, groups)
        self.index, self._timeout_s = self._wiring.index, self._wiring.timeout_s
        # Schedules count all workers of a pipeline, stage by stage.
        self._worker = sum(topology.workers[: self.index]) + topology.worker_of(world.rank)
        self._groups, self._loss_scale = groups, loss_scale
        self._cut = BatchCut(
            topology.replicas, plan.num_micro_batches, task.config.micro_batch_size
        )
        self._trained = self._wiring.indices
        self.share = RankShare(self._cut, self._wiring.replica, self._wiring.turn)
        self._links = self._wiring.links()
        self.parameters = trained_parameters(task, self._trained)
        self._compiled = task.compiled(self._trained)
        self.optimizer = build_optimizer(task, self.parameters)
        self.signals = IntervalSignals(
            {task.model.sublayers[i].name: owned_parameters(task, i) for i in self._trained},
            task.signals,
        )
        # Stage 0 holds the frozen prefix, which nothing may write into either.
        prefix = range(plan.boundaries[0] if self.index == 0 else 0)
        self._modes = modes_of(task.model, self._trained, training=True)
        self._evaluation_modes = modes_of(task.model, self._trained, training=False)
        self._watch = StageWatch(task, prefix, self._trained)
        self._probe, self._evaluation_probe = SplitProbe(task.loss_fn), SplitProbe(task.loss_fn)
        self._device_end = self._end_for_device()
        self._unread: tuple[LateNumbers, MicroBatches] | None = None
        self._ended = ""
        self._has_unseen = False
        self._reducer: GradientReducer | None = None
        self._ties = TiedGradients(task, self._wiring, plan, self.parameters)
        if self._groups.stage is not None and self.parameters:
            self._reducer = GradientReducer(
                [p for p in self.parameters.values() if p.requires_grad],
                self._groups.stage,
                tables=self._tables(),
                on_one_node=topology.is_on_one_node(topology.stage_ranks(self.index)),
            )

    def _end_for_device(self) -> DeviceEnd | None:
        """Return what ends steps on a run's only GPU; None where the host must decide."""
        config, optimizer = self._task.config, self.optimizer
        is_alone = self._world.size == 1 and self._world.device.type == "cuda"
        host_decides = self._loss_scale.is_dynamic or config.weight_versions is not None
        if not is_alone or host_decides or not DeviceEnd.fits(optimizer, self.signals):
            return None
        assert optimizer is not None
        return DeviceEnd(
            optimizer,
            self.signals,
            self.parameters,
            max_grad_norm=config.max_grad_norm,
            keeps_bad=config.on_nonfinite == "raise",
        )

    def _tables(self) -> list[nn.Parameter]:
        """Return the large embeddings' weights: replicas sum the touched rows alone."""
        model, device = self._task.model, self._world.device
        used = Counter(name for i in self._trained for name in model.tensors(i))
        modules = (model.sublayers[i].module for i in self._trained)
        weights = {table.weight for one in modules for table in large_embeddings(one, device)}
        # A tied table is the head's matrix, too, whose gradient has all rows.
        return [
            parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad and parameter in weights and used[name] == 1
        ]

    def close(self) -> None:
        """Free the stage's own memory, even if the stage itself is kept."""
        self.end_training()
        for parameter in self.parameters.values():
            parameter.grad = None
        self.parameters, self.optimizer, self.signals = {}, None, IntervalSignals({})
        self._device_end = self._unread = None

    def end_training(self) -> None:
        """Take the hooks off parameters, for others to train them; the stage still evaluates."""
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None

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
            NonFiniteError: a loss or gradient is not finite, with on_nonfinite="raise"; on a run's
                only GPU a step late, with the weights from before that step.
            PeerError: a rank is gone, or silent for longer than a step may take.
        """
        start, looks = time.perf_counter(), looks or self._world.size > 1
        if self._ended:  # The device holds back all updates from then on.
            raise NonFiniteError(self._ended)
        intrusion = self._begin_step(looks=looks)
        work = self._train_work(coming, rows, next_ids)
        self._bring_samples(work)
        report = StageReport(0.0, 0.0, 0)
        if work.batches.sizes:  # Else this replica has no samples.
            arm = None if self._reducer is None else self._reducer.arm
            with self._compiled():
                report = self._launch(work, recorder).run(before_last_backward=arm)
            work.finish_step()
            report = self._with_kernels(report, recorder)
        wrong = intrusion or (self._watch.find_written() if looks else "")
        self._has_unseen = not looks
        spent_s = {
            "compute": report.compute_s,
            "bubble": report.wait_s,
            "all_reduce": 0.0,
            "data": work.data_s,
        }
        end_step = self._end_step if self._device_end is None else self._end_on_device
        numbers, sums = end_step(coming, work, spent_s, wrong=wrong, stops=stops)
        seconds = time.perf_counter() - start
        return StepResult.of(numbers, sums, work.stats, seconds=seconds, spent_s=spent_s)

    def settle(self) -> None:
        """Look at what steps have left out; wait for the last one's numbers. Raise as they do."""
        if self._has_unseen:
            self._has_unseen = False
            if wrong := self._watch.find_written(trained=False) or self._watch.begin():
                raise ValueError(wrong)
        self._read_numbers()

    def _read_numbers(self) -> None:
        """Wait for the last step's numbers; raise as `train_step` where these are not finite."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._refuse_bad(*unread)

    def _end_step(
        self,
        coming: ComingStep,
        work: TrainWork,
        spent_s: dict[str, float],
        *,
        wrong: str,
        stops: bool,
    ) -> tuple[Numbers, StepSums]:
        """Sum over all ranks, update, and add to the seconds spent. Collective."""
        start = time.perf_counter()
        was_early = self._reducer is not None and self._reducer.was_early
        # What one rank finds wrong must end all ranks alike: a rank that raised by itself would
        # leave the others waiting.
        own = work.sums(early=was_early, wrong=bool(wrong), stops=stops)
        is_alone = self._world.group is None
        sums = own if is_alone else StepSums.of(self._sum_over_world(own.as_list()))
        if self._reducer is not None:
            self._reducer.finish(again=sums.early > 0)
        self._ties.sum()
        reduce_s = time.perf_counter() - start
        self._refuse([sums], wrong, first_step=coming.step)
        loss, norm = self._finish_gradients(sums, len(coming.ids))
        skipped = self._must_skip(coming.step, loss, norm, work)
        if self._reducer is not None:
            self._reducer.own_gradients.clear()
        self._update(coming, skipped=skipped)
        # A spare has nothing to sum: it waits.
        spent_s["bubble" if self._wiring.is_spare else "all_reduce"] += reduce_s
        return StepNumbers(loss, norm, skipped), sums

    def _end_on_device(
        self,
        coming: ComingStep,
        work: TrainWork,
        spent_s: dict[str, float],
        *,
        wrong: str,
        stops: bool,
    ) -> tuple[Numbers, StepSums]:
        """Launch the update, wait for the step before, and add to the seconds spent."""
        start = time.perf_counter()
        assert self._device_end is not None
        found = work.findings(wrong=bool(wrong), stops=stops)
        self._refuse([found], wrong, first_step=coming.step)
        late = self._device_end.finish(coming.step, work.losses, len(coming.ids))
        self._update(coming, skipped=False)
        self._read_numbers()
        self._unread = late, work.batches
        spent_s["compute"] += time.perf_counter() - start  # The wait is for the GPU.
        return late.numbers, found

    def _begin_step(self, *, looks: bool = True) -> str:
        """Prepare the modules for a step; say what the user has changed since the last, or ""."""
        # Freed right before the forward, gradients leave their memory to its activations.
        for parameter in self.parameters.values():
            parameter.grad = None
        set_modes(self._modes)
        self.signals.begin_step()
        return self._watch.begin() if looks else ""

    def _train_work(
        self,
        coming: ComingStep,
        rows: Rows,
        next_ids: Tensor | None,
        first_micro_batch: int | None = None,
    ) -> TrainWork:
        """Return what this rank computes of a global batch."""
        own, first = self.share.slice_of(coming.ids)
        following = None if next_ids is None else self.share.read_of(next_ids)
        return TrainWork(
            self._wiring,
            MicroBatches(own, self._cut.sizes(len(own)), rows, following, first_micro_batch),
            step=coming.step,
            first_sample=first,
            divisor=len(coming.ids) / self._loss_scale.value,
            probe=self._probe,
        )

    def _bring_samples(self, work: LayerWork) -> None:
        """Read a work's samples on stage 0; elsewhere wait for the header of what it will send."""
        start, batches, own_ids = time.perf_counter(), work.batches, work.own_ids()
        side_in = self._wiring.side_in
        if self.index == 0 and len(own_ids):
            # All at once: single micro-batches would fill few of the frozen prefix's chunks.
            try:
                whole = batches.rows.fetch(own_ids)
            except SampleError as error:
                raise SampleError(f"{work.where}{error}") from error
            if batches.next_ids is not None and len(batches.next_ids):
                batches.rows.read_ahead(batches.next_ids)
            work.take(whole)
        elif side_in is not None and batches.first is None:  # A stream has begun for all steps.
            side_in.begin(batches.sizes, work.own)
        work.data_s += time.perf_counter() - start

    def _refuse(self, steps: Sequence[StepSums], wrong: str, *, first_step: int) -> None:
        """Refuse to go on, on all ranks alike.

        Args:
            steps: what all ranks told of one step or several.
            wrong: what this rank found wrong, or "".
        """
        if any(one.split for one in steps):
            self._probe.refuse()
        if any(one.wrong for one in steps):
            raise ValueError(wrong or "another rank refuses to go on; it says why")
        # A later batch may have nothing to learn from.
        if first_step == 0 and not any(one.trained for one in steps):
            raise ValueError(
                f"the loss {self._task.loss_fn.name!r} has no gradient by the model's output, and "
                "nothing would train; do not detach it"
            )

    def evaluate(self, num_samples: int, rows: Rows, results: Results) -> None:
        """Collect the results of this replica's share of the examples 0..num_samples-1."""
        probe = self._evaluation_probe
        with torch.no_grad(), in_mode(self._evaluation_modes):
            # Ranks meet in each round, so a spare, or a replica without examples, never waits for
            # longer than a round takes. All count the largest replica's rounds.
            for ids in self.rounds(num_samples):
                differs = False
                if len(ids):
                    batches = MicroBatches(ids, self._cut.sizes(len(ids)), rows)
                    work = EvaluationWork(self._wiring, batches, results=results, probe=probe)
                    self._run_forwards(work)
                    differs = probe.finds_difference()
                if any(self._sum_over_world([float(differs)])):
                    probe.refuse()

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

    def _run_forwards(self, work: LayerWork) -> None:
        self._bring_samples(work)
        sizes = work.batches.sizes
        program = forward_only(self.topology.workers, len(sizes))[self._worker]
        StageRun(program, work, self._links, sizes).run()
        work.finish_step()

    def _launch(self, work: TrainWork, recorder: Recorder | None) -> StageRun:
        """Return the schedule of a step's micro-batches, ready to run."""
        workers, sizes = self.topology.workers, work.batches.sizes
        program = schedule_of(self.plan.schedule, workers, len(sizes))[self._worker]
        return StageRun(program, work, self._links, sizes, recorder=recorder)

    def _with_kernels(self, report: StageReport, recorder: Recorder | None) -> StageReport:
        """Return a report in which the wait for the GPU's kernels is part of computing."""
        on_cuda = self._world.device.type == "cuda"
        if not on_cuda or (self._device_end is not None and recorder is None):
            return report
        start = time.perf_counter()
        torch.cuda.current_stream().synchronize()
        return replace(report, compute_s=report.compute_s + time.perf_counter() - start)

    def _finish_gradients(self, sums: StepSums, num_samples: int) -> tuple[float, float]:
        """Scale the gradients to the mean's, measure and clip them; return (mean loss, norm)."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        correction = (num_samples / sums.count if sums.count else 1.0) / self._loss_scale.value
        if correction != 1 and gradients:
            torch._foreach_mul_(gradients, correction)
        squared = self.signals.squared_norm(self._sum_over_pipeline)
        # NaN >= 0 is false; math.sqrt would raise for a negative sum.
        norm = math.sqrt(value) if (value := float(squared)) >= 0 else math.nan
        if math.isfinite(norm):
            self.signals.add_gradients()
        limit = self._task.config.max_grad_norm
        if limit is not None and norm > limit and gradients:
            # The same factor as torch.nn.utils.clip_grad_norm_ has.
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        return mean_of(sums.loss, sums.count), norm

    def _must_skip(self, step: int, loss: float, norm: float, work: TrainWork) -> bool:
        """Tell whether all ranks skip the step; raise where it ends the run. Collective."""
        scale = self._loss_scale
        if math.isfinite(loss) and math.isfinite(norm):
            scale.note_good_step()
            return False
        what = f"step {step}: the loss is {loss}, the gradient's norm {norm}"
        if not scale.explains(loss, norm):
            origin = where_it_began(
                self._task,
                self._world,
                self._trained,
                loss=work.loss_sum,
                reducer=self._reducer,
                before=self._before(step, work.batches),
            )
            self._report_nonfinite(what, origin)
            return True
        if self._world.is_main:
            text = "%s at a loss scale of %g, which is halved: the step is skipped on all ranks"
            _LOGGER.info(text, what, scale.value)
        scale.shrink()
        return True

    def _before(self, step: int, batches: MicroBatches) -> Origin | None:
        """Say what was not finite before a step: the samples, or weights that were given."""
        own = range(0 if self.index == 0 else self._trained.start, self._trained.stop)
        ids = batches.ids if self.index == 0 else batches.ids[:0]
        return before_the_step(self._task, own if step == 0 else (), rows=batches.rows, ids=ids)

    def _cause_in_samples(self, coming: ComingStep, rows: Rows) -> str:
        """Say what is not finite in a step's samples, and what to do, or "". Collective."""
        own, _ = self.share.slice_of(coming.ids)
        ids = own if self.index == 0 else own[:0]
        before = before_the_step(self._task, (), rows=rows, ids=ids)
        cause = first_cause(before, self._world)
        return f"{cause.where}. {cause.advice}" if cause else ""

    def _refuse_bad(self, late: LateNumbers, batches: MicroBatches) -> None:
        """Raise, or warn, where a step's numbers are not finite; waits for them."""
        loss, norm, skipped, *_ = values = late.wait()
        if skipped:
            what = f"step {late.step}: the loss is {loss}, the gradient's norm {norm}"
            where = where_in(values, self.signals.part_names)
            if self._task.config.on_nonfinite == "raise":
                self._ended = (
                    f"{what}, and the run ended there; resume from a checkpoint, or start another "
                    "Trainer, perhaps with on_nonfinite='skip'"
                )
            self._report_nonfinite(what, self._before(late.step, batches) or Origin(where))

    def _report_nonfinite(self, what: str, origin: Origin) -> None:
        """Say where a number that is not finite began: raise, or warn on rank 0."""
        if self._task.config.on_nonfinite == "raise":
            raise NonFiniteError(f"{what}; {origin.where}. {origin.advice}")
        if self._world.is_main:
            _LOGGER.warning("%s; %s: the step is skipped on all ranks", what, origin.where)

    def _update(self, coming: ComingStep, *, skipped: bool) -> None:
        if self.optimizer is None:
            return
        if not skipped:
            factors: dict[int | None, float] = {}
            for group in self.optimizer.param_groups:
                layer = group.get(LAYER)
                if layer not in factors:
                    factors[layer] = coming.learning_rate_factor(layer)
                group["lr"] = group["initial_lr"] * factors[layer]
            # An optimizer that rounds stochastically must do so alike on all replicas.
            seed = mix_seed(self._task.config.seed, coming.step, self.index)
            seed_torch(seed, self._world.device)
            self.optimizer.step()

    def _sum_over_world(self, values: list[float], *, patience: int = 1) -> list[float]:
        if self._world.group is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        self._all_reduce(total, "their part of the loss", patience=patience)
        return total.tolist()

    def _all_reduce(self, values: Tensor, what: str, *, patience: int = 1) -> None:
        """Add up all ranks' values on the CPU; wait at most for `patience` steps."""
        with waiting_for(what, self._world.group):
            work = dist.all_reduce(values, group=self._world.group, async_op=True)
            # The world's group itself allows for the longer waits of a transition.
            work.wait(timedelta(seconds=patience * self._timeout_s))

    @property
    def speaks_for_stage(self) -> bool:
        """Tell whether this rank is the first of those that hold the same stage."""
        return self._wiring.replica == self._wiring.turn.number == 0

    def _sum_over_pipeline(self, value: Tensor) -> Tensor:
        """Add up the stages' values, as their first ranks hold them."""
        if self._world.group is None:
            return value
        # The ranks of a stage hold equal gradients after the reducer's sum, so one counts for all.
        own = value.to("cpu") if self.speaks_for_stage else torch.zeros((), dtype=value.dtype)
        self._all_reduce(own, "their part of the gradient's norm")
        return own.to(value.device)
