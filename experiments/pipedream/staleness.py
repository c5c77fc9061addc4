"""Train with and without staleness, each at its own best rate, and compare what they reach.

What a rule learns follows from its formula alone, so time on this machine does not matter here. A
plain loop stands for all ways that flush: their weights are equal. Each finished run is a line of
a file; a command that was ended goes on behind the last one.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from autopipe import StashedPipeline
from autopipe.balance import balance_by_time
from experiments.finetune.series import markdown
from experiments.pipedream.networks import build, loss_fn
from pipetransformer.demo import load_digits_split

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "sgd_plain": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
}
"""By name; the plain one has no momentum."""
PLAIN = "flushed"
RULES = (PLAIN, "stashed", "vertical_sync")
"""With two stages and one micro-batch 2BW is vertical sync; with more it needs more of them."""


@dataclass(frozen=True)
class Run:
    """Say what is trained, how, and for how long.

    Args:
        warm_up: epochs in which the rate rises from zero; then it falls to zero by a cosine.
        rule: one of `RULES`.
        stages: the plain loop has one.
    """

    network: str
    optimizer: str
    epochs: int
    warm_up: int
    batch_size: int = 64
    rule: str = PLAIN
    stages: int = 1
    rate: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Reached:
    """Hold a run's accuracies behind each epoch, in percent.

    Args:
        tuning: on half of the test images, by which rates are chosen.
        accuracies: on the other half.
    """

    run: Run
    tuning: list[float]
    accuracies: list[float]


def compare(
    first: Run, *, stages: int = 2, rates: Sequence[float], seeds: Sequence[int], path: Path
) -> list[Reached]:
    """Train each rule at all rates with the first seed, and at the best one with the others.

    Args:
        first: what all runs have in common.
        stages: of the rules that do not flush.
        path: of the file of finished runs, which need not exist.
    """
    done = read(path)

    def reached(run: Run) -> Reached:
        if run not in done:
            done[run] = train(run)
            with path.open("a") as file:
                file.write(json.dumps(asdict(done[run])) + "\n")
        return done[run]

    found = []
    for rule in RULES:
        num = 1 if rule == PLAIN else stages
        own = replace(first, rule=rule, stages=num, seed=seeds[0])
        tried = [reached(replace(own, rate=rate)) for rate in rates]
        best = max(tried, key=lambda one: one.tuning[-1]).run
        found += [reached(replace(best, seed=seed)) for seed in seeds]
    return found


def read(path: Path) -> dict[Run, Reached]:
    """Return the finished runs of a file."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    runs = [Run(**one.pop("run")) for one in found]
    return {run: Reached(run, **one) for run, one in zip(runs, found, strict=True)}


def train(run: Run) -> Reached:
    """Train one network by one rule."""
    (x, y), (test_x, test_y) = (split.tensors for split in load_digits_split())
    network = build(run.network, seed=run.seed)
    num_steps = len(x) // run.batch_size
    warm_up, last = run.warm_up * num_steps, run.epochs * num_steps

    def share(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / (last - warm_up))

    def optimizer(own: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made = OPTIMIZERS[run.optimizer](own, lr=run.rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(made, share)
        # A stage updates on its own, so its rate follows its own steps.
        made.register_step_post_hook(lambda *_: schedule.step())
        return made

    learn, trained = _learner(run, network, optimizer, x[: run.batch_size])
    shuffle = torch.Generator().manual_seed(run.seed)
    tuning, accuracies = [], []
    for _ in range(run.epochs):
        order = torch.randperm(len(x), generator=shuffle)[: num_steps * run.batch_size]
        learn([(x[ids], y[ids]) for ids in order.split(run.batch_size)])
        right = _is_right(trained, test_x, test_y)
        tuning.append(100 * float(right[::2].float().mean()))
        accuracies.append(100 * float(right[1::2].float().mean()))
    return Reached(run, tuning, accuracies)


Batches = list[tuple[Tensor, Tensor]]


def _learner(
    run: Run,
    network: nn.Sequential,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    batch: Tensor,
) -> tuple[Callable[[Batches], object], nn.Module]:
    """Return what trains on an epoch's batches, and what is trained."""
    if run.rule != PLAIN:
        pipeline = StashedPipeline(
            network,
            balance_by_time(run.stages, network, batch),
            optimizer=optimizer,
            devices=["cpu"] * run.stages,
            versions=run.rule,
        )
        return lambda batches: pipeline.train_on(batches, loss_fn), pipeline
    plain = optimizer(network.parameters())

    def learn(batches: Batches) -> None:
        for x, y in batches:
            plain.zero_grad()
            loss_fn(network(x), y).backward()
            plain.step()

    return learn, network


def _is_right(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    network.eval()
    with torch.no_grad():
        found = network(x).argmax(1) == y
    network.train()
    return found


def table(found: Sequence[Reached], *, margin: float = 1.0) -> str:
    """Return a markdown table; the target is the plain loop's mean accuracy less a margin."""
    base = [one for one in found if one.run.rule == PLAIN]
    target = statistics.mean(one.accuracies[-1] for one in base) - margin
    rows = [
        ["rule", "stages", "best rate", "accuracy, each seed", "mean", f"epochs to {target:.1f} %"]
    ]
    for rule in RULES:
        own = [one for one in found if one.run.rule == rule]
        last = [one.accuracies[-1] for one in own]
        rows.append(
            [
                rule.replace("_", " "),
                str(own[0].run.stages),
                f"{own[0].run.rate:g}",
                ", ".join(f"{value:.1f}" for value in last),
                f"{statistics.mean(last):.1f}",
                ", ".join(_epochs_to(one, target) for one in own),
            ]
        )
    return markdown(rows)


def _epochs_to(reached: Reached, target: float) -> str:
    return next(
        (str(n) for n, value in enumerate(reached.accuracies, start=1) if value >= target), "-"
    )
