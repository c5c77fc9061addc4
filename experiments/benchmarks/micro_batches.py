"""Measure what a micro-batch costs besides its layers, and whether the planner's M is the best.

    python -m experiments.benchmarks.micro_batches cpu
    python -m experiments.benchmarks.micro_batches threads
    python -m experiments.benchmarks.micro_batches sweep --length 2

`cpu` takes a step's CPU time by M, of one process, beside a plain loop over as many micro-batches:
what is left is our Python. `threads` does so for a process that drives K stages by threads, as
torch's Pipe does, on layers too small to compute anything. `sweep` trains on K processes with M
from K to 6 K, in random order, and then holds the planner's M against the best of them, in turn.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn
from torch.utils.data import TensorDataset

from autopipe.gpipe import GPipe
from autopipe.plan import PipelinePlan, PlanRequest, plan_pipeline
from autopipe.profile import Profile
from experiments.benchmarks.measuring.processes import found_by
from experiments.benchmarks.measuring.rounds import bootstrap
from experiments.benchmarks.plan import Point, Tour
from pipetransformer import Trainer, adamw

BATCH = 48
_WIDTH = 16
_ROUNDS, _FEW_ROUNDS, _WARM_UP = 28, 6, 2


def cpu_by_count(counts: Sequence[int] = (1, 12, 24, BATCH)) -> dict[int, tuple[float, float]]:
    """Return a step's CPU seconds by M: the Trainer's, and a plain loop's."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(10 * BATCH, 3, 16, 16, generator=generator)
    labels = torch.arange(len(images)) % 10
    with ExitStack() as stack:
        ways: dict[tuple[int, int], Callable[[], object]] = {}
        for count in counts:
            trainer = Trainer(
                _small_vit(), TensorDataset(images, labels), optimizer=adamw(1e-4), epochs=99,
                global_batch_size=BATCH, micro_batches=count, evaluate_every_epochs=0,
                progress=False, device="cpu",
            )  # fmt: skip
            ways[count, 0] = stack.enter_context(trainer).step
            ways[count, 1] = partial(_plain_step(images[:BATCH], labels[:BATCH]), count)
        taken = _cpu_s(ways, _ROUNDS)
    return {count: (taken[count, 0], taken[count, 1]) for count in counts}


def cpu_by_threads(
    lengths: Sequence[int] = (1, 8), counts: Sequence[int] = (16, BATCH)
) -> dict[tuple[int, int], float]:
    """Return the CPU seconds of forward and backward by K and M, of 12 blocks of width 16."""
    hidden = torch.randn(BATCH, 5, _WIDTH, generator=torch.Generator().manual_seed(0))
    ways: dict[tuple[int, int], Callable[[], object]] = {}
    for length in lengths:
        for count in counts:
            blocks = nn.Sequential(*(Block(_WIDTH, 2, qkv_bias=True) for _ in range(12)))
            balance = [12 // length + (part < 12 % length) for part in range(length)]
            devices = ["cpu"] * length
            pipe = GPipe(blocks, balance, devices=devices, chunks=count, checkpoint="never")
            ways[length, count] = partial(_forward_backward, pipe, hidden)
    return _cpu_s(ways, _FEW_ROUNDS)


def _forward_backward(model: nn.Module, hidden: torch.Tensor) -> None:
    model(hidden).sum().backward()


def _small_vit() -> nn.Module:
    return VisionTransformer(
        img_size=16, patch_size=8, embed_dim=_WIDTH, depth=2, num_heads=2, num_classes=10
    )


def _plain_step(images: torch.Tensor, labels: torch.Tensor) -> Callable[[int], None]:
    model = _small_vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(count: int) -> None:
        for some, classes in zip(images.chunk(count), labels.chunk(count), strict=True):
            (nn.functional.cross_entropy(model(some), classes) / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _cpu_s(
    ways: Mapping[tuple[int, int], Callable[[], object]], num_rounds: int
) -> dict[tuple[int, int], float]:
    """Return each way's median CPU seconds, of rounds in which all run in turn."""
    taken: dict[tuple[int, int], list[float]] = {name: [] for name in ways}
    for number in range(_WARM_UP + num_rounds):
        for name, run in ways.items():
            start_s = time.process_time()
            run()
            if number >= _WARM_UP:
                taken[name].append(time.process_time() - start_s)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def slope(values: Iterable[tuple[int, float]]) -> float:
    """Return the slope of the line that fits points best."""
    x, y = zip(*values, strict=True)
    return statistics.linear_regression(x, y).slope


def sweep(length: int, num_rounds: int, num_pairs: int) -> dict[str, Any]:
    """Train with M from K to 6 K, then compare the planner's M with the best; K processes."""
    points = [Point(0, length, number * length, "1f1b") for number in range(1, 7)]
    tour = Tour((0,), num_epochs=6 * (num_rounds * len(points) + 2 * num_pairs + 2))

    def choose(profile: Profile, request: PlanRequest) -> PipelinePlan:
        return plan_pipeline(profile, replace(request, lengths=(length,)))

    seen: dict[int, list[float]] = {point.micro_batches: [] for point in points}
    predicted: dict[int, float] = {}
    shuffle = random.Random(0)
    with tour.trainer as trainer:
        for _ in range(num_rounds):
            trainer.measure()
            for point in shuffle.sample(points, len(points)):
                plan, seconds = tour.visit(0, point)
                predicted[point.micro_batches] = plan.predicted_step_s
                seen[point.micro_batches].append(statistics.median(seconds))
        best = min(seen, key=lambda count: statistics.median(seen[count]))
        chosen, ratios = 0, []
        for _ in range(num_pairs):
            plan, ours = tour.visit(0, None, choose)
            chosen = plan.num_micro_batches
            _, theirs = tour.visit(0, Point(0, length, best, "1f1b"))
            ratios.append(statistics.median(ours) / statistics.median(theirs))
    return {"seen": seen, "predicted": predicted, "best": best, "chosen": chosen, "ratios": ratios}


def _print_sweep(found: dict[str, Any]) -> None:
    print("  M  predicted ms  measured ms (lowest to highest)")
    for count, seconds in found["seen"].items():
        low, mid, high = min(seconds), statistics.median(seconds), max(seconds)
        print(
            f"{count:3}{found['predicted'][count] * 1e3:14.1f}{mid * 1e3:13.1f} "
            f"({low * 1e3:.1f} to {high * 1e3:.1f})"
        )
    ratio = bootstrap(torch.tensor(found["ratios"]).numpy())
    print(
        f"the planner's M = {found['chosen']} takes {ratio.median:.3f} [{ratio.low:.3f}, "
        f"{ratio.high:.3f}] of the fastest of the sweep, M = {found['best']}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(prog="experiments.benchmarks.micro_batches")
    parser.add_argument("what", choices=("cpu", "threads", "sweep"))
    parser.add_argument("--length", type=int, default=2, help="K, and the processes of the sweep")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.what == "cpu":
        for count, (ours, plain) in (by_count := cpu_by_count()).items():
            print(f"M = {count:2}: {ours * 1e3:7.2f} ms, a plain loop {plain * 1e3:7.2f} ms")
        extra = slope((count, ours - plain) for count, (ours, plain) in by_count.items())
        own = slope((count, plain) for count, (_, plain) in by_count.items())
        print(f"a micro-batch: {own * 1e3:.2f} ms its layers, {extra * 1e3:.2f} ms besides")
    elif options.what == "threads":
        for (length, count), seconds in cpu_by_threads().items():
            print(f"K = {length}, M = {count:2}: {seconds / count * 1e3:.1f} ms a micro-batch")
    else:
        asked = options.length, options.rounds, options.pairs
        _print_sweep(found_by(sweep, asked, num_slots=options.length))


if __name__ == "__main__":
    main()
