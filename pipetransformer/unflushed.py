"""Train one stage of a pipeline that goes on to the next step while earlier ones are in flight.

Steps between two pauses (a decision, an evaluation, a checkpoint, the end of an epoch) are one
stream, behind which the pipeline runs empty. What all ranks must hear of a step, its loss, its
gradient's norm, what is wrong, they hear at the end of the stream: a message a step would make
every stage wait for the slowest.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autocache import CacheStats
from autopipe.engine import Payload, StageReport, StageWork, run_program
from autopipe.schedule import unflushed
from autopipe.stashing import StagePlace, StashedWork, check_versions
from pipetransformer.errors import NonFiniteError
from pipetransformer.feed import Rows
from pipetransformer.loss import mean_of
from pipetransformer.position import ComingStep
from pipetransformer.stage import (
    Stage,
    StepNumbers,
    StepResult,
    StepSums,
    TrainWork,
    broken_down,
)


class _StreamWork(StageWork):
    """Give each micro-batch of a stream to its step's work, which begins with its first one.

    Args:
        work_of: returns a step's work, by its place in the stream; called once each, in order.
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
        """Hand over the work of a step that is done."""
        return self._under_way.pop(number)

    def _of(self, micro_batch: int) -> tuple[TrainWork, int]:
        number, own = divmod(micro_batch, self._num_micro_batches)
        if number not in self._under_way:
            self._under_way[number] = self._work_of(number)
        return self._under_way[number], own


class UnflushedStage(Stage):
    """Train by asynchronous 1F1B.

    Raises:
        ValueError: the versions asked for cannot be kept with so few micro-batches.
    """

    def train_stream(self, steps: Sequence[ComingStep], rows: Rows) -> deque[StepResult]:
        """Train on the global batches of several steps, all of one size and one epoch.

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
            return self._train_work(
                steps[number], rows, following, first_micro_batch=number * len(sizes)
            )

        def update(number: int) -> None:
            work = stream.take(number)
            data_s.append(work.data_s)
            told.append(self._update_once(steps[number], work))
            stats.append(work.stats)

        report = StageReport(0.0, 0.0, 0)
        stream = _StreamWork(work_of, max(1, len(sizes)))
        if sizes:
            report = self._run_stream(stream, sizes, len(steps), update)
        else:
            # A replica without samples has its part in the sums over the replicas alone.
            told = [self._update_once(coming, None) for coming in steps]
            stats = [CacheStats()] * len(steps)
        wrong = intrusion or self._watch.find_written(trained=False)
        told[-1] = replace(told[-1], wrong=bool(wrong))
        values = torch.tensor([one.as_list() for one in told], dtype=torch.float64)
        # A rank without samples waits for the whole stream.
        summed = self._sum_over_world(values.flatten().tolist(), patience=len(told))
        by_step = torch.tensor(summed, dtype=torch.float64).view_as(values)
        sums = [StepSums.of(row) for row in by_step.tolist()]
        total_s = time.perf_counter() - start
        self._refuse(sums, wrong, first_step=steps[0].step)
        self._check_stream(steps, sums, rows)
        return _results(sums, stats, report, total_s=total_s, data_s=sum(data_s))

    def _check_versions(self, steps: Sequence[ComingStep]) -> None:
        """Refuse, on all ranks alike, batches that have too few micro-batches somewhere."""
        slices = [num for num in self._cut.slices(len(steps[0].ids)) if num]
        fewest = min(len(self._cut.sizes(num)) for num in slices)
        if len(steps) > 1:
            check_versions(
                self._versions, num_stages=self.topology.length, num_micro_batches=fewest
            )

    def _check_stream(
        self, steps: Sequence[ComingStep], told: Sequence[StepSums], rows: Rows
    ) -> None:
        """Refuse, on all ranks alike, what a step should not have been trained on."""
        for coming, one in zip(steps, told, strict=True):
            if not (math.isfinite(one.loss) and math.isfinite(one.squares)):
                cause = self._cause_in_samples(coming, rows)
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
        length = self.topology.length
        work = StashedWork(
            stream,
            [
                *(self._task.model.sublayers[index].module for index in self._trained),
                self._task.model.model,
            ],
            list(self.parameters.values()),
            place=StagePlace(self.index, length, len(sizes)),
            versions=self._versions,
            update=update,
        )
        program = unflushed(length, num_steps, len(sizes))[self.index]
        if self._layers.side_in is not None:
            all_sizes = sizes * num_steps
            self._layers.side_in.begin(all_sizes, range(len(all_sizes)))
        report = run_program(program, work, self._links, sizes * num_steps)
        for routes in self._layers.side_out:
            routes.finish_step()
        return report

    def _update_once(self, coming: ComingStep, work: TrainWork | None) -> StepSums:
        """Update by a step's gradients; return what all are to hear of it."""
        if self._reducer is not None:
            self._reducer.finish()
            self._reducer.own_gradients.clear()
        squares = float(self.signals.squared_norm())
        if math.isfinite(squares):
            self.signals.add_gradients()
        self._update(coming, skipped=False)
        if work is None:  # Its gradients are the others', and stay until the next step's.
            for parameter in self.parameters.values():
                parameter.grad = None
        self.signals.begin_step()
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
    """Return what each step came to, with its equal part of the stream's seconds."""
    num = len(told)
    breakdown = broken_down(
        total_s / num,
        compute=report.compute_s / num,
        bubble=report.wait_s / num,
        all_reduce=0.0,
        data=data_s / num,
    )
    return deque(
        StepResult(
            StepNumbers(
                mean_of(one.loss, one.count), math.sqrt(max(0.0, one.squares)), skipped=False
            ),
            seconds=total_s / num,
            breakdown=breakdown,
            stats=own,
            cache_hits=int(one.hits),
            cache_misses=int(one.misses),
            cache_upgrades=int(one.upgrades),
        )
        for one, own in zip(told, stats, strict=True)
    )
