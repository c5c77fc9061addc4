"""Write pipeline schedules as data: for each stage, the list of instructions it executes.

Legend of the grids: one row a stage, one column a clock tick, `Fi`/`Bi` the forward/backward of
micro-batch i, `Ri` its recomputation.

GPipe (3 stages, 3 micro-batches): all forwards, then all backwards from the last micro-batch to
the first.

    stage 0  F0 F1 F2 .. .. .. .. B2 B1 B0
    stage 1  .. F0 F1 F2 .. .. B2 B1 B0 ..
    stage 2  .. .. F0 F1 F2 B2 B1 B0 .. ..

1F1B (PipeDream-flush): after a warm-up, every stage alternates, so stage j keeps at most K - j
micro-batches.

    stage 0  F0 F1 F2 .. .. B0 .. B1 .. B2
    stage 1  .. F0 F1 .. B0 F2 B1 .. B2 ..
    stage 2  .. .. F0 B0 F1 B1 F2 B2 .. ..

GPipe with all micro-batches but the last checkpointed. A recomputation needs no gradient, so it
precedes the wait for one and fills what would be idle time.

    stage 0  F0 F1 F2 .. .. .. .. B2 R1 B1 R0 B0
    stage 1  .. F0 F1 F2 .. .. B2 R1 B1 R0 B0 ..
    stage 2  .. .. F0 F1 F2 B2 R1 B1 R0 B0 .. ..

1F1B on replicated stages. The two workers of stage 0 take micro-batches in turn. So each may take
twice as long without holding stage 1 up.

    stage 0.0  F0 F2 .. B0 .. .. .. B2 .. ..
    stage 0.1  F1 F3 .. .. .. B1 .. .. .. B3
    stage 1    .. F0 B0 F1 B1 F2 B2 F3 B3 ..

1F1B without a flush (PipeDream) runs the micro-batches of all batches as one stream. An update
follows each batch's last backward; it takes no tick here, and no stage waits for it.

    stage 0  F0 F1 .. B0 F2 B1 F3 B2 .. B3
    stage 1  .. F0 B0 F1 B1 F2 B2 F3 B3 ..

Interleaved 1F1B (2 workers of 2 chunks, 4 micro-batches). A worker holds two chunks of layers, so
stages 0 to 3 lie on workers 0, 1, 0, 1; a prime marks chunk 1. A tick is half as long as above.

    worker 0  F0  F1  F0' F1' F2  B0' F3  B1' F2' B0  F3' B1  ..  B2' ..  B3' B2  B3
    worker 1  ..  F0  F1  F0' B0' F1' B1' F2  B0  F3  B1  F2' B2' F3' B3' B2  B3  ..

Source: GPipe (Huang et al. 2019); PipeDream (Narayanan et al. 2019) and PipeDream-flush (2021);
torchgpipe section 2; interleaving (Narayanan et al., Megatron-LM, 2021, section 2.2).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from itertools import accumulate

__all__ = [
    "Instruction", "Op", "SCHEDULES", "Schedule", "StageProgram", "StageWorkers", "draw",
    "forward_only", "gpipe", "interleaved", "micro_batch_sizes", "one_f_one_b",
    "peak_in_flight", "replicated_one_f_one_b", "schedule_of", "split_at_first_backward",
    "split_evenly", "unflushed",
]  # fmt: skip


class Op(Enum):
    RECV_ACTIVATION = "recv_activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send_activation"
    RECOMPUTE = "recompute"
    RECV_GRADIENT = "recv_gradient"
    BACKWARD = "backward"
    SEND_GRADIENT = "send_gradient"
    UPDATE = "update"

    @property
    def is_forward(self) -> bool:
        return self in (Op.RECV_ACTIVATION, Op.FORWARD, Op.SEND_ACTIVATION)


@dataclass(frozen=True)
class Instruction:
    """Do one operation on one micro-batch; an update belongs to the batch that ends with it.

    Args:
        chunk: which of its worker's chunks of layers; 0 where a worker has one.
    """

    op: Op
    micro_batch: int
    chunk: int = 0


StageProgram = tuple[Instruction, ...]
Schedule = tuple[StageProgram, ...]
"""One program for each stage, or for each worker of replicated or interleaved stages."""


@dataclass(frozen=True)
class StageWorkers:
    """Number the workers of stages.

    Workers of a replicated stage take micro-batches in turn. Interleaved stages take workers in
    turn: with several chunks a worker, chunk c of worker j is stage c * K + j of K workers.
    """

    replicas: tuple[int, ...]
    num_chunks: int = 1

    def __post_init__(self) -> None:
        if min(self.replicas, default=0) < 1:
            raise ValueError(f"stages have {self.replicas} workers; each needs one at least")

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """Return each stage's first worker, then the number of all workers."""
        return tuple(accumulate(self.replicas, initial=0))

    @cached_property
    def stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, count in enumerate(self.replicas) for _ in range(count))

    @property
    def num_stages(self) -> int:
        return len(self.replicas) * self.num_chunks

    def stage_of(self, worker: int, chunk: int) -> int:
        return chunk * len(self.replicas) + self.stages[worker]

    def of(self, stage: int, micro_batch: int) -> int:
        """Return the worker of a stage that takes a micro-batch."""
        stage %= len(self.replicas)
        return self.firsts[stage] + micro_batch % self.replicas[stage]

    def warm_up(self, stage: int) -> int:
        """Return how many forwards a worker of a stage runs before its first backward."""
        # The other workers from this stage upward, shared out over this stage's workers.
        return (self.firsts[-1] - 1 - self.firsts[stage]) // self.replicas[stage]

    def names(self) -> list[str]:
        kind = "stage" if self.num_chunks == 1 else "worker"
        return [
            f"{kind} {stage}" + f".{number}" * (count > 1)
            for stage, count in enumerate(self.replicas)
            for number in range(count)
        ]


def gpipe(
    num_stages: int, num_micro_batches: int, *, recomputed: Collection[int] = ()
) -> Schedule:
    """Run all forwards, then all backwards in the order M-1..0."""
    tasks = _each(Op.FORWARD, range(num_micro_batches))
    tasks += _each(Op.BACKWARD, reversed(range(num_micro_batches)))
    return tuple(_with_links(tasks, j, num_stages, recomputed) for j in range(num_stages))


def one_f_one_b(
    num_stages: int, num_micro_batches: int, *, recomputed: Collection[int] = ()
) -> Schedule:
    """Alternate forward and backward after a warm-up of K - j - 1 forwards on stage j."""
    return replicated_one_f_one_b((1,) * num_stages, num_micro_batches, recomputed=recomputed)


def replicated_one_f_one_b(
    replicas: Sequence[int],
    num_micro_batches: int,
    *,
    recomputed: Collection[int] = (),
    update_every: int | None = None,
) -> Schedule:
    """Alternate forward and backward on stages of several workers each.

    Args:
        num_micro_batches: of all batches together.
        recomputed: micro-batches whose forward is repeated before their backward.
        update_every: micro-batches of a batch; the stages update their weights after each batch
            and go on. None runs one batch without updates.
    Raises:
        ValueError: a worker would get no micro-batch of a batch, or batches are not whole.
    """
    workers, num_stages = StageWorkers(tuple(replicas)), len(replicas)
    batch = num_micro_batches if update_every is None else update_every
    if update_every is not None and (batch < max(replicas) or num_micro_batches % batch):
        raise ValueError(
            f"{num_micro_batches} micro-batches in batches of {batch} do not give each of "
            f"{max(replicas)} workers of a stage one of every batch"
        )
    programs = []
    for stage, count in enumerate(replicas):
        for number in range(count):
            own = range(number, num_micro_batches, count)
            warm_up = min(workers.warm_up(stage), len(own))
            tasks = _each(Op.FORWARD, own[:warm_up])
            for n, i in enumerate(own):
                # A slice, because the last backwards have no forward left to alternate with.
                tasks += _each(Op.FORWARD, own[warm_up + n : warm_up + n + 1])
                tasks.append(Instruction(Op.BACKWARD, i))
                # The worker's next micro-batch, i + count, belongs to a later batch.
                if update_every is not None and i // batch < (i + count) // batch:
                    tasks.append(Instruction(Op.UPDATE, i))
            programs.append(_with_links(tasks, stage, num_stages, recomputed))
    return tuple(programs)


def unflushed(num_stages: int, num_batches: int, num_micro_batches: int = 1) -> Schedule:
    """Run 1F1B over the micro-batches of many batches, with an update after each batch."""
    total = num_batches * num_micro_batches
    return replicated_one_f_one_b((1,) * num_stages, total, update_every=num_micro_batches)


def interleaved(
    num_workers: int,
    num_micro_batches: int,
    *,
    num_chunks: int = 2,
    recomputed: Collection[int] = (),
) -> Schedule:
    """Alternate forward and backward on workers with several chunks of layers each.

    K micro-batches pass all chunks before the next K do. So the bubble is that of 1F1B divided by
    the number of chunks, for as many times the messages.

    Args:
        num_workers: K; chunk c of worker j is stage c * K + j.
    Raises:
        ValueError: the micro-batches are no multiple of the workers.
    """
    if num_micro_batches % num_workers:
        raise ValueError(
            f"{num_micro_batches} micro-batches are no multiple of {num_workers} workers, whose "
            f"chunks take turns every {num_workers} micro-batches; choose a multiple"
        )

    def task(op: Op, n: int) -> Instruction:
        turn, place = divmod(n, num_workers)
        group, chunk = divmod(turn, num_chunks)
        # Backwards begin with the last chunk.
        chunk = chunk if op is Op.FORWARD else num_chunks - 1 - chunk
        return Instruction(op, group * num_workers + place, chunk)

    total, programs = num_micro_batches * num_chunks, []
    for worker in range(num_workers):
        # The forwards for which there is time until the first gradient arrives.
        warm_up = min(total, 2 * (num_workers - 1 - worker) + (num_chunks - 1) * num_workers)
        tasks = [task(Op.FORWARD, n) for n in range(warm_up)]
        for n in range(total):
            tasks += [task(Op.FORWARD, warm_up + n)] * (warm_up + n < total)
            tasks.append(task(Op.BACKWARD, n))
        programs.append(_with_links(tasks, worker, num_workers, recomputed, num_chunks))
    return tuple(programs)


@lru_cache(maxsize=256)
def forward_only(replicas: tuple[int, ...], num_micro_batches: int) -> Schedule:
    """Run forwards alone, on stages of `replicas` workers each."""
    return tuple(
        _with_links(
            _each(Op.FORWARD, range(number, num_micro_batches, count)), stage, len(replicas)
        )
        for stage, count in enumerate(replicas)
        for number in range(count)
    )


SCHEDULES: dict[str, Callable[..., Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


# Cached, because each step asks for the same schedule again.
@lru_cache(maxsize=256)
def schedule_of(name: str, replicas: tuple[int, ...], num_micro_batches: int) -> Schedule:
    """Return a schedule of `SCHEDULES`; only "1f1b" takes stages of several `replicas`."""
    if max(replicas) == 1:
        return SCHEDULES[name](len(replicas), num_micro_batches)
    if name != "1f1b":
        raise ValueError(f"stages of several workers run 1f1b, not {name}")
    return replicated_one_f_one_b(replicas, num_micro_batches)


def split_evenly(num_samples: int, num_parts: int) -> tuple[int, ...]:
    """Return part sizes that differ by at most one, the larger ones first."""
    size, num_larger = divmod(num_samples, num_parts)
    return (size + 1,) * num_larger + (size,) * (num_parts - num_larger)


def micro_batch_sizes(
    num_samples: int, num_micro_batches: int, *, fixed_size: int | None = None
) -> tuple[int, ...]:
    """Cut samples into micro-batches evenly, or to a fixed size, where the last may be smaller."""
    if fixed_size is not None:
        whole, rest = divmod(num_samples, fixed_size)
        return (fixed_size,) * whole + (rest,) * (rest > 0)
    return split_evenly(num_samples, num_micro_batches)


def split_at_first_backward(program: StageProgram) -> tuple[StageProgram, StageProgram]:
    """Split a program that runs all its forwards first into forwards and the rest."""
    length = next((n for n, ins in enumerate(program) if not ins.op.is_forward), len(program))
    return program[:length], program[length:]


def _each(op: Op, micro_batches: Iterable[int], chunk: int = 0) -> list[Instruction]:
    return [Instruction(op, i, chunk) for i in micro_batches]


def _with_links(
    tasks: list[Instruction],
    stage: int,
    num_stages: int,
    recomputed: Collection[int] = (),
    num_chunks: int = 1,
) -> StageProgram:
    """Put each task between the receive it waits for and the send it feeds.

    With several chunks `stage` is chunk 0's, one of as many stages as there are workers.
    """
    program: list[Instruction] = []
    for task in tasks:
        i, chunk = task.micro_batch, task.chunk
        has_below = stage > 0 or chunk > 0
        has_above = stage < num_stages - 1 or chunk < num_chunks - 1
        if task.op is Op.FORWARD:
            program += _each(Op.RECV_ACTIVATION, [i] * has_below, chunk)
            program += [task, *_each(Op.SEND_ACTIVATION, [i] * has_above, chunk)]
        elif task.op is Op.UPDATE:
            program.append(task)
        else:
            # A repeated forward needs no gradient: it runs while the gradient is under way.
            program += _each(Op.RECOMPUTE, [i] * (i in recomputed), chunk)
            program += _each(Op.RECV_GRADIENT, [i] * has_above, chunk)
            program += [task, *_each(Op.SEND_GRADIENT, [i] * has_below, chunk)]
    return tuple(program)


LETTERS = {Op.FORWARD: "F", Op.RECOMPUTE: "R", Op.BACKWARD: "B", Op.UPDATE: "U"}
"""Names of the operations that compute; a grid has no cell for an update."""


def draw(*schedules: Schedule, replicas: Sequence[int] | None = None) -> str:
    """Draw schedules side by side, as the grids above; `replicas` are each stage's workers."""
    if not any(schedules):
        return ""
    workers = workers_of(schedules[0], replicas)
    grids = [_place(schedule, workers) for schedule in schedules]
    width = max((len(cell) for grid in grids for row in grid for cell in row), default=0)
    rows = [
        " | ".join(" ".join(cell.ljust(width) for cell in row) for row in rows)
        for rows in zip(*grids, strict=True)
    ]
    names = workers.names()
    longest = max(map(len, names))
    lines = (f"{name:{longest}}  {row}" for name, row in zip(names, rows, strict=True))
    return "\n".join(map(str.rstrip, lines))


def workers_of(schedule: Schedule, replicas: Sequence[int] | None = None) -> StageWorkers:
    """Return a schedule's workers; its stages have `replicas` each, None for one."""
    num_chunks = 1 + max((ins.chunk for program in schedule for ins in program), default=0)
    return StageWorkers(tuple(replicas or (1,) * len(schedule)), num_chunks)


def _place(schedule: Schedule, workers: StageWorkers) -> list[list[str]]:
    """Place each worker's tasks, one tick long and as early as their input is there."""
    sources = {Op.FORWARD: -1, Op.BACKWARD: 1}

    def source_of(worker: int, task: Instruction) -> tuple[int | None, Instruction]:
        """Return the worker and the task that a task's input comes from; None at the ends."""
        stage = workers.stage_of(worker, task.chunk) + sources.get(task.op, workers.num_stages)
        if not 0 <= stage < workers.num_stages:
            return None, task
        before = replace(task, chunk=stage // len(workers.replicas))
        return workers.of(stage, task.micro_batch), before

    ticking = set(LETTERS) - {Op.UPDATE}
    waiting = [deque(ins for ins in program if ins.op in ticking) for program in schedule]
    total: Counter[tuple[int | None, Instruction]] = Counter(
        (j, task) for j, tasks in enumerate(waiting) for task in tasks
    )
    done: Counter[tuple[int | None, Instruction]] = Counter()
    rows: list[list[str]] = [[] for _ in schedule]
    while any(waiting):
        finished = []
        for j, (row, tasks) in enumerate(zip(rows, waiting, strict=True)):
            cell = ".."
            # A task that no neighbour runs at all (total is 0) is not waited for.
            source = source_of(j, tasks[0]) if tasks else None
            if source and done[source] >= min(total[source], done[j, tasks[0]] + 1):
                cell = f"{LETTERS[tasks[0].op]}{tasks[0].micro_batch}" + "'" * tasks[0].chunk
                finished.append((j, tasks.popleft()))
            row.append(cell)
        if not finished:
            raise ValueError("the schedule cannot be executed: its stages wait for each other")
        done.update(finished)
    return rows


def peak_in_flight(program: StageProgram) -> int:
    """Return the most micro-batches that a stage keeps between forward and backward."""
    changes = ((ins.op is Op.FORWARD) - (ins.op is Op.BACKWARD) for ins in program)
    return max(accumulate(changes, initial=0))
