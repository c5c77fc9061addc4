"""Time steps of three models, epoch by epoch, in blocks that take turns.

    epoch       frozen        ours          plain          ideal
    unfrozen    nothing       trains        trains         the plain loop
    filling     two thirds    writes rows   computes all   computes all, keeps it on the device
    first       two thirds    reads rows    computes all   reads tensors
    later       two thirds    reads rows    computes all   reads tensors

On a GPU ours trains twice: with the cache where it puts it itself, and in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from experiments.benchmarks.measuring.rounds import Seconds, interleave
from experiments.benchmarks.measuring.timed_loop import RivalTask
from experiments.gpu_check.both_sides import our_trainer, plain_loop, take_steps, two_thirds
from experiments.gpu_check.device_time import seconds_on
from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.workloads import timed_tasks
from pipetransformer import Trainer

STATES = ("unfrozen", "filling", "first cached epoch", "later epochs")


def run(findings: Findings, setting: Setting) -> None:
    """Time all models."""
    rounds, steps = (3, 2) if setting.tiny else (5, 5)
    # interleave has one round more, which warms up.
    for task in timed_tasks(setting, (rounds + 1) * steps):
        blocks = _Blocks(setting.device, rounds, steps)
        findings.check(task.name, partial(_time_states, findings, task, blocks))


@dataclass(frozen=True)
class _Blocks:
    """Say how steps are timed: in rounds, each with a block of steps of everyone."""

    device: str
    rounds: int
    steps: int

    def time(self, steps: dict[str, Callable[[], object]]) -> tuple[Seconds, dict[str, float]]:
        """Return everyone's ms a step, one entry a round, and the main thread's, the median."""
        own: dict[str, list[float]] = {who: [] for who in steps}

        def take(who: str) -> None:
            start = time.thread_time()
            take_steps(steps[who], self.steps)
            own[who].append(1e3 * (time.thread_time() - start) / self.steps)

        blocks = {who: partial(take, who) for who in steps}
        clock = partial(seconds_on, self.device)
        found = interleave(blocks, num_rounds=self.rounds, clock=clock)
        ms = {who: 1e3 * seconds / self.steps for who, seconds in found.items()}
        return ms, {who: float(np.median(each[1:])) for who, each in own.items()}


def _time_states(findings: Findings, task: RivalTask, blocks: _Blocks) -> None:
    deep, model, device = two_thirds(task), task.build(), blocks.device
    plain = plain_loop(task, model, device, keeps=False)
    ideal = plain_loop(task, model, device, keeps=True)
    frozen = (0, *[deep] * (len(STATES) - 1))
    places = (
        {"ours": "auto", "ours, cache on the host": "cpu"}
        if device == "cuda"
        else {"ours": "auto"}
    )
    with ExitStack() as stack:
        trainers = {
            who: stack.enter_context(
                our_trainer(task, model, device, frozen=frozen, cache_device=place)
            )
            for who, place in places.items()
        }
        for trainer in trainers.values():
            trainer.begin()
        for state in STATES:
            if state == STATES[1]:
                plain.freeze(deep)
                ideal.freeze(deep)
            steps = {who: trainer.step for who, trainer in trainers.items()}
            rivals = {"plain": plain.step, "ideal": ideal.step}
            if state == STATES[0]:
                del rivals["ideal"]
            read = {who: trainer.report.cache_hits for who, trainer in trainers.items()}
            ms, main_ms = blocks.time({**steps, **rivals})
            for who, trainer in trainers.items():
                name = f"{task.name}, {state}{who.removeprefix('ours')}"
                rows_read = trainer.report.cache_hits - read[who]
                own = {"main_thread_ms": {**main_ms, "ours": main_ms[who]}, "rows_read": rows_read}
                _note(findings, name, {**ms, "ours": ms[who]}, trainer, own)


def _note(
    findings: Findings, name: str, ms: Seconds, trainer: Trainer, own: dict[str, Any]
) -> None:
    """Note the medians of a state's blocks, and how far blocks of ours spread."""
    assert trainer.decision is not None
    ours, plain = ms["ours"], ms["plain"]
    ideal = ms.get("ideal", plain)
    findings.note(
        name,
        of_ideal=float(np.median(ideal / ours)),
        plain_over_ours=float(np.median(plain / ours)),
        ours_ms=float(np.median(ours)),
        plain_ms=float(np.median(plain)),
        ideal_ms=float(np.median(ideal)),
        ours_from_to_ms=[float(ours.min()), float(ours.max())],
        **own,
        micro_batches=trainer.decision.plan.num_micro_batches,
    )
