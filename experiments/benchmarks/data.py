"""Measure how long steps wait for their data, beside a plain loop with a DataLoader.

One process of one thread trains a small ViT on JPEGs; two workers decode them, crop them at random
to 224 pixels and flip them. Both sides have the same model, samples in the same order, and as many
workers, as far ahead. First, without augmentation, the losses of some steps are compared.

    wait_share         share of our steps' time that is spent waiting for data; the median
    wait_share_plain   likewise of the plain loop's, in next(iterator)
    plain_over_ours    the plain loop's time of a step over ours

The JSON line has them in three states:

    workers     nothing frozen
    in_process  nothing frozen, without workers: what an image costs to decode and to train on,
                of which the model is made to take about as long
    cached      the lower half frozen, each image in one fixed view: ours reads activations, and
                workers decode only the samples that the cache checks, one in 32 once each row was
                read; what reading and checking take counts as waiting. The plain loop decodes, and
                runs the frozen half of, every image

Workers go on in the other side's turn, until they are as far ahead as they may be. Steps are
therefore timed in blocks, of one side after the other in random order, and a block's first steps,
in which its side lives on what was read before and the other side's workers still run, do not
count. Run it as `python -m experiments.benchmarks.data`; the last line printed is JSON.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.both_sides import LEARNING_RATE, make_trainer, verify_losses
from experiments.benchmarks.measuring.jpegs import Jpegs, jpeg_task, make_jpegs
from experiments.benchmarks.measuring.loop_process import LoopProcess
from experiments.benchmarks.measuring.rounds import Seconds, bootstrap, interleave
from experiments.benchmarks.measuring.timed_loop import RivalTask

EPOCHS = 10**6  # More than are ever run.
BARS = Bars(least={"plain_over_ours": 0.98}, most={"wait_share_beyond_plain": 0.02})


@dataclass(frozen=True)
class DataSetting:
    """State what is trained and how long.

    Args:
        num_images: of the training set, a multiple of the batch size.
        batch_size: images of a step.
        num_pixels: height and width that they are cropped to.
        width, depth: of the ViT.
        num_workers: processes that decode; 2 batches each ahead.
        num_settling, num_steps: a block's steps that do not count, and those that do.
        num_rounds: blocks of each side that count.
    """

    num_images: int = 512
    batch_size: int = 32
    num_pixels: int = 224
    width: int = 96
    depth: int = 4
    num_workers: int = 2
    num_settling: int = 12
    num_steps: int = 24
    num_rounds: int = 7

    def task(self, files: tuple[bytes, ...], *, num_workers: int, augment: bool) -> RivalTask:
        """Return the task for both sides."""
        return jpeg_task(
            Jpegs(files, num_pixels=self.num_pixels, augment=augment),
            width=self.width,
            depth=self.depth,
            batch_size=self.batch_size,
            num_workers=num_workers,
        )


@dataclass(frozen=True)
class Waits:
    """Hold what one state of a run was found to take, an entry a round.

    Args:
        seconds: of a step, "plain" and "ours".
        shares: of that time, what was spent waiting.
    """

    seconds: Seconds
    shares: Seconds

    def as_json(self) -> dict[str, Any]:
        """Return medians, intervals and ranges."""
        ratio = bootstrap(self.seconds["plain"] / self.seconds["ours"])
        ours, plain = self.shares["ours"], self.shares["plain"]
        return {
            "wait_share": float(np.median(ours)),
            "wait_share_plain": float(np.median(plain)),
            "wait_share_beyond_plain": float(np.median(ours - plain)),
            "plain_over_ours": ratio.median,
            "wait_share_range": [ours.min(), ours.max()],
            "wait_share_plain_range": [plain.min(), plain.max()],
            "plain_over_ours_interval": [ratio.low, ratio.high],
            "step_ms": 1e3 * float(np.median(self.seconds["ours"])),
            "step_ms_plain": 1e3 * float(np.median(self.seconds["plain"])),
        }


@dataclass
class _Side:
    """Take one side's steps in blocks.

    Args:
        step: trains on the next batch, and returns the seconds that it waited for it.
        workload: how many steps a block has.
        shares: of every block so far, what was spent waiting.
    """

    step: Callable[[], float]
    workload: DataSetting
    shares: list[float] = field(default_factory=list)

    def block(self) -> float:
        """Return the mean seconds of a step."""
        for _ in range(self.workload.num_settling):
            self.step()
        num = self.workload.num_steps
        start = time.perf_counter()
        waited_s = sum(self.step() for _ in range(num))
        total_s = time.perf_counter() - start
        self.shares.append(waited_s / total_s)
        return total_s / num


def time_state(task: RivalTask, workload: DataSetting, *, num_frozen: int) -> Waits:
    """Time blocks of both sides' steps in turn, with so many layers frozen."""
    caching: dict[str, Any] = {"cache_views": 1} if num_frozen else {"cache": False}
    with (
        LoopProcess(task, learning_rate=LEARNING_RATE, num_threads=1) as loop,
        make_trainer(task, (num_frozen,), epochs=EPOCHS, **caching) as trainer,
    ):
        loop.freeze(num_frozen)
        for _ in range(task.steps_per_epoch if num_frozen else 0):
            trainer.step()  # Fills the cache.
        sides = {
            "plain": _Side(lambda: _plain_step(loop), workload),
            "ours": _Side(lambda: trainer.step().breakdown["data"], workload),
        }
        num = workload.num_rounds
        blocks = {name: side.block for name, side in sides.items()}
        # A block tells its seconds itself, as its first steps do not count.
        seconds = interleave(blocks, num_rounds=num, clock=lambda block: float(block()))
    return Waits(seconds, {name: np.array(side.shares[-num:]) for name, side in sides.items()})


def _plain_step(loop: LoopProcess) -> float:
    loop.step()
    return loop.wait_s


def measure(workload: DataSetting) -> dict[str, Any]:
    """Compare losses, time all states, say a line for each, and return the JSON line."""
    files, num_workers = make_jpegs(workload.num_images), workload.num_workers
    checked = workload.task(files, num_workers=num_workers, augment=False)
    differ_by = verify_losses(checked)
    found = {}
    for name, workers, num_frozen in (
        ("workers", num_workers, 0),
        ("in_process", 0, 0),
        ("cached", num_workers, workload.depth // 2),
    ):
        task = workload.task(files, num_workers=workers, augment=True)
        found[name] = one = time_state(task, workload, num_frozen=num_frozen).as_json()
        print(
            f"{name:10}  ours waits {one['wait_share']:6.1%} of {one['step_ms']:6.1f} ms  "
            f"plain {one['wait_share_plain']:6.1%} of {one['step_ms_plain']:6.1f} ms  "
            f"plain / ours {one['plain_over_ours']:.3f}",
            flush=True,
        )
    alone = found["in_process"]
    image_ms = alone["step_ms_plain"] / workload.batch_size
    keys = ("wait_share", "wait_share_plain", "plain_over_ours", "wait_share_beyond_plain")
    return {
        **{key: found["workers"][key] for key in keys},
        "decode_ms": image_ms * alone["wait_share_plain"],
        "compute_ms": image_ms * (1 - alone["wait_share_plain"]),
        "jpeg_bytes": sum(map(len, files)) // len(files),
        "losses_differ_by": differ_by,
        "states": found,
        "workload": asdict(workload),
        "threads": torch.get_num_threads(),
    }


def main() -> int:
    """Measure; fail where ours waits longer, or takes longer, than it may."""
    parser = argparse.ArgumentParser(description="Measure how long steps wait for their data.")
    parser.add_argument("--rounds", type=int, default=DataSetting.num_rounds, help="blocks a side")
    parser.add_argument("--workers", type=int, default=DataSetting.num_workers)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    found = measure(DataSetting(num_rounds=options.rounds, num_workers=options.workers))
    return conclude(found, BARS)


if __name__ == "__main__":
    sys.exit(main())
