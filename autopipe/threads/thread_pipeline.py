"""Run a schedule on stages that are threads of one process, with the caller's settings."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import nn

from autopipe.engine import StageLinks, StageRun, StageWork
from autopipe.schedule import Instruction, Op, Schedule, StageProgram
from autopipe.skip import SkipEdge, SkipKey
from autopipe.threads.randomness import Randomness, randomness_of
from autopipe.threads.thread_link import Crossing, Stopped, ThreadLink
from autopipe.trace import Recorder, Trace


class CallerSettings:
    """Hold the caller's settings that torch keeps per thread.

    Args:
        devices: the partitions'; those on the CPU share the caller's intra-op threads.
        at_once: partitions that can work at the same time.
    """

    def __init__(self, devices: Sequence[torch.device], *, at_once: int) -> None:
        num_on_cpu = sum(device.type == "cpu" for device in devices)
        self.num_threads = max(1, torch.get_num_threads() // max(1, min(at_once, num_on_cpu)))
        self._inference = torch.is_inference_mode_enabled()
        self._default_device = torch.get_default_device()
        cuda_devices = sorted({d for d in devices if d.type == "cuda"}, key=lambda d: d.index)
        self._streams = [torch.cuda.current_stream(device) for device in cuda_devices]
        cached = torch.is_autocast_cache_enabled()
        self._autocasts = [
            partial(
                torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=cached
            )
            for kind in sorted({device.type for device in devices} & {"cpu", "cuda"})
            if torch.is_autocast_enabled(kind)
        ]

    @contextmanager
    def applied(self, device: torch.device, *, grad_enabled: bool) -> Iterator[None]:
        """Apply them to the thread of a partition, except autocast and the number of threads."""
        with ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad_enabled and not self._inference))
            # Else a backward would go to autograd's thread of its CUDA device, which may be busy
            # with the very backward that started this job: a deadlock.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self._default_device != torch.get_default_device():
                stack.enter_context(self._default_device)
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            # Entering a stream makes its device current, so the partition's own comes last.
            for stream in sorted(self._streams, key=lambda stream: stream.device == device):
                stack.enter_context(torch.cuda.stream(stream))
            # Disabled, but entered: leaving the outermost autocast empties the cache of cast
            # weights, which so lasts for all micro-batches of the portion.
            for autocast in self._autocasts:
                stack.enter_context(autocast(enabled=False))
            yield

    def join_streams(self) -> None:
        """Let every device's stream wait for all others."""
        # Autograd expects all gradients of a node on one stream.
        for ours in self._streams:
            for theirs in self._streams:
                torch.cuda.current_stream(theirs.device).wait_stream(ours)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Apply the caller's autocast to one forward, inside `applied`."""
        with ExitStack() as stack:
            for autocast in self._autocasts:
                stack.enter_context(autocast())
            yield


def _run_to_the_end(
    threads: Sequence[threading.Thread], ended: Sequence[threading.Event], stop: Callable[[], None]
) -> None:
    """Start threads and wait for them, even if the caller is interrupted."""
    try:
        for thread in threads:
            thread.start()
        for event in ended:
            event.wait()
    except BaseException:
        stop()
        raise
    finally:
        for thread, event in zip(threads, ended, strict=True):
            # A thread without an ident never started: the caller was interrupted before.
            while not event.wait(0.1) and thread.ident is not None:
                pass
            # Not `join` alone: after an interrupt it takes the thread for ended (Python 3.11).
            if thread.ident is not None:
                thread.join()


def run_together(
    jobs: Sequence[Callable[[], None]],
    *,
    num_threads: int,
    stop: Callable[[], None],
    order: Callable[[int], int],
) -> None:
    """Run the jobs at the same time; a single job runs in the caller's thread.

    The first failure in the schedule's order is raised when all jobs have ended.

    Args:
        num_threads: intra-op threads of each job.
        stop: ends every wait of a job for another; called after a failure.
        order: tells how early in the schedule a job has failed; of equals the lowest job counts.
    """
    if len(jobs) == 1:
        jobs[0]()
        return
    failures: list[tuple[int, int, BaseException]] = []
    ended = [threading.Event() for _ in jobs]
    context = contextvars.copy_context()

    def work(number: int) -> None:
        try:
            torch.set_num_threads(num_threads)
            jobs[number]()
        except BaseException as error:
            stop()
            if not isinstance(error, Stopped):
                failures.append((order(number), number, error))
        finally:
            ended[number].set()

    # New threads for each call: lasting ones would keep the interpreter from exiting.
    threads = [
        threading.Thread(
            target=context.copy().run, args=(work, number), daemon=True, name=f"partition {number}"
        )
        for number in range(len(jobs))
    ]
    num_threads_before = torch.get_num_threads()
    try:
        _run_to_the_end(threads, ended, stop)
    finally:
        # A number set in a thread is also the default of later threads.
        torch.set_num_threads(num_threads_before)
    if failures:
        first = min(failures, key=lambda failure: failure[:2])[2]
        # Break the cycle of error, traceback and frame, which would keep the step's tensors alive.
        failures.clear()
        try:
            raise first
        finally:
            del first


W = TypeVar("W", bound=StageWork)


class ThreadPipeline(Generic[W]):
    """Connect stages, and run their programs, each in a thread.

    Args:
        schedule: a program for each stage.
        modules, devices: the stages'.
        work_of: makes a stage's work from its number, the caller's settings, and its randomness.
        skips: edges besides those between neighbours.
        trace: records what runs when; None for no trace.
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
        skips: Sequence[SkipEdge],
        trace: Trace | None,
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
        # Only the number of sizes counts: these links ignore them.
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
        order: Callable[[int, Instruction], int],
        retain: bool = False,
    ) -> None:
        """Run a portion of the schedule to its end.

        Args:
            grad_enabled: whether forwards keep graphs.
            order: says how early the schedule has a stage's instruction; the earliest failure is
                raised.
            retain: whether its backwards will run once more.
        """

        def run_stage(stage: int) -> None:
            with self.settings.applied(self._devices[stage], grad_enabled=grad_enabled):
                self.stages[stage].run(programs[stage], retain=retain)

        def failed_at(stage: int) -> int:
            instruction = self.stages[stage].current
            return 0 if instruction is None else order(stage, instruction)

        run_together(
            [partial(run_stage, stage) for stage in range(len(programs))],
            num_threads=self.settings.num_threads,
            stop=self._stop,
            order=failed_at,
        )

    def _stop(self) -> None:
        for crossing in self._crossings:
            crossing.mailbox.stop()

    def _connect(
        self, skips: Sequence[SkipEdge], recorders: Sequence[Recorder | None]
    ) -> list[StageLinks]:
        """Add a way up and a way down for each edge between neighbours, and for each skip's."""

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
