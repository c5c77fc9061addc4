"""Add the engine's components one by one, as torchgpipe's paper does in its table 1.

    plain autograd order   forwards by clock cycles in threads, one graph, a backward left to
                           autograd; skips pass through every layer in tuples
    + ordered backward     our engine: each partition has its backwards in its own thread
    + copy streams         on a GPU alone; the engine always has them there
    + direct skips         each long skip goes from its partition straight to its partition

The model is a U-Net on CPU partitions, one intra-op thread each, all micro-batches but the last
checkpointed. Utilisation is the process's CPU time over partitions times time. Memory is the most
bytes of activations alive at once, counted by the lifetime of the tensors that layers take or
autograd keeps. Partitions on the CPU share memory, so that a skip in a tuple takes no copies of
its own: on several GPUs it would. Results are verified before their speed. Run it as `python -m
experiments.benchmarks.engine.components`; the last line printed is JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from experiments.benchmarks.engine.kept_bytes import peak_kept_bytes
from experiments.benchmarks.engine.plain_order import PlainOrder
from experiments.benchmarks.engine.threads import balance_of, pipeline
from experiments.benchmarks.engine.workloads import (
    Contestant,
    UNet,
    plain,
    through_autograd,
    verify_all,
)
from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.rounds import Seconds, bootstrap, interleave, num_cores

NUM_MICRO_BATCHES = 8
PLAIN, ORDERED, STREAMS, DIRECT = (
    "plain autograd order",
    "+ ordered backward",
    "+ copy streams",
    "+ direct skips",
)
PUBLISHED = {
    PLAIN: "30.7/s 44 % 52.2 GiB",
    ORDERED: "41.3/s 59 % 19.1 GiB",
    STREAMS: "55.2/s 71 % 30.0 GiB",
    DIRECT: "58.5/s 75 % 23.5 GiB",
}
"""U-Net (5, 64) on 4 GPUs, batch 128, 8 micro-batches. Source: torchgpipe, table 1."""


@dataclass
class Metered:
    """Run a step and add up the CPU time that the whole process spent in it."""

    step: Callable[[], object]
    cpu_s: float = 0.0

    def __call__(self) -> None:
        """Take the step."""
        start = time.process_time()
        self.step()
        self.cpu_s += time.process_time() - start


def contestants_of(workload: UNet, balance: Sequence[int]) -> dict[str, Contestant]:
    """Return the lines of the table that can be measured on the CPU."""
    batch, passed_along = workload.mini_batch(), replace(workload, skips="tuple")
    in_plain_order = PlainOrder(
        passed_along.build(),
        balance,
        chunks=NUM_MICRO_BATCHES,
        num_checkpointed=NUM_MICRO_BATCHES - 1,
    )
    lines = {PLAIN: through_autograd(in_plain_order, batch)}
    for name, variant in ((ORDERED, passed_along), (DIRECT, workload)):
        module = pipeline(variant, balance, chunks=NUM_MICRO_BATCHES, checkpoint="except_last")
        lines[name] = through_autograd(module, batch)
    return lines


def peak_bytes(workload: UNet, contestant: Contestant) -> int:
    """Count the activations of all partitions together."""
    partitions = contestant.module.partitions
    assert isinstance(partitions, torch.nn.ModuleList)
    layers = [layer for partition in partitions for layer in partition.children()]
    return peak_kept_bytes(contestant.step, layers, contestant.module.parameters())


def describe(
    workload: UNet, seconds: Seconds, metered: dict[str, Metered], peaks: dict[str, int], num: int
) -> list[dict[str, object]]:
    """Return the rows, with speed-ups over the first line."""
    rows: list[dict[str, object]] = []
    for name in PUBLISHED:
        if name not in seconds:
            rows.append({"components": name, "applies": False, "published": PUBLISHED[name]})
            continue
        speed_up = bootstrap(seconds[PLAIN] / seconds[name])
        rows.append(
            {
                "components": name,
                "applies": True,
                "samples_per_s": workload.batch_size / float(np.median(seconds[name])),
                "speed_up": {
                    "median": speed_up.median,
                    "interval": [speed_up.low, speed_up.high],
                },
                "utilisation": metered[name].cpu_s / (num * float(seconds[name].sum())),
                "peak_kept_bytes": peaks[name],
                "published": PUBLISHED[name],
            }
        )
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows beside the published figures."""
    print(
        f"  {'components':22}{'samples/s':>10}  {'speed-up':28}{'busy':>6}{'kept MiB':>10}"
        "  published, 4 GPUs"
    )
    for row in rows:
        if not row["applies"]:
            print(
                f"  {row['components']:22}{'does not apply: nothing is copied on the CPU':>56}"
                f"  {row['published']}"
            )
            continue
        low, high = row["speed_up"]["interval"]
        speed_up = f"{row['speed_up']['median']:.3f} ({low:.3f} to {high:.3f})"
        print(
            f"  {row['components']:22}{row['samples_per_s']:10.1f}  {speed_up:28}"
            f"{row['utilisation']:6.0%}{row['peak_kept_bytes'] / 2**20:10.1f}"
            f"  {row['published']}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and, last, one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small model, to try the command")
    parser.add_argument("--rounds", type=int, help="default 20, with --quick 2")
    parser.add_argument("--partitions", type=int, default=2)
    given = parser.parse_args(arguments)
    num_rounds = given.rounds or (2 if given.quick else 20)
    torch.set_num_threads(1)
    workload = UNet(2, 4, 32, 16) if given.quick else UNet()
    balance = balance_of(workload, given.partitions)
    lines = contestants_of(workload, balance)
    base = plain(workload.build(), workload.mini_batch(), NUM_MICRO_BATCHES)
    verify_all(lines, base)
    peaks = {name: peak_bytes(workload, line) for name, line in lines.items()}
    metered = {name: Metered(line.step) for name, line in lines.items()}
    seconds = interleave(metered, num_rounds=num_rounds, warm_up=0)
    print(
        f"{workload}, {NUM_MICRO_BATCHES} micro-batches, layers {balance}, {num_rounds} "
        f"interleaved rounds, {num_cores()} cores, one thread a partition, "
        f"torch {torch.__version__}"
    )
    rows = describe(workload, seconds, metered, peaks, given.partitions)
    print_table(rows)
    found = {"benchmark": "components", "rows": rows, "rounds": num_rounds}
    conclude({**found, "balance": balance, "quick": given.quick}, Bars())


if __name__ == "__main__":
    main()
