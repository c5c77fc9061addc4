"""Measure bubbles, and messages beside computing, over processes whose layers wait.

    python -m experiments.benchmarks.bubbles interleaved
    python -m experiments.benchmarks.bubbles halves

A layer sleeps through its forward and, twice as long, its backward. So K processes need no K
cores, and what is measured are schedule, engine and links. `interleaved` runs 1F1B on K workers
with one chunk of layers each, then with two. `halves` runs 1F1B on two stages over a link that
carries one message at a time in each direction, and takes a known time for it: without that time,
with it, and with sends that wait until the message has arrived.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe import Recorder, Span
from autopipe.engine import (
    Payload,
    Peer,
    ProcessLinkAbove,
    ProcessLinkBelow,
    Receiver,
    Sender,
    StageLinks,
    StageRun,
    StageWork,
    run_chunks,
)
from autopipe.plan import StageTimes, simulate
from autopipe.schedule import Op, Schedule, interleaved, one_f_one_b
from experiments.benchmarks.measuring.processes import found_by
from experiments.finetune.series import markdown
from pipetransformer.processes import connect

CPU, LONGEST_WAIT_S = torch.device("cpu"), 60.0
_FEATURES = 64


@dataclass(frozen=True)
class Case:
    """Say what a step is.

    Args:
        chunks: of layers a worker; 1 is 1F1B.
        forward_s: of one micro-batch through all layers of a worker.
        delay_s: of each message but headers.
        blocking: whether a send waits until its message has arrived.
    """

    workers: int
    micro_batches: int
    chunks: int = 1
    forward_s: float = 0.12
    delay_s: float = 0.0
    blocking: bool = False

    @property
    def stages(self) -> int:
        return self.workers * self.chunks

    @property
    def schedule(self) -> Schedule:
        if self.chunks == 1:
            return one_f_one_b(self.workers, self.micro_batches)
        return interleaved(self.workers, self.micro_batches, num_chunks=self.chunks)

    @property
    def computing_s(self) -> float:
        """Return a worker's time in a step."""
        return 3 * self.forward_s * self.micro_batches

    @property
    def predicted_s(self) -> float:
        """Return the step's time by the simulator, whose sends do not block."""
        forward = ((self.forward_s / self.chunks,) * self.micro_batches,) * self.stages
        backward = ((2 * self.forward_s / self.chunks,) * self.micro_batches,) * self.stages
        delays = ((self.delay_s,) * self.micro_batches,) * (self.stages - 1)
        times = StageTimes(forward, backward, delays)
        return simulate(self.schedule, times).step_s


@dataclass(frozen=True)
class Step:
    """Hold a step as measured.

    Args:
        step_s: from the first worker's start to the last one's end.
        computing_s: of the worker that computed longest.
        beside: part of the messages' time in which a worker computed.
    """

    step_s: float
    computing_s: float
    beside: float

    @property
    def bubble(self) -> float:
        return self.step_s / self.computing_s - 1


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class WaitingWork(StageWork):
    """Scale the hidden state by a weight, asleep for a time."""

    def __init__(self, forward_s: float) -> None:
        self._weight, self._forward_s = nn.Parameter(torch.ones(())), forward_s

    def first_input(self, micro_batch: int) -> Payload:
        return Payload((torch.ones(1, _FEATURES),))

    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        (hidden,) = inputs.tensors
        assert hidden is not None
        return Payload((_Wait.apply(hidden * self._weight, self._forward_s),))

    def finish(self, micro_batch: int, outputs: Payload) -> Tensor | None:
        (output,) = outputs.tensors
        return None if output is None else output.sum()


@dataclass(frozen=True)
class Departure:
    """Wait until a message has left, as `dist.Work` does."""

    leaving: Future[None]

    def wait(self, timeout: timedelta) -> None:
        self.leaving.result(timeout.total_seconds())


@dataclass(frozen=True)
class DelayedPeer(Peer):
    """Carry one message at a time, which takes a known time; the step's header takes none."""

    delay_s: float = 0.0
    line: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))

    def start(self, transfer: Callable[..., Any], message: Tensor) -> Any:
        return Departure(self.line.submit(self._carry, partial(super().start, transfer), message))

    def _carry(self, send: Callable[[Tensor], Any], message: Tensor) -> None:
        if message.is_floating_point():
            time.sleep(self.delay_s)
        send(message).wait()


class BlockingSender(Sender):
    """Wait until each message has arrived."""

    def send(self, tensor: Tensor) -> None:
        super().send(tensor)
        self.flush()


def links_of(case: Case, stage: int) -> StageLinks:
    """Link a stage to those below and above, on workers in a ring."""
    group, links = dist.group.WORLD, StageLinks()
    assert group is not None

    def sender(to: int, boundary: int, gradients: bool) -> Sender:
        where = (to % case.workers, group, 2 * boundary + gradients, "message", LONGEST_WAIT_S)
        peer = DelayedPeer(*where, delay_s=case.delay_s) if case.delay_s else Peer(*where)
        return BlockingSender(peer) if case.blocking else Sender(peer)

    def receiver(source: int, boundary: int, gradients: bool) -> Receiver:
        tag = 2 * boundary + gradients
        return Receiver(Peer(source % case.workers, group, tag, "message", LONGEST_WAIT_S), CPU)

    if stage > 0:
        links.below = ProcessLinkBelow(
            receiver(stage - 1, stage - 1, False), sender(stage - 1, stage - 1, True)
        )
    if stage < case.stages - 1:
        links.above = ProcessLinkAbove(
            sender(stage + 1, stage, False), receiver(stage + 1, stage, True)
        )
    return links


def run_step(case: Case, links: Sequence[StageLinks]) -> Step:
    """Take a step together with all workers; each returns the same."""
    rank, sizes = dist.get_rank(), (1,) * case.micro_batches
    program = case.schedule[rank]
    # Recording takes time: only where messages are looked at.
    recorder = Recorder(rank) if case.delay_s else None
    runs = [
        StageRun(
            tuple(ins for ins in program if ins.chunk == chunk),
            WaitingWork(case.forward_s / case.chunks), links[chunk], sizes, recorder=recorder,
        )
        for chunk in range(case.chunks)
    ]  # fmt: skip
    dist.barrier()
    start_s = time.perf_counter()
    reports = run_chunks(program, runs)
    end_s = time.perf_counter()
    found: list[Any] = [None] * case.workers
    spans = recorder.spans if recorder else []
    own = (start_s, end_s, sum(report.compute_s for report in reports), spans)
    dist.all_gather_object(found, own)
    # Processes of one machine share the clock.
    starts, ends, computing, all_spans = zip(*found, strict=True)
    together = [span for spans in all_spans for span in spans]
    step_s = max(ends) - min(starts)
    return Step(step_s, max(computing), beside_computing(together, case.delay_s))


def beside_computing(spans: Sequence[Span], delay_s: float) -> float:
    """Return the part of the messages' time in which some stage computed; 0 without delays."""
    kinds = (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
    # Spans with a peer tell of bytes; a send itself has none.
    sends = sorted((s for s in spans if s.op in kinds and s.peer is None), key=lambda s: s.start_s)
    busy = sorted((s.start_s, s.end_s) for s in spans if s.is_compute)
    free_s, beside_s = dict.fromkeys(kinds, 0.0), 0.0
    for send in sends:
        at_s = max(send.start_s, free_s[send.op])
        free_s[send.op] = arrival_s = at_s + delay_s
        for start_s, end_s in busy:
            beside_s += max(0.0, min(end_s, arrival_s) - max(start_s, at_s))
            at_s = max(at_s, min(end_s, arrival_s))  # What two stages compute at once counts once.
    return beside_s / (delay_s * len(sends)) if delay_s else 0.0


def measure_on_this_rank(cases: Sequence[Case], num_rounds: int) -> dict[Case, list[Step]]:
    """Take all steps in turn, in an order drawn anew each round; the first round counts not."""
    links = {
        case: [links_of(case, c * case.workers + dist.get_rank()) for c in range(case.chunks)]
        for case in cases
    }
    shuffle, found = random.Random(0), {case: list[Step]() for case in cases}
    for number in range(1 + num_rounds):
        for case in shuffle.sample(cases, len(cases)):
            step = run_step(case, links[case])
            if number:
                found[case].append(step)
    return found


def measure(cases: Sequence[Case], num_rounds: int) -> dict[Case, list[Step]]:
    torch.set_num_threads(1)
    world = connect("cpu", timeout_s=LONGEST_WAIT_S)
    try:
        return measure_on_this_rank(cases, num_rounds)
    finally:
        world.close()


def all_interleaved(scale: float = 1.0) -> list[Case]:
    return [
        Case(k, n * k, chunks, forward_s=0.12 * scale)
        for k, n, chunks in product((2, 4), (1, 2, 4), (1, 2))
    ]


def all_halves(scale: float = 1.0) -> list[Case]:
    """Share a batch's 120 ms of forward a stage, and 120 ms of message a direction, out over M."""
    return [
        Case(2, m, forward_s=part, delay_s=part * delayed, blocking=blocking)
        for m in (1, 2, 4)
        for part in (0.12 * scale / m,)
        for delayed, blocking in ((0, False), (1, False), (1, True))
    ]


def interleaved_table(found: Mapping[Case, Sequence[Step]]) -> str:
    """Write a row a case; ratios are of steps of one round."""
    rows = [["K", "M", "chunks", "bubble by formula", "measured", "step predicted", "measured"]]
    rows[0] += ["over 1F1B's: predicted", "measured"]
    for case, steps in found.items():
        formula = (case.workers - 1) / (case.chunks * case.micro_batches)
        rows.append(
            [str(case.workers), str(case.micro_batches), str(case.chunks), f"{formula:.3f}"]
            + [spread([step.bubble for step in steps], "{:.3f}")]
            + [f"{case.predicted_s * 1e3:.0f} ms", spread_ms(steps)]
        )
        whole = replace(case, chunks=1)
        ratios = [one.step_s / two.step_s for one, two in zip(steps, found[whole], strict=True)]
        predicted = f"{case.predicted_s / whole.predicted_s:.3f}"
        rows[-1] += ["", ""] if case == whole else [predicted, spread(ratios, "{:.3f}")]
    return markdown(rows)


def halves_table(found: Mapping[Case, Sequence[Step]]) -> str:
    rows = [["M", "link", "sends", "step predicted", "measured", "messages beside computing"]]
    for case, steps in found.items():
        link = f"{case.delay_s * 1e3:.0f} ms a message" if case.delay_s else "at once"
        predicted = "" if case.blocking else f"{case.predicted_s * 1e3:.0f} ms"
        beside = spread([100 * step.beside for step in steps], "{:.0f}") + " %"
        rows.append(
            [str(case.micro_batches), link, "wait" if case.blocking else "go on", predicted]
            + [spread_ms(steps), beside if case.delay_s else ""]
        )
    return markdown(rows)


def spread_ms(steps: Sequence[Step]) -> str:
    return spread([1e3 * step.step_s for step in steps], "{:.0f}") + " ms"


def spread(values: Sequence[float], form: str) -> str:
    """Write the median, and the least and the most."""
    numbers = statistics.median(values), min(values), max(values)
    middle, low, high = map(form.format, numbers)
    return f"{middle} ({low} to {high})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of what was asked for."""
    parser = argparse.ArgumentParser(prog="experiments.benchmarks.bubbles")
    parser.add_argument("what", choices=("interleaved", "halves"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.what == "halves":
        print(halves_table(found_by(measure, (all_halves(), options.rounds))))
        return
    found: dict[Case, list[Step]] = {}
    for workers in (2, 4):
        cases = [case for case in all_interleaved() if case.workers == workers]
        found |= found_by(measure, (cases, options.rounds), num_slots=workers)
    print(interleaved_table(found))


if __name__ == "__main__":
    main()
