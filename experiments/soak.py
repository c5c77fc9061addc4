"""Kill ranks of real runs at random points, and see whether anything is lost.

    python -m experiments.soak --kills 200
    python -m experiments.soak --kills 30 --program hf

program    what is killed
trainer    our Trainer: pipelines and what is frozen change at steps of their own
hf         the same, as a script written for transformers.Trainer trains a BERT
stream     our Trainer without flushes, whose steps between two pauses are one stream

A run is killed again and again, at a random rank: every other time after a random time, else at a
random call of a random function of the packages, so that rare moments (a transition, the pointer
to a checkpoint, an evaluation, the cache's filling) are hit as often as frequent ones. Its
launcher restarts it, and it continues from its newest checkpoint. Of the following all but the
first must be 0:

    kills
    hangs             attempts of runs that were not over, nor ended by their kill, in 60 s
    failed            runs that ended in an error, or started again without having been killed
    lost_or_repeated  samples that an epoch did not train exactly once
    differing         runs whose final weights, optimizer state or log are not the uninterrupted
                      run's bit by bit
    left_behind       files of the ranks' own that are still in shared memory
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from experiments.soak_programs import EPOCHS, LENGTHS, NUM_SAMPLES, STEPS_PER_EPOCH
from experiments.soak_run import ATTEMPTS, ERRORS, KILLED, PIDS, PROGRAMS, Kill, SoakRun, train
from pipetransformer import launch
from pipetransformer.checkpoint import Checkpoint, open_checkpoint, published

KILLS_A_RUN = 10
ATTEMPT_LIMIT_S = 60.0
IMPORTED = ("pipetransformer", "torch._dynamo", "experiments.soak_run", "experiments.soak_hf")
MOMENTS = {
    "transition": ("elasticity", "deployment", "shards", "journal", "moves", "redistribute"),
    "checkpoint": ("best_model", "durable_files", "format", "run_state", "saver"),
    "evaluation": ("evaluations", "evaluator", "step_result"),
    "fill": ("layout", "node_store", "prefix_cache", "prefix_chunks", "prefix_rows", "store"),
}  # fmt: skip
"""Modules of rare moments; at each of these is struck as often as at all functions together."""
LOSSES = ("hangs", "failed", "lost_or_repeated", "differing", "left_behind")


@dataclass(frozen=True)
class Reference:
    """Hold what an uninterrupted run did.

    Args:
        num_ranks: its processes.
        seconds: it took.
        calls: of every function, by rank.
        state: what it came to; see `left_over`.
    """

    num_ranks: int
    seconds: float
    calls: tuple[Mapping[str, int], ...]
    state: Mapping[str, Tensor]


@dataclass
class Tally:
    """Count what was seen."""

    kills: int = 0
    runs: int = 0
    hangs: int = 0
    failed: int = 0
    lost_or_repeated: int = 0
    differing: int = 0
    left_behind: int = 0
    where: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, int]:
        """Return the counts."""
        return {name: getattr(self, name) for name in ("kills", *LOSSES)}

    @property
    def is_clean(self) -> bool:
        """Return whether nothing was lost."""
        return not any(getattr(self, name) for name in LOSSES)


def main() -> int:
    """Run the soak; return 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", choices=tuple(PROGRAMS), default="trainer")
    options = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.ERROR)
    tally = soak(options.kills, options.seed, options.program)
    print("\nkills  in the module")
    for module, number in tally.where.most_common():
        print(f"{number:5}  {module}")
    found = {m: sum(tally.where[name] for name in names) for m, names in MOMENTS.items()}
    print(f"\nof them in a {', '.join(f'{moment} {num}' for moment, num in found.items())}")
    print(f"{tally.runs} runs of {' or '.join(map(str, LENGTHS))} processes")
    print(json.dumps(tally.to_json()))
    return 0 if tally.is_clean else 1


def soak(num_kills: int, seed: int, program: str = "trainer") -> Tally:
    """Kill a program's runs until there were so many kills."""
    tally, generator = Tally(), random.Random(seed)
    # Ranks are forks of a server, which imports what they need once.
    forkserver.set_forkserver_preload([*IMPORTED])
    forkserver.ensure_running()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        references = [refer(folder / f"whole{n}", n, program) for n in LENGTHS]
        while tally.kills < num_kills:
            reference = references[tally.runs % len(references)]
            most = min(KILLS_A_RUN, num_kills - tally.kills)
            run = SoakRun(
                str(folder / f"run{tally.runs}"),
                reference.num_ranks,
                tuple(draw(reference, generator) for _ in range(most)),
                program=program,
            )
            judge(run, reference, tally)
            print(f"run {tally.runs}: {json.dumps(tally.to_json())}", flush=True)
    return tally


def refer(folder: Path, num_ranks: int, program: str = "trainer") -> Reference:
    """Train without a kill."""
    run = SoakRun(str(folder), num_ranks, counts=True, program=program)
    folder.mkdir()
    launch(train, (run,), num_slots=num_ranks, start_method="forkserver")
    found = [json.loads((folder / f"calls-{rank}.json").read_text()) for rank in range(num_ranks)]
    if wrong := wrong_samples(folder, num_ranks):
        raise RuntimeError(f"the uninterrupted run lost or repeated {wrong} samples")
    return Reference(
        num_ranks,
        max(one["seconds"] for one in found),
        tuple(one["calls"] for one in found),
        left_over(folder),
    )


def draw(reference: Reference, generator: random.Random) -> Kill:
    """Choose a rank and a moment, rather early than late.

    A restarted process begins where the last one saved, so that its late moments never come.
    """
    rank = generator.randrange(reference.num_ranks)
    if generator.random() < 0.5:
        return Kill(rank, after_s=generator.uniform(0.0, reference.seconds / 2))
    calls = sorted(reference.calls[rank].items())
    modules = generator.choice([(), *MOMENTS.values()])
    chosen = [call for call in calls if call[0].partition(".")[0] in modules]
    function, count = generator.choice(chosen or calls)
    call = generator.randrange(1 + generator.randrange(count))
    return Kill(rank, function=function, call=call, event=generator.choice(("call", "return")))


def judge(run: SoakRun, reference: Reference, tally: Tally) -> None:
    """Run once with its kills, and count what went wrong."""
    folder = Path(run.folder)
    folder.mkdir()
    tally.runs += 1
    failure: Exception | None = None
    try:
        with limit(ATTEMPT_LIMIT_S * (len(run.kills) + 1)):
            launch(
                train,
                (run,),
                num_slots=run.num_ranks,
                max_restarts=len(run.kills),
                start_method="forkserver",
            )
        tally.lost_or_repeated += wrong_samples(folder, run.num_ranks)
        tally.differing += not same_bits(left_over(folder), reference.state)
    except (RuntimeError, TimeoutError) as error:  # Such as a WorkerFailedError.
        printed = folder / ERRORS
        said = printed.read_text()[-3000:] if printed.exists() else "no rank began"
        print(f"{error}\n{run}\n{said}")
        failure = error
    killed = folder / KILLED
    where = killed.read_text().splitlines() if killed.exists() else []
    attempts = folder / ATTEMPTS
    began = (
        [float(line) for line in attempts.read_text().splitlines()] if attempts.exists() else []
    )
    # All attempts together may be too long though none of them is.
    tally.hangs += count_late([*began, time.time()]) or isinstance(failure, TimeoutError)
    restarted_unkilled = failure is None and len(began) != len(where) + 1
    tally.failed += isinstance(failure, RuntimeError) or restarted_unkilled
    tally.kills += len(where)
    pids = folder / PIDS
    left = shared_files(map(int, pids.read_text().split())) if pids.exists() else []
    tally.left_behind += len(left)
    tally.where.update(name.partition(".")[0] for name in where)


def shared_files(pids: Iterable[int]) -> list[str]:
    """Name what processes have left in shared memory: others have files there, too."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    own = set(map(str, pids))
    return [name for name in names if own.intersection(re.split(r"[-_.]", name))]


def count_late(times_s: Sequence[float]) -> int:
    """Count the attempts that took too long, from when each began, and the last one ended."""
    return sum(end - begin > ATTEMPT_LIMIT_S for begin, end in pairwise(times_s))


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """End what takes longer, in the main thread.

    Raises:
        TimeoutError: it took longer.
    """

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not over after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wrong_samples(folder: Path, num_ranks: int) -> int:
    """Count the samples that an epoch trained too often or not at all.

    A step that was trained again after a restart counts as it was trained last.
    """
    trained: dict[int, tuple[int, list[int]]] = {}
    for rank in range(num_ranks):
        for line in (folder / f"samples-{rank}").read_text().splitlines():
            attempt, step, *ids = map(int, line.split())
            last, samples = trained.get(step, (-1, []))
            if attempt > last:
                trained[step] = (attempt, ids)
            elif attempt == last:
                samples.extend(ids)
    wrong = 0
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH)
        times = Counter(sample for step in steps for sample in trained.get(step, (0, []))[1])
        wrong += sum(abs(times[sample] - 1) for sample in range(NUM_SAMPLES))
    return wrong


def last_checkpoint(folder: Path, num_steps: int) -> Checkpoint:
    """Return what a run in a folder saved after its last step."""
    checkpoint = open_checkpoint(published(folder / "run" / "checkpoints")[0])
    if checkpoint.step != num_steps:
        raise RuntimeError(f"{folder} ended with a checkpoint of step {checkpoint.step}")
    return checkpoint


def read_state(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Read every tensor of a checkpoint, weights and optimizer state, by shard and name."""
    return {
        f"{shard}: {name}": tensor
        for shard in sorted(checkpoint.shards)
        for name, tensor in checkpoint.read(shard).items()
    }


def left_over(folder: Path) -> dict[str, Tensor]:
    """Return all that a run came to: what it saved last, and where it kept a log, its numbers."""
    state = read_state(last_checkpoint(folder, EPOCHS * STEPS_PER_EPOCH))
    kept = folder / "run" / "trainer_state.json"
    if kept.exists():
        history = json.loads(kept.read_text())["log_history"]
        names = ("step", "loss", "grad_norm", "eval_loss")
        numbers = [[entry.get(name, -1.0) for name in names] for entry in history]
        state["history"] = torch.tensor(numbers, dtype=torch.float64)
    return state


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Compare all tensors bit by bit."""
    return ours.keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


if __name__ == "__main__":
    sys.exit(main())
