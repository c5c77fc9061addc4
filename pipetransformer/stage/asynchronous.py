"""Train a stage of a pipeline that starts the next step while earlier ones are in flight.

With `stage_workers` that is PipeDream's pipeline: a stage's workers take a stream's micro-batches
in turn, and each keeps the weight versions that its own are in flight with. They sum their
gradients and update together, so all hold the same weights. As published, a stage of n workers
updates after every n micro-batches; here all stages do once a step. Two workers and one, three
steps of two micro-batches; an update follows each step's last backward on a worker:

    stage 0.0  F0 F2 .. B0 F4 .. .. B2 .. .. .. B4 .. ..
    stage 0.1  F1 F3 .. .. .. B1 F5 .. .. B3 .. .. .. B5
    stage 1    .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 ..

    updates before the forwards   stage 0  0 0 0 0 1 1     stage 1  0 0 1 1 2 2

A micro-batch's number alone says which version it meets (`VERSION_RULES`), never a rank's speed.
Losses, weights and optimizer state are, up to the order of float sums, those of a plain loop that
takes each micro-batch's gradient at these versions; tests compare with one.

Steps between two pauses (a decision, an evaluation, a checkpoint, the end of an epoch) are one
stream. At its end the pipeline runs empty, and ranks exchange the losses, norms and refusals of
all its steps: a message for each step would make every stage wait for the slowest.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from autocache import CacheStats
from autodp import gather_json
from autopipe.engine import Payload, StageReport, StageRun, StageWork
from autopipe.loss import mean_of
from autopipe.schedule import Instruction, Op, StageProgram, replicated_one_f_one_b, schedule_of
from autopipe.stashing import StagePlace, StashedWork, check_versions
from pipetransformer.errors import NonFiniteError
from pipetransformer.feed import ComingStep, Rows
from pipetransformer.stage.stage import Stage
from pipetransformer.stage.step_result import StepNumbers, StepResult, StepSums
from pipetransformer.stage.work import TrainWork


class _StreamWork(StageWork):
    """Give each micro-batch of a stream to its step's work.

    Args:
        work_of: starts a step's work, by its place in the stream; called once a step, in order.
        num_micro_batches: of a step.
    """

    def __init__(self, work_of: Callable[[int], TrainWork], num_micro_batches: int) -> None:
        self._work_of, self._num_micro_batches = work_of, num_micro_batches
        self._under_way: dict[int, TrainWork] = {}

    def first_input(self, micro_batch: int) -> Payload:
        work, own = self._of(micro_batch)
        return work.first_input(own)

    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        work, own = self._of(micro_batch)
        return work.forward(own, inputs)

    def finish(self, micro_batch: int, outputs: Payload) -> Tensor:
        work, own = self._of(micro_batch)
        return work.finish(own, outputs)

    def take(self, number: int) -> TrainWork:
        """Return, and forget, the work of a step that is done."""
        work, _ = self._of(number * self._num_micro_batches)
        del self._under_way[number]
        return work

    def _of(self, micro_batch: int) -> tuple[TrainWork, int]:
        number, own = divmod(micro_batch, self._num_micro_batches)
        if number not in self._under_way:
            self._under_way[number] = self._work_of(number)
        return self._under_way[number], own


class AsynchronousStage(Stage):
    """Train by asynchronous 1F1B.

    Raises:
        ValueError: the versions asked for cannot be kept with so few micro-batches, or a stage's
            workers would not get equally many of each step.
    """

    def train_stream(self, steps: Sequence[ComingStep], rows: Rows) -> deque[StepResult]:
        """Train on the global batches of several steps, of one size and one epoch. Collective.

        Raises:
            ValueError: on every rank: the model was changed between two steps, or the loss is a
                sum over a count that differs from the samples, or depends on how the batch is
                split.
            NonFiniteError: a loss or gradient was not finite in some step.
            PeerError: a rank is gone, or silent for longer than a step may take.
        """
        self._check_versions(steps)
        start, intrusion = time.perf_counter(), self._begin_step()
        sizes = self._cut.sizes(len(self.share.slice_of(steps[0].ids)[0]))
        told: list[StepSums] = []
        data_s: list[float] = []
        stats: list[CacheStats] = []

        def work_of(number: int) -> TrainWork:
            following = steps[number + 1].ids if number + 1 < len(steps) else None
            return self._begin_work(steps[number], rows, following, number * len(sizes))

        def update(number: int) -> None:
            work = stream.take(number)
            data_s.append(work.spent_s["data"])
            told.append(self._update_once(steps[number], work))
            stats.append(work.stats)

        report = StageReport(0.0, 0.0, 0)
        stream = _StreamWork(work_of, max(1, len(sizes)))
        if sizes:
            report = self._run_stream(stream, sizes, len(steps), update)
        else:
            # A replica without samples only joins in the sums over the replicas.
            told = [self._update_once(coming, None) for coming in steps]
            stats = [CacheStats()] * len(steps)
        wrong = intrusion or self._watch.find_written(trained=False)
        # What was found once in the whole stream is told with its last step.
        told[-1] = replace(told[-1], wrong=bool(wrong))
        # A rank without samples waits for the whole stream.
        summed = self._wiring.sums_of([one.as_list() for one in told], patience=len(told))
        sums = [StepSums(*row) for row in summed]
        total_s = time.perf_counter() - start
        self._refusals.check(sums, wrong, first_step=steps[0].step)
        self._check_stream(steps, sums, rows)
        return _results(sums, stats, report, total_s=total_s, data_s=sum(data_s))

    def ask_for_stop(self, result: StepResult, *, stops: bool) -> StepResult:
        """Return a stream's last result with whether any rank wants the run to end. Collective.

        No step of a stream carries the ranks' wishes, as those of a pipeline with flushes do.
        """
        numbers = result.numbers
        assert isinstance(numbers, StepNumbers)
        num_asking = sum(gather_json(stops, group=self._world.group))
        sums = replace(numbers.sums, stops=num_asking)
        return replace(result, numbers=replace(numbers, sums=sums))

    def _check_versions(self, steps: Sequence[ComingStep]) -> None:
        """Refuse, on all ranks alike, too few micro-batches for the versions or the workers."""
        if len(steps) == 1:
            return
        slices = self._cut.slices(len(steps[0].ids))
        fewest = min(len(self._cut.sizes(num)) for num in slices if num)
        check_versions(self._versions, self._place(fewest))
        workers, turn = self.topology.workers, self.topology.common_turn
        if fewest % turn:
            raise ValueError(
                f"a step has {fewest} micro-batches for stages of {workers} workers, which take "
                "the stream's in turn; with weight_versions= let it have a multiple of "
                f"{turn}: set micro_batches, micro_batch_size or global_batch_size to that"
            )

    def _check_stream(
        self, steps: Sequence[ComingStep], told: Sequence[StepSums], rows: Rows
    ) -> None:
        """Refuse, on all ranks alike, steps whose numbers are bad, or counts not the samples'."""
        for coming, one in zip(steps, told, strict=True):
            if not (math.isfinite(one.loss) and math.isfinite(one.squares)):
                cause = self._refusals.cause_in_samples(self.share.slice_of(coming.ids)[0], rows)
                raise NonFiniteError(
                    f"step {coming.step}: the loss is {one.loss}, the gradient's squared norm "
                    f"{one.squares}, and later steps have trained on it; "
                    f"{cause or 'lower the learning rate'}"
                )
            if one.count != len(coming.ids):
                raise ValueError(
                    f"in step {coming.step} the loss counts {one.count:g} of "
                    f"{len(coming.ids)} samples; with weight_versions= a stage updates before it "
                    "could hear of that: use a mean over all samples"
                )

    @property
    def _versions(self) -> str:
        versions = self._task.config.weight_versions
        assert versions is not None
        return versions

    def _run_stream(
        self,
        stream: _StreamWork,
        sizes: tuple[int, ...],
        num_steps: int,
        update: Callable[[int], None],
    ) -> StageReport:
        work = StashedWork(
            stream,
            [
                *(self._task.model.sublayers[index].module for index in self.trained.indices),
                self._task.model.model,
            ],
            list(self.trained.parameters.values()),
            place=self._place(len(sizes)),
            versions=self._versions,
            update=update,
        )
        all_sizes = sizes * num_steps
        if self._wiring.side_in is not None:
            self._wiring.side_in.begin(all_sizes, self._wiring.turn.own(len(all_sizes)))
        program = self._program(num_steps, len(sizes))
        with self._compiled():
            report = StageRun(program, work, self._links, all_sizes).run()
        self._wiring.settle()
        for routes in self._wiring.side_out:
            routes.finish_step()
        return report

    def _place(self, num_micro_batches: int) -> StagePlace:
        workers = self.topology.workers
        return StagePlace(self.index, len(workers), num_micro_batches, workers)

    def _program(self, num_steps: int, num_micro_batches: int) -> StageProgram:
        """Return this rank's part of a stream, with an update after each step."""
        workers = self.topology.workers
        if num_steps == 1:
            # An epoch's last batch may leave a worker without a micro-batch; it updates all the
            # same, to keep its weights equal to its stage's.
            program = schedule_of("1f1b", workers, num_micro_batches)[self._worker]
            return (*program, Instruction(Op.UPDATE, num_micro_batches - 1))
        total = num_steps * num_micro_batches
        whole = replicated_one_f_one_b(workers, total, update_every=num_micro_batches)
        return whole[self._worker]

    def _update_once(self, coming: ComingStep, work: TrainWork | None) -> StepSums:
        """Update by a step's gradients; return what all ranks must hear of the step."""
        part = self.trained
        if part.reducer is not None:
            part.reducer.finish()
            part.reducer.own_gradients.clear()
        squares = float(part.signals.squared_norm())
        self._wiring.settle()
        if math.isfinite(squares):
            part.signals.add_gradients()
        part.update(coming)
        if work is None:  # The reducer has put the other workers' sum here: free it now.
            part.drop_gradients()
        part.signals.begin_step()
        sums = StepSums() if work is None else work.sums()
        return replace(sums, squares=squares if self.speaks_for_stage else 0.0)


def _results(
    told: Sequence[StepSums],
    stats: Sequence[CacheStats],
    report: StageReport,
    *,
    total_s: float,
    data_s: float,
) -> deque[StepResult]:
    """Return each step's result, with an equal part of the stream's seconds."""
    num = len(told)
    spent_s = {
        "compute": report.compute_s / num,
        "bubble": report.wait_s / num,
        "all_reduce": 0.0,
        "data": data_s / num,
    }
    results = deque[StepResult]()
    for one, own in zip(told, stats, strict=True):
        norm = math.sqrt(max(0.0, one.squares))
        numbers = StepNumbers(mean_of(one.loss, one.count), norm, False, one)
        results.append(StepResult(numbers, total_s / num, spent_s, own))
    return results
