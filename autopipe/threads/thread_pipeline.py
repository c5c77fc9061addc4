"""Run a schedule on stages that are threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import nn

from autopipe.engine import StageLinks, StageRun, StageWork
from autopipe.schedule import Op, Schedule, StageProgram
from autopipe.skip import SkipEdge, SkipKey
from autopipe.threads.partition_threads import CallerSettings, run_together
from autopipe.threads.randomness import Randomness, randomness_of
from autopipe.threads.thread_link import Crossing, ThreadLink
from autopipe.trace import Recorder, Trace

W = TypeVar("W", bound=StageWork)


class ThreadPipeline(Generic[W]):
    """Connect stages, and run their programs, each in a thread.

    Args:
        schedule: a program a stage.
        modules: the stages'.
        work_of: makes a stage's work, given which it is, the caller's settings, and what the
            stage draws random numbers from.
        devices: the stages'.
        skips: ways beside those between neighbours.
        trace: takes down what runs when; None for no trace.
    Attributes:
        works: the stages'.
        settings: the caller's.
    """

    def __init__(
        self,
        schedule: Schedule,
        modules: Sequence[nn.Module],
        work_of: Callable[[int, CallerSettings, Randomness], W],
        *,
        devices: Sequence[torch.device],
        skips: Sequence[SkipEdge] = (),
        trace: Trace | None = None,
    ) -> None:
        num_micro_batches = 1 + max((ins.micro_batch for ins in schedule[0]), default=-1)
        at_once = min(num_micro_batches, len(schedule))
        self._devices = devices
        self.settings = CallerSettings(devices, at_once=at_once)
        randomness = randomness_of(
            modules, devices, num_micro_batches=num_micro_batches, concurrent=at_once > 1
        )
        self.works = [work_of(j, self.settings, draws) for j, draws in enumerate(randomness)]
        recorders = [
            None if trace is None else trace.recorder(stage, device=device)
            for stage, device in enumerate(devices)
        ]
        self._crossings: list[Crossing] = []
        links = self._connect(skips, recorders)
        # Threads hand tensors over as they are, so that only the number of sizes counts.
        sizes = range(num_micro_batches)
        self.stages = [
            StageRun(schedule[j], work, links[j], sizes, recorder=recorders[j])
            for j, work in enumerate(self.works)
        ]

    def run(
        self,
        programs: Sequence[StageProgram],
        *,
        grad_enabled: bool,
        order: Callable[[int], int],
        retain: bool = False,
    ) -> None:
        """Run a portion of the schedule, to its end.

        Args:
            grad_enabled: whether forwards keep graphs.
            order: tells how early the schedule has a stage's present instruction: of several
                failures the earliest is raised.
            retain: whether its backwards will be asked for once more.
        """

        def run_stage(stage: int) -> None:
            with self.settings.applied(self._devices[stage], grad_enabled=grad_enabled):
                self.stages[stage].run(programs[stage], retain=retain)

        run_together(
            [partial(run_stage, stage) for stage in range(len(programs))],
            num_threads=self.settings.num_threads,
            stop=self._stop,
            order=order,
        )

    def _stop(self) -> None:
        for crossing in self._crossings:
            crossing.mailbox.stop()

    def _connect(
        self, skips: Sequence[SkipEdge], recorders: Sequence[Recorder | None]
    ) -> list[StageLinks]:
        """Lay a way up and a way down between neighbours, and where a skip goes."""

        def crossing(op: Op, source: int, target: int, keys: Sequence[SkipKey]) -> Crossing:
            made = Crossing(
                op,
                self._devices[source],
                self._devices[target],
                num_skips=len(keys) or None,
                recorders=(recorders[source], recorders[target]),
            )
            self._crossings.append(made)
            return made

        last = len(self._devices) - 1
        below, above = ([ThreadLink() for _ in self._devices] for _ in range(2))
        for edge in (*(SkipEdge(j, j + 1, ()) for j in range(last)), *skips):
            up = crossing(Op.SEND_ACTIVATION, edge.source, edge.target, edge.keys)
            down = crossing(Op.SEND_GRADIENT, edge.target, edge.source, edge.keys)
            above[edge.source].add(incoming=down, outgoing=up)
            below[edge.target].add(incoming=up, outgoing=down)
        return [
            StageLinks(below[j] if j > 0 else None, above[j] if j < last else None)
            for j in range(last + 1)
        ]
