"""Predict a step by executing its schedule on a clock, with known times.

A stage does not wait for its sends to arrive. A link carries one message at a time in each
direction, in order. 1F1B on 2 stages with 2 micro-batches, a forward and a message of 1 s, a
backward of 2 s; one column a second, `a` an activation and `g` a gradient under way:

    stage 0  F0 F1 .. .. .. .. B0 B0 .. B1 B1
    link     .. a0 a1 .. .. g0 .. .. g1 .. ..
    stage 1  .. .. F0 B0 B0 F1 B1 B1 .. .. ..
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from autopipe.schedule import LETTERS, Instruction, Op, Schedule, StageWorkers, workers_of
from autopipe.trace import Span


@dataclass(frozen=True)
class StageTimes:
    """State the seconds of every piece of a step.

    Interleaved stages count each for itself, K * v on K workers.

    Args:
        forward_s, backward_s: one row per stage, one entry per micro-batch.
        transfer_s: one row per boundary (of stages j and j + 1), one entry per micro-batch, for
            its activation as for its gradient.
        lead_s: each stage's work before its first instruction; empty for none.
        handling_s: a stage's own time to send or take a message, one per boundary; empty for none.
        update_s: each stage's update of its weights, if the schedule has any; empty for none.
    """

    forward_s: tuple[tuple[float, ...], ...]
    backward_s: tuple[tuple[float, ...], ...]
    transfer_s: tuple[tuple[float, ...], ...]
    lead_s: tuple[float, ...] = ()
    handling_s: tuple[float, ...] = ()
    update_s: tuple[float, ...] = ()

    def scaled(self, factor: float) -> StageTimes:
        """Return the times with computing multiplied by a factor."""
        forward_s, backward_s = (
            tuple(tuple(factor * seconds for seconds in row) for row in rows)
            for rows in (self.forward_s, self.backward_s)
        )
        return replace(self, forward_s=forward_s, backward_s=backward_s)


@dataclass(frozen=True)
class Simulation:
    """Hold a simulated step: the seconds in which each stage was busy or idle, and its spans.

    Leading work and handling of messages are busy time without spans. Each worker of replicated or
    interleaved stages counts as a stage.
    """

    step_s: float
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    timeline: tuple[Span, ...]

    @property
    def company(self) -> float:
        """Return how many stages compute while one does, itself included, on average."""
        changes = sorted(
            change for span in self.timeline for change in ((span.start_s, 1), (span.end_s, -1))
        )
        number, work_s, company_s = 0, 0.0, 0.0
        for (start_s, change), (end_s, _) in pairwise(changes):
            # `number` stages compute in this interval; each of them has `number` for company.
            number += change
            work_s += number * (end_s - start_s)
            company_s += number**2 * (end_s - start_s)
        return company_s / work_s if work_s else 1.0


def simulate(
    schedule: Schedule, times: StageTimes, *, replicas: Sequence[int] | None = None
) -> Simulation:
    """Execute a schedule on a clock.

    Each boundary of stages has a link of its own, also where interleaved ones join two workers.

    Args:
        schedule: a program for each worker of each stage.
        replicas: workers of each stage, each pair with a link of its own; None for one each.
    Raises:
        ValueError: the times do not fit the schedule's stages; or its stages wait for each other,
            expect another order of messages, or leave messages unread.
    """
    clock = _Clock(times, workers_of(schedule, replicas))
    # Each worker runs until it waits for a message. The order in which workers are visited does
    # not matter, as each has a clock of its own.
    waiting = [deque(program) for program in schedule]
    progress = True
    while progress:
        progress = False
        for stage, program in enumerate(waiting):
            while program and clock.execute(stage, program[0]):
                program.popleft()
                progress = True
    stuck = [
        f"stage {stage} waits for {program[0].op.value} {program[0].micro_batch}"
        for stage, program in enumerate(waiting)
        if program
    ] + clock.unread()
    if stuck:
        raise ValueError(
            f"the schedule cannot be executed: {', '.join(stuck)}; pair every send "
            f"with one receive, in one order"
        )
    step_s = max(clock.now_s)
    return Simulation(
        step_s,
        tuple(clock.busy_s),
        tuple(step_s - busy for busy in clock.busy_s),
        tuple(clock.events),
    )


@dataclass
class _Link:
    """Carry one kind of message over one boundary, one at a time and in order."""

    free_s: float = 0.0
    messages: deque[tuple[int, float]] = field(default_factory=deque)

    def send(self, micro_batch: int, leaves_s: float, transfer_s: float) -> None:
        # A message leaves when the one before it has arrived.
        self.free_s = max(self.free_s, leaves_s) + transfer_s
        self.messages.append((micro_batch, self.free_s))


class _Clock:
    def __init__(self, times: StageTimes, workers: StageWorkers) -> None:
        num_stages = workers.num_stages
        lead_s = times.lead_s or (0.0,) * num_stages
        handling_s = times.handling_s or (0.0,) * (num_stages - 1)
        rows = times.forward_s, times.backward_s, lead_s, times.transfer_s, handling_s
        shape = tuple(map(len, rows))
        if shape != (*(num_stages,) * 3, *(num_stages - 1,) * 2):
            raise ValueError(
                f"(forward, backward, lead, transfer, handling) times have {shape} rows; a "
                f"schedule of {num_stages} stages needs one a stage, and one a boundary for "
                f"transfers and handling"
            )
        self._times, self._handling_s, self._workers = times, handling_s, workers
        self.now_s = [sum(lead_s[stage :: len(workers.replicas)]) for stage in workers.stages]
        self.busy_s = list(self.now_s)
        self.events: list[Span] = []
        # By kind of message, the stage below, and the workers below and above.
        self._links = defaultdict[tuple[str, int, int, int], _Link](_Link)

    def execute(self, worker: int, instruction: Instruction) -> bool:
        """Execute one instruction; return False if its message has not been sent yet."""
        op, i, times = instruction.op, instruction.micro_batch, self._times
        stage = self._workers.stage_of(worker, instruction.chunk)
        if op in LETTERS:
            start_s = self.now_s[worker]
            self._spend(worker, self._compute_s(op, stage, i))
            self.events.append(Span(worker, op, i, start_s, self.now_s[worker]))
            return True
        boundary = stage if op in (Op.SEND_ACTIVATION, Op.RECV_GRADIENT) else stage - 1
        below, above = self._workers.of(boundary, i), self._workers.of(boundary + 1, i)
        kind = "activation" if op.is_forward else "gradient"
        link = self._links[kind, boundary, below, above]
        if op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT):
            self._spend(worker, self._handling_s[boundary])
            link.send(i, self.now_s[worker], times.transfer_s[boundary][i])
            return True
        # Another micro-batch's message first means that the schedule's orders differ: stuck.
        if not link.messages or link.messages[0][0] != i:
            return False
        self.now_s[worker] = max(self.now_s[worker], link.messages.popleft()[1])
        self._spend(worker, self._handling_s[boundary])
        return True

    def _compute_s(self, op: Op, stage: int, micro_batch: int) -> float:
        if op is Op.UPDATE:
            return self._times.update_s[stage] if self._times.update_s else 0.0
        rows = self._times.backward_s if op is Op.BACKWARD else self._times.forward_s
        return rows[stage][micro_batch]

    def _spend(self, worker: int, seconds: float) -> None:
        self.now_s[worker] += seconds
        self.busy_s[worker] += seconds

    def unread(self) -> list[str]:
        return [
            f"{kind} {i} between {below} and {above} is never received"
            for (kind, _, below, above), link in sorted(self._links.items(), key=lambda it: it[0])
            for i, _ in link.messages
        ]
