"""Measure what the framework costs where it can save nothing.

The peer is a hand-written PyTorch loop over the same model, data set, optimizer and batch size, in
a process of its own and on one thread; steps take turns in random order. Run it as `python -m
experiments.benchmarks.overhead`.
"""

from __future__ import annotations

import sys

import torch

from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.both_sides import LEARNING_RATE, make_trainer
from experiments.benchmarks.measuring.loop_process import LoopProcess
from experiments.benchmarks.measuring.rounds import paired_ratio
from experiments.benchmarks.measuring.timed_loop import BATCH_SIZE, digits_task

BARS = Bars(most={"k1_overhead_low": 1.02})


def main() -> int:
    """Compare; fail only if the whole interval is beyond the limit."""
    torch.set_num_threads(1)
    task = digits_task()
    settings = {"freeze": None, "epochs": 10, "cache": False}
    with (
        LoopProcess(task, learning_rate=LEARNING_RATE, num_threads=1) as loop,
        make_trainer(task, (0,), **settings) as trainer,
    ):
        trainer.step()
        ratio, pairs = paired_ratio(trainer.step, loop.step)
        assert trainer.decision is not None
        num_micro_batches = trainer.decision.plan.num_micro_batches
    ours, theirs = (sorted(column)[len(pairs) // 2] * 1e3 for column in zip(*pairs, strict=True))
    print(
        f"a step of {BATCH_SIZE} images, {len(pairs)} interleaved pairs, one thread, "
        f"torch {torch.__version__}"
    )
    print(f"  Trainer       {ours:8.1f} ms (median), M = {num_micro_batches}")
    print(f"  hand-written  {theirs:8.1f} ms")
    print(
        f"  ratio         {ratio.median:8.4f}   95 % interval {ratio.low:.4f} to {ratio.high:.4f}"
    )
    interval = {"k1_overhead_low": ratio.low, "k1_overhead_high": ratio.high}
    return conclude({"k1_overhead": ratio.median, **interval, "pairs": len(pairs)}, BARS)


if __name__ == "__main__":
    sys.exit(main())
