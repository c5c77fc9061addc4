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

Source: GPipe (Huang et al. 2019); PipeDream-flush (Narayanan et al. 2021); torchgpipe section 2.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate


class Op(Enum):
    RECV_ACTIVATION = "recv_activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send_activation"
    RECOMPUTE = "recompute"
    RECV_GRADIENT = "recv_gradient"
    BACKWARD = "backward"
    SEND_GRADIENT = "send_gradient"


@dataclass(frozen=True)
class Instruction:
    """Do one operation on one micro-batch."""

    op: Op
    micro_batch: int


StageProgram = tuple[Instruction, ...]
Schedule = tuple[StageProgram, ...]


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
    programs = []
    for stage in range(num_stages):
        warm_up = min(num_stages - stage - 1, num_micro_batches)
        tasks = _each(Op.FORWARD, range(warm_up))
        for i in range(num_micro_batches - warm_up):
            tasks += [Instruction(Op.FORWARD, warm_up + i), Instruction(Op.BACKWARD, i)]
        tasks += _each(Op.BACKWARD, range(num_micro_batches - warm_up, num_micro_batches))
        programs.append(_with_links(tasks, stage, num_stages, recomputed))
    return tuple(programs)


def forward_only(num_stages: int, num_micro_batches: int) -> Schedule:
    forwards = _each(Op.FORWARD, range(num_micro_batches))
    return tuple(_with_links(forwards, j, num_stages) for j in range(num_stages))


SCHEDULES: dict[str, Callable[..., Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def micro_batch_sizes(
    num_samples: int, num_micro_batches: int, *, fixed_size: int | None = None
) -> tuple[int, ...]:
    """Cut samples into micro-batches that differ by at most one, the larger ones first.

    Where their size is fixed, all have it but the last, and their number follows.
    """
    if fixed_size is not None:
        whole, rest = divmod(num_samples, fixed_size)
        return (fixed_size,) * whole + (rest,) * (rest > 0)
    size, num_larger = divmod(num_samples, num_micro_batches)
    return (size + 1,) * num_larger + (size,) * (num_micro_batches - num_larger)


def split_at_first_backward(program: StageProgram) -> tuple[StageProgram, StageProgram]:
    """Part a program that runs all its forwards first into them and the rest."""
    forward_ops = (Op.RECV_ACTIVATION, Op.FORWARD, Op.SEND_ACTIVATION)
    length = next((n for n, ins in enumerate(program) if ins.op not in forward_ops), len(program))
    return program[:length], program[length:]


def _each(op: Op, micro_batches: Iterable[int]) -> list[Instruction]:
    return [Instruction(op, i) for i in micro_batches]


def _with_links(
    tasks: list[Instruction], stage: int, num_stages: int, recomputed: Collection[int] = ()
) -> StageProgram:
    """Put each task between the receive it waits for and the send it feeds."""
    has_below, has_above = stage > 0, stage < num_stages - 1
    program: list[Instruction] = []
    for task in tasks:
        i = task.micro_batch
        if task.op is Op.FORWARD:
            program += _each(Op.RECV_ACTIVATION, [i] * has_below)
            program += [task, *_each(Op.SEND_ACTIVATION, [i] * has_above)]
        else:
            program += _each(Op.RECOMPUTE, [i] * (i in recomputed))
            program += _each(Op.RECV_GRADIENT, [i] * has_above)
            program += [task, *_each(Op.SEND_GRADIENT, [i] * has_below)]
    return tuple(program)


LETTERS = {Op.FORWARD: "F", Op.RECOMPUTE: "R", Op.BACKWARD: "B"}
"""How the operations that compute are drawn."""


def draw(*schedules: Schedule) -> str:
    """Draw a schedule as the grid of the module's docstring; several one after the other."""
    grids = [_place(schedule) for schedule in schedules]
    width = max((len(cell) for grid in grids for row in grid for cell in row), default=0)
    return named_rows(
        {
            stage: " | ".join(" ".join(cell.ljust(width) for cell in row) for row in rows)
            for stage, rows in enumerate(zip(*grids, strict=True))
        }
    )


def named_rows(rows: Mapping[int, str]) -> str:
    width = max((len(f"stage {stage}") for stage in rows), default=0)
    return "\n".join(f"{f'stage {j}'.ljust(width)}  {row}".rstrip() for j, row in rows.items())


def _place(schedule: Schedule) -> list[list[str]]:
    """Give each stage's tasks their ticks, one long and as early as their input is there."""
    sources = {Op.FORWARD: -1, Op.BACKWARD: 1}  # Of an operation's input, from its stage.
    waiting = [deque(ins for ins in program if ins.op in LETTERS) for program in schedule]
    total = Counter((j, task) for j, tasks in enumerate(waiting) for task in tasks)
    done: Counter[tuple[int, Instruction]] = Counter()
    rows: list[list[str]] = [[] for _ in schedule]
    while any(waiting):
        finished = []
        for j, (row, tasks) in enumerate(zip(rows, waiting, strict=True)):
            cell = ".."
            # What no neighbour does at all, as at the ends, is not waited for.
            source = (j + sources.get(tasks[0].op, len(rows)), tasks[0]) if tasks else None
            if source and done[source] >= min(total[source], done[j, tasks[0]] + 1):
                cell = f"{LETTERS[tasks[0].op]}{tasks[0].micro_batch}"
                finished.append((j, tasks.popleft()))
            row.append(cell)
        if not finished:
            raise ValueError("the schedule cannot be executed: its stages wait for each other")
        done.update(finished)
    return rows


def peak_in_flight(program: StageProgram) -> int:
    """Count the most micro-batches that a stage keeps between their forward and their backward."""
    changes = ((ins.op is Op.FORWARD) - (ins.op is Op.BACKWARD) for ins in program)
    return max(accumulate(changes, initial=0))
