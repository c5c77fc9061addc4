"""Measure the pipeline engine beside its peers, in the same run and in interleaved rounds.

Peers: the plain model, torchgpipe (extra `bench`) and torch.distributed.pipelining, which has a
process a stage over gloo. Every partition, process and plain model has one intra-op thread. Every
result, the loss and all gradients, is verified before its speed. Run it as `python -m
experiments.benchmarks.engine`; the last line printed is JSON. Its keys:

    vs_torchgpipe               their time / ours, K = 2, M = 8, nothing checkpointed
    vs_torchgpipe_checkpoint    the same, all micro-batches but the last checkpointed
    vs_torch_pipelining         the same on processes; over both schedules, and for each
    of_bubble_bound             speed-up over the plain model / its bound; threads and processes
    k1_overhead                 one partition, one micro-batch: our time / the plain model's
    unflushed_of_copies         micro-batches/s of asynchronous 1F1B / of K copies of a stage
    unflushed_vs_flushed        time of 1F1B with flushes / without
    peak_memory_ratio_1f1b_vs_gpipe    bytes of activations that stage 0 keeps, M = 16

The plain model of a speed-up runs micro-batch by micro-batch, each backward after its forward, on
one core. The bound is M / (M + K - 1) times the speed-up of K independent copies of a stage over
one alone, both timed in the same rounds, at micro-batch size, in threads or in processes.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import torch

from experiments.benchmarks.engine.process_pipelines import (
    PEER_SCHEDULES,
    ProcessResults,
    ProcessRuns,
    measure,
)
from experiments.benchmarks.engine.table import as_json, print_head, print_row, verdict
from experiments.benchmarks.engine.threads import (
    against_bound,
    against_torchgpipe,
    overhead_of_one_partition,
    peak_of_1f1b,
    without_flushes,
)
from experiments.benchmarks.engine.workloads import Encoder, EngineModel, UNet
from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.rounds import (
    Comparison,
    faster,
    num_cores,
    of_bubble_bound,
)

NUM_MICRO_BATCHES = 8
CHECKPOINTS = ("never", "except_last", "always")
SIZES: dict[str, tuple[EngineModel, EngineModel]] = {
    "encoder": (Encoder(), Encoder(64, 128, 32)),
    "unet": (UNet(), UNet(2, 4, 32, 16)),
}
"""Each workload, as it is measured and as `--quick` has it."""


@dataclass(frozen=True)
class EngineOptions:
    """Hold what the command line says.

    Args:
        num_pairs: of close calls; others take fewer.
        quick: small models, which tell nothing about speed.
        workloads: names in SIZES.
        stages: the numbers of partitions that have a core each; 2 is always measured.
    """

    num_pairs: int
    quick: bool
    workloads: tuple[str, ...]
    stages: tuple[int, ...]

    @property
    def num_rounds(self) -> int:
        """Return the rounds of two schedules each, so that both together have all pairs."""
        return -(-self.num_pairs // 2)

    @property
    def num_wide_pairs(self) -> int:
        """Return the pairs of what is far from its bar."""
        return max(1, 3 * self.num_pairs // 20)

    @property
    def num_table_pairs(self) -> int:
        """Return the pairs of what has no bar."""
        return max(1, self.num_pairs // 20)


def parse_options(arguments: Sequence[str] | None) -> EngineOptions:
    """Read the command line. An error ends the process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, help="of close calls; default 40, with --quick 3")
    parser.add_argument("--quick", action="store_true", help="small models, to try the command")
    parser.add_argument("--workloads", nargs="+", choices=SIZES, default=list(SIZES))
    given = parser.parse_args(arguments)
    num_pairs = given.pairs or (3 if given.quick else 40)
    if num_pairs < 1:
        parser.error(f"--pairs is {num_pairs}; it counts from 1")
    cores = num_cores()
    stages = tuple(k for k in (2, 4, 8) if k == 2 or k <= cores)
    return EngineOptions(num_pairs, given.quick, tuple(given.workloads), stages)


def find_torchgpipe() -> ModuleType | None:
    """Return the peer's module; without torchgpipe say so and how to get it."""
    try:
        # torchgpipe is an optional dependency: the extra `bench`.
        return importlib.import_module("experiments.benchmarks.engine.peer_torchgpipe")
    except ModuleNotFoundError as error:
        if error.name != "torchgpipe":
            raise
        print("  torchgpipe is missing, so nothing is compared to it: pip install -e '.[bench]'")
        return None


def measure_encoder(
    options: EngineOptions, encoder: Encoder, peer: ModuleType | None
) -> Iterator[Comparison]:
    """Measure all that has a bar, and the numbers of micro-batches and checkpoint modes."""
    yield overhead_of_one_partition(encoder, options.num_pairs)
    yield peak_of_1f1b(encoder, 2, num_micro_batches=2 * NUM_MICRO_BATCHES)
    for num_stages in options.stages:
        yield from against_bound(
            encoder,
            num_stages,
            num_micro_batches=NUM_MICRO_BATCHES,
            num_rounds=options.num_rounds,
        )
        yield from without_flushes(
            encoder,
            num_stages,
            num_micro_batches=NUM_MICRO_BATCHES,
            num_rounds=options.num_table_pairs,
        )
        if peer is not None:
            yield from measure_torchgpipe(options, encoder, peer, num_stages)
        runs = ProcessRuns(encoder, NUM_MICRO_BATCHES, options.num_rounds)
        yield from on_processes(measure(runs, num_stages), num_stages)


def measure_torchgpipe(
    options: EngineOptions, workload: EngineModel, peer: ModuleType, num_stages: int
) -> Iterator[Comparison]:
    """Compare to torchgpipe: two modes at M = 8 well, the rest of the grid for the table."""
    keys = {"never": ("vs_torchgpipe",), "except_last": ("vs_torchgpipe_checkpoint",)}
    judged = num_stages == 2 and workload.name == "encoder"
    yield from (
        replace(comparison, key=keys[mode] if judged else ())
        for mode, comparison in against_torchgpipe(
            peer,
            workload,
            num_stages,
            num_micro_batches=NUM_MICRO_BATCHES,
            checkpoints=list(keys),
            num_rounds=options.num_wide_pairs,
        ).items()
    )
    rest = [(m, CHECKPOINTS) for m in (1, 2, 4, 16)] if workload.name == "encoder" else []
    for num_micro_batches, modes in [(NUM_MICRO_BATCHES, ("always",)), *rest]:
        yield from against_torchgpipe(
            peer,
            workload,
            num_stages,
            num_micro_batches=num_micro_batches,
            checkpoints=modes,
            num_rounds=options.num_table_pairs,
        ).values()


def on_processes(results: ProcessResults, num_stages: int) -> Iterator[Comparison]:
    """Compare to torch's pipelines, schedule against the same schedule, and to the bound."""
    seconds, where = results.seconds, f"processes K={num_stages} M={NUM_MICRO_BATCHES}"
    judged = num_stages == 2
    both = {
        side: np.concatenate([seconds[f"{side} {name}"] for name in PEER_SCHEDULES])
        for side in ("ours", "theirs")
    }
    key: tuple[str, ...] = ("vs_torch_pipelining",) if judged else ()
    yield faster(both, "ours", "theirs", key=key, what=f"{where}, both schedules")
    for name in PEER_SCHEDULES:
        yield faster(
            seconds,
            f"ours {name}",
            f"theirs {name}",
            key=(*key, name) if judged else (),
            what=f"{where}, {name} against the peer's {name}",
        )
    for name in PEER_SCHEDULES:
        yield of_bubble_bound(
            {**seconds, name: seconds[f"ours {name}"]},
            name,
            num_stages=num_stages,
            num_micro_batches=NUM_MICRO_BATCHES,
            key=("of_bubble_bound", "processes", name) if judged else (),
            what=f"{where}, {name}, most kept {results.peak_in_flight[name]}",
        )


def print_header(options: EngineOptions) -> None:
    """Say on what and how it is measured, and what the machine leaves out."""
    print(
        f"{num_cores()} cores, one intra-op thread a partition, process and plain model, "
        f"torch {torch.__version__}, {'small models, ' if options.quick else ''}seed 0"
    )
    for name in options.workloads:
        print(f"  {SIZES[name][options.quick]}")
    print(
        "  plain model: micro-batch by micro-batch in one thread; bound: M / (M + K - 1) times "
        "the\n  speed-up of K copies of a stage over one; (x of y): a median speed-up, and the "
        "copies'"
    )
    left_out = [str(k) for k in (4, 8) if k not in options.stages]
    if left_out:
        print(f"  K = {' and '.join(left_out)} left out: each partition needs a core")
    if "unet" in options.workloads:
        print("  U-Net runs on threads alone: a process link carries one tensor, no skips")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and, last, one JSON line; fail if a bar is missed, but for quick runs."""
    options = parse_options(arguments)
    torch.set_num_threads(1)
    print_header(options)
    peer = find_torchgpipe()
    print_head()
    comparisons = []
    for comparison in measure_all(options, peer):
        comparisons.append(comparison)
        print_row(comparison, judged=not options.quick)
    missed = sum(verdict(comparison).startswith("MISSES") for comparison in comparisons)
    found = {**as_json(comparisons), "quick": options.quick, "bars_missed": missed}
    return conclude(found, Bars() if options.quick else Bars(most={"bars_missed": 0}))


def measure_all(options: EngineOptions, peer: ModuleType | None) -> Iterator[Comparison]:
    """Measure the workloads asked for."""
    for name in options.workloads:
        workload = SIZES[name][options.quick]
        if isinstance(workload, Encoder):
            yield from measure_encoder(options, workload, peer)
        elif peer is not None:
            for num_stages in options.stages:
                yield from measure_torchgpipe(options, workload, peer, num_stages)


if __name__ == "__main__":
    sys.exit(main())
