"""Compare our engine on process links to torch.distributed.pipelining, and to the bubble's bound.

One process a stage, over gloo on the loopback interface; the stages, their data and the loss are
the same for both, and so are the processes. Every process runs the same rounds; a round's action
begins and ends with a barrier.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from autopipe.engine import (
    Payload,
    Peer,
    ProcessLinkAbove,
    ProcessLinkBelow,
    Receiver,
    Sender,
    StageLinks,
    StageReport,
    StageRun,
    StageWork,
)
from autopipe.schedule import SCHEDULES
from experiments.benchmarks.engine.stage_copies import StageCopy
from experiments.benchmarks.engine.workloads import (
    Contestant,
    Encoder,
    MiniBatch,
    Results,
    loss_of,
    plain,
)
from experiments.benchmarks.measuring.processes import found_by
from experiments.benchmarks.measuring.rounds import Seconds, interleave
from pipetransformer.processes import connect

LONGEST_WAIT_S = 120.0
CPU = torch.device("cpu")
PEER_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True)
class ProcessRuns:
    """Say what the processes measure.

    Args:
        workload: an encoder of equal blocks.
        num_micro_batches: M.
        num_rounds: rounds that count.
    """

    workload: Encoder
    num_micro_batches: int
    num_rounds: int

    @property
    def limit_s(self) -> float:
        """Return the seconds after which the processes end themselves; a round takes about 8."""
        return 300.0 + 30.0 * self.num_rounds


@dataclass(frozen=True)
class ProcessResults:
    """Hold what the processes found.

    Args:
        seconds: of "ours gpipe", "theirs gpipe", "ours 1f1b" and "theirs 1f1b", of "plain", and
            of "alone" and "together", as `of_bubble_bound` takes them.
        peak_in_flight: by schedule, for each stage, the most micro-batches kept at once.
    """

    seconds: Seconds
    peak_in_flight: dict[str, list[int]]


class StackWork(StageWork):
    """Run a stage's layers on the micro-batches; the last stage adds up the loss."""

    def __init__(self, layers: nn.Module, parts: list[MiniBatch]) -> None:
        self._layers, self._parts = layers, parts
        self.loss = torch.zeros(())

    def first_input(self, micro_batch: int) -> Payload:
        return Payload((self._parts[micro_batch].input,))

    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        return Payload((self._layers(inputs.tensors[0]),))

    def finish(self, micro_batch: int, outputs: Payload) -> Tensor | None:
        (output,) = outputs.tensors
        assert output is not None
        loss = loss_of(output, self._parts[micro_batch].target) / len(self._parts)
        self.loss += loss.detach()
        return loss


def link_neighbours(rank: int, num_stages: int) -> StageLinks:
    """Link this rank to the ranks below and above."""
    group = dist.group.WORLD
    assert group is not None
    links = StageLinks()
    if rank > 0:
        peer = partial(Peer, rank - 1, group, timeout_s=LONGEST_WAIT_S)
        links.below = ProcessLinkBelow(
            Receiver(peer(1, "activations"), CPU), Sender(peer(2, "gradients"))
        )
    if rank < num_stages - 1:
        peer = partial(Peer, rank + 1, group, timeout_s=LONGEST_WAIT_S)
        links.above = ProcessLinkAbove(
            Sender(peer(1, "activations")), Receiver(peer(2, "gradients"), CPU)
        )
    return links


class Stage:
    """Train this rank's stage by our engine and by torch's.

    Args:
        model: the whole model; this rank trains its share of it.
        batch: the mini-batch, the same in every process.
        num_micro_batches: M.
    """

    def __init__(self, model: nn.Sequential, batch: MiniBatch, num_micro_batches: int) -> None:
        self.rank, self.num_stages = dist.get_rank(), dist.get_world_size()
        length = len(model) // self.num_stages
        self.layers = model[self.rank * length : (self.rank + 1) * length]
        self._batch, self._parts = batch, batch.split(num_micro_batches)
        self._links = link_neighbours(self.rank, self.num_stages)
        self.report: StageReport | None = None

    def ours(self, schedule: str) -> Contestant:
        """Train by `StageRun`."""
        sizes = [len(part.input) for part in self._parts]
        program = SCHEDULES[schedule](self.num_stages, len(self._parts))[self.rank]

        def step() -> Tensor:
            self.layers.zero_grad(set_to_none=True)
            work = StackWork(self.layers, self._parts)
            self.report = StageRun(program, work, self._links, sizes).run()
            return work.loss

        return Contestant(self.layers, step)

    def theirs(self, schedule: str) -> Contestant:
        """Train by torch.distributed.pipelining.

        The loss is divided by M as ours is: the peer's own scaling would pass over all gradients.
        """
        num_micro_batches = len(self._parts)
        stage = PipelineStage(self.layers, self.rank, self.num_stages, CPU)
        runner = PEER_SCHEDULES[schedule](
            stage,
            num_micro_batches,
            loss_fn=lambda output, target: loss_of(output, target) / num_micro_batches,
            scale_grads=False,
        )
        inputs = (self._batch.input,) if self.rank == 0 else ()
        target = self._batch.target if self.rank == self.num_stages - 1 else None

        def step() -> Tensor:
            self.layers.zero_grad(set_to_none=True)
            losses: list[Tensor] = []
            runner.step(*inputs, target=target, losses=losses)
            return torch.stack(losses).detach().sum() if losses else torch.zeros(())

        return Contestant(self.layers, step)


def results_of(contestant: Contestant) -> Results:
    """Take a step; the loss, which the last rank alone knows, comes to all."""
    results = Results.of(contestant)
    dist.all_reduce(results.loss)
    return results


def measure_on_this_rank(runs: ProcessRuns) -> ProcessResults:
    """Verify and measure, together with all other ranks; rank 0's seconds are the result.

    Raises:
        ResultsDifferError: a contestant's loss or gradients are not the plain model's.
    """
    model, batch = runs.workload.build(), runs.workload.mini_batch()
    base = plain(model, batch, runs.num_micro_batches)
    stage = Stage(model, batch, runs.num_micro_batches)
    expected = Results.of(Contestant(stage.layers, base.step))
    contestants: dict[str, Contestant] = {}
    peaks: dict[str, list[int]] = {}
    for schedule in PEER_SCHEDULES:
        ours, theirs = stage.ours(schedule), stage.theirs(schedule)
        for name, contestant in ((f"ours {schedule}", ours), (f"theirs {schedule}", theirs)):
            expected.verify(f"{name} on processes", results_of(contestant))
            contestants[name] = contestant
        peaks[schedule] = peaks_of_all(stage)
    return ProcessResults(time_rounds(runs, stage, contestants, base), peaks)


def peaks_of_all(stage: Stage) -> list[int]:
    """Return every stage's peak of micro-batches in flight in its last step by our engine."""
    assert stage.report is not None
    peaks = [0] * stage.num_stages
    dist.all_gather_object(peaks, stage.report.peak_in_flight)
    return peaks


def time_rounds(
    runs: ProcessRuns, stage: Stage, contestants: dict[str, Contestant], base: Contestant
) -> Seconds:
    """Time pipelines, the plain model on rank 0's core, and copies of the stage."""
    copy = StageCopy.of(
        stage.layers, runs.workload.mini_batch().split(runs.num_micro_batches)[0].input
    )
    on_first: dict[str, Callable[[], object]] = {"plain": base.step, "alone": copy.run}
    actions: dict[str, Callable[[], object]] = {n: c.step for n, c in contestants.items()}
    for name, action in on_first.items():
        actions[name] = action if stage.rank == 0 else _wait
    actions["together"] = copy.run
    return interleave(actions, num_rounds=runs.num_rounds, clock=seconds_of_all)


def _wait() -> None:
    """Leave the core to rank 0; the barrier that follows blocks."""


def seconds_of_all(action: Callable[[], object]) -> float:
    """Time an action from when all ranks begin to when all have ended."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def measure(runs: ProcessRuns, num_stages: int) -> ProcessResults:
    """Start one process a stage with one thread each, measure, and end them.

    Raises:
        WorkerFailedError: a process failed; what it printed says why.
    """
    return found_by(_enter, (runs,), num_slots=num_stages)


def _enter(runs: ProcessRuns) -> ProcessResults:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(runs.limit_s, exit=True)
    world = connect("cpu", timeout_s=LONGEST_WAIT_S)
    try:
        return measure_on_this_rank(runs)
    finally:
        faulthandler.cancel_dump_traceback_later()
        world.close()
