"""Measure what freeze signals cost: in a step, at a decision, and in a look at the probe batch.

Trainers of one model and data set, which freeze nothing, take steps in turn in one process on all
cores: one without signals beyond gradient norms, a second such one as a control, one for each
signal, and one with all that need no probe batch. Run it as `python -m
experiments.benchmarks.signals`; the last line printed is JSON.

    per_step     time of a step with the signal over one without, minus 1; the median of the rounds
    decision_s   what a decision takes longer with the signal; the median
    share        of an epoch's time, with a decision an epoch

The losses of all Trainers are compared first: a signal must not change them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.both_sides import make_trainer
from experiments.benchmarks.measuring.rounds import (
    ResultsDifferError,
    Seconds,
    bootstrap,
    interleave,
    num_cores,
)
from experiments.benchmarks.measuring.timed_loop import (
    RivalTask,
    Sentences,
    add_folders,
    digits_task,
    sentences_task,
)
from freeze import FreezeContext
from pipetransformer import Trainer

BARS = Bars(most={"certain_cost": 0.01})
NONE, CONTROL, ALL = "none", "none again", "all but the probe's"
IN_STEPS = ("accumulated_gradient", "relative_update")
PROBE = "probe_cka"
SIGNALS: dict[str, tuple[str, ...]] = {
    NONE: (),
    CONTROL: (),
    **{name: (name,) for name in IN_STEPS},
    ALL: IN_STEPS,
    PROBE: (PROBE,),
}


@dataclass(frozen=True)
class Cost:
    """Hold what a signal costs; see the module.

    Args:
        interval: of `per_step`, 95 %.
    """

    per_step: float
    interval: tuple[float, float]
    decision_s: float
    share: float


def never(context: FreezeContext) -> None:
    """Freeze nothing."""


def time_steps(task: RivalTask, epochs: int) -> Seconds:
    """Time every step of all Trainers, in rounds; the first of an epoch holds its decision."""
    with ExitStack() as stack:
        settings = {"freeze": never, "epochs": epochs + 1}  # It decides once an epoch.
        trainers = {
            name: stack.enter_context(make_trainer(task, (0,), signals=signals, **settings))
            for name, signals in SIGNALS.items()
        }
        verify_losses(trainers)
        # The verified steps and the warm-up end an epoch.
        actions: dict[str, Callable[[], object]] = {n: t.step for n, t in trainers.items()}
        rest = task.steps_per_epoch - 1
        return interleave(actions, num_rounds=epochs * task.steps_per_epoch, warm_up=rest)


def verify_losses(trainers: dict[str, Trainer]) -> None:
    """Take a step with each.

    Raises:
        ResultsDifferError: their losses differ.
    """
    losses = {name: trainer.step().loss for name, trainer in trainers.items()}
    if len(set(losses.values())) > 1:
        raise ResultsDifferError(f"signals change what is learned: losses are {losses}")


def cost_of(seconds: Seconds, name: str, steps_per_epoch: int) -> Cost:
    """Compare a Trainer's steps with those of one without signals."""
    decides = np.arange(len(seconds[NONE])) % steps_per_epoch == 0
    with_it, without = seconds[name], seconds[NONE]
    ratio = bootstrap((with_it / without)[~decides] - 1)
    step_s = float(np.median(without[~decides]))
    decision_s = float(np.median((with_it - without)[decides])) - ratio.median * step_s
    share = ratio.median + decision_s / (steps_per_epoch * step_s)
    return Cost(ratio.median, (ratio.low, ratio.high), decision_s, share)


def measure(task: RivalTask, epochs: int) -> dict[str, Any]:
    """Run a task, say a line for each signal, and return what the JSON line holds."""
    seconds = time_steps(task, epochs)
    step_ms = 1e3 * float(np.median(seconds[NONE]))
    print(f"{task.name}: a step takes {step_ms:.1f} ms, {task.steps_per_epoch} steps an epoch")
    found: dict[str, Any] = {"step_ms": step_ms}
    for name in SIGNALS:
        if name == NONE:
            continue
        cost = cost_of(seconds, name, task.steps_per_epoch)
        low, high = cost.interval
        print(
            f"  {name:22} {cost.per_step:+7.2%} a step ({low:+.2%} to {high:+.2%}), "
            f"{1e3 * cost.decision_s:7.1f} ms a decision, {cost.share:+7.2%} of an epoch"
        )
        found[name] = asdict(cost)
    return found


def main() -> int:
    """Measure; fail where a signal that needs no probe is certainly above the limit."""
    parser = argparse.ArgumentParser(description="Measure what freeze signals cost.")
    add_folders(parser)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(num_cores())
    tasks = (digits_task(), sentences_task(Sentences(options.minilm, options.sst2)))
    found = {task.name: measure(task, options.epochs) for task in tasks}
    lows = [costs[name]["interval"][0] for costs in found.values() for name in IN_STEPS]
    return conclude({"certain_cost": max(lows), "tasks": found}, BARS)


if __name__ == "__main__":
    sys.exit(main())
