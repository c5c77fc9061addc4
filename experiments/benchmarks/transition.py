"""Measure what the first transition of a run costs: K = 2 -> 1 on two processes of one thread.

Every launch is two fresh processes that train a few steps, copy as many bytes as each will receive
into fresh memory (the control), and then change from one pipeline of two stages to two replicas of
one. The transition is planning and all from leaving the old stage to the last rank's new one;
asking the policy and publishing the answer, about a millisecond, is left out. Every weight and
moment is compared with what its owner held before. Run it as `python -m
experiments.benchmarks.transition`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.processes import found_by
from experiments.benchmarks.transition_run import (
    TransitionSetting,
    TransitionTimes,
    measure_on_this_rank,
)

BARS = Bars(most={"transition_steps": 1.0, "transition_over_copy": 3.0})


def measure(workload: TransitionSetting) -> TransitionTimes:
    """Measure on two fresh processes of one thread."""
    return found_by(measure_on_this_rank, (workload,))


def summary(workload: TransitionSetting, runs: Sequence[TransitionTimes]) -> dict[str, Any]:
    """Return what the last line says: medians over the launches, and their ranges."""
    steps, over_copy = [run.steps for run in runs], [run.over_copy for run in runs]
    return {
        "transition_steps": median(steps),
        "transition_steps_range": [min(steps), max(steps)],
        "transition_over_copy": median(over_copy),
        "transition_over_copy_range": [min(over_copy), max(over_copy)],
        "moved_bytes": runs[0].moved_bytes,
        "parameters": runs[0].parameters,
        "launches": len(runs),
        "workload": asdict(workload),
    }


def parse(arguments: Sequence[str]) -> tuple[TransitionSetting, int]:
    """Read the command line; the defaults are the figure that is claimed."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.transition")
    default = TransitionSetting()
    parser.add_argument("--model", default=default.model, help="a timm ViT")
    parser.add_argument("--image-size", type=int, default=default.image_size)
    parser.add_argument("--batch-size", type=int, default=default.batch_size)
    parser.add_argument("--steps", type=int, default=default.num_steps)
    parser.add_argument("--launches", type=int, default=3)
    given = parser.parse_args(arguments)
    workload = TransitionSetting(given.model, given.image_size, given.batch_size, given.steps)
    return workload, given.launches


def main(arguments: Sequence[str]) -> int:
    """Measure and print; fail if a median over the launches is beyond its limit."""
    workload, num_launches = parse(arguments)
    print(
        f"{workload.model}, {workload.image_size} px, global batch {workload.batch_size}, "
        "AdamW, "
        f"2 processes of one thread, K = 2 -> 1, torch {torch.__version__}, seconds:"
    )
    print(
        "launch    step    plan  change    copy  step after  second after   in steps   over copy"
    )
    runs = []
    for number in range(num_launches):
        run = measure(workload)
        runs.append(run)
        print(
            f"{number:6d} {run.step_s:7.3f} {run.plan_s:7.3f} {run.change_s:7.3f} "
            f"{run.copy_s:7.3f} {run.first_step_s:11.3f} {run.second_step_s:13.3f} "
            f"{run.steps:10.3f} {run.over_copy:11.2f}",
            flush=True,
        )
    line = summary(workload, runs)
    print(
        f"{line['moved_bytes'] / 1e6:.0f} MB moved, every weight and moment of "
        f"{line['parameters'] / 1e6:.1f} M parameters is bit for bit its owner's"
    )
    return conclude(line, BARS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
