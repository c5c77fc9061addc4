"""Train the networks in every way on this machine, an epoch of each in turn."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.figures import new_figure, open_frame
from experiments.finetune.series import markdown
from experiments.pipedream.networks import build
from experiments.pipedream.ways import CHOICE, Setting, Way, ways
from pipetransformer.demo import load_digits_split

DATA_PARALLEL = "data parallel"


@dataclass
class Learning:
    """Hold what one way reached.

    Attributes:
        epoch_s: seconds of training of each epoch.
        accuracies: of the test set behind each epoch, in percent.
        weight_versions: most that a worker held.
    """

    name: str
    epoch_s: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    weight_versions: int = 1

    def seconds_to(self, accuracy: float) -> float | None:
        """Return the seconds of training until an accuracy was reached, if it was."""
        spent = 0.0
        for seconds, found in zip(self.epoch_s, self.accuracies, strict=True):
            spent += seconds
            if found >= accuracy:
                return spent
        return None


@dataclass(frozen=True)
class Course:
    """Say how long, and on what, is trained."""

    epochs: int
    batch_size: int
    num_samples: int | None
    seed: int
    small: bool


def train_network(name: str, setting: Setting, course: Course) -> list[Learning]:
    """Train a network in every way; what each reaches."""
    (x, y), test = (split.tensors for split in load_digits_split())
    x, y = x[: course.num_samples], y[: course.num_samples]
    make = partial(build, name, seed=course.seed, small=course.small)
    contestants = ways(make, setting, x[: course.batch_size])
    learned = {way: Learning(way) for way in contestants}
    shuffle = torch.Generator().manual_seed(course.seed)
    for _ in range(course.epochs):
        order = torch.randperm(len(x), generator=shuffle)
        # Whole batches alone: each way cuts them in its own way.
        whole = order[: len(x) // course.batch_size * course.batch_size]
        batches = [(x[ids], y[ids]) for ids in whole.split(course.batch_size)]
        for way, contestant in contestants.items():
            _train_epoch(contestant, batches, learned[way], test)
    return list(learned.values())


def _train_epoch(
    contestant: Way,
    batches: list[tuple[Tensor, Tensor]],
    learned: Learning,
    test: tuple[Tensor, ...],
) -> None:
    start = time.perf_counter()
    contestant.train_on(batches)
    learned.epoch_s.append(time.perf_counter() - start)
    learned.accuracies.append(_accuracy(contestant.network, *test))
    learned.weight_versions = contestant.weight_versions


def _accuracy(network: nn.Module, x: Tensor, y: Tensor) -> float:
    network.eval()
    with torch.no_grad():
        right = sum(
            int((network(own).argmax(1) == target).sum())
            for own, target in zip(x.split(100), y.split(100), strict=True)
        )
    network.train()
    return 100 * right / len(x)


def table(learned: list[Learning], *, samples_an_epoch: int) -> str:
    """Return a markdown table; the target is data parallel's last accuracy less half a point."""
    base = next(one for one in learned if one.name == DATA_PARALLEL)
    target = base.accuracies[-1] - 0.5
    head = ["way", "samples/s", "of data parallel", "accuracy"]
    rows = [[*head, f"s to {target:.1f} %", "weight versions"]]
    for one in learned:
        seconds, usual = statistics.median(one.epoch_s), statistics.median(base.epoch_s)
        reached = one.seconds_to(target)
        rows.append(
            [
                one.name,
                f"{samples_an_epoch / seconds:.0f}",
                f"{usual / seconds:.2f}",
                f"{one.accuracies[-1]:.1f}",
                "not reached" if reached is None else f"{reached:.1f}",
                str(one.weight_versions),
            ]
        )
    return markdown(rows)


def draw(learned: dict[str, list[Learning]], path: Path) -> None:
    """Draw each network's accuracies over the seconds of training."""
    figure = new_figure(5 * len(learned), 4)
    all_axes = figure.subplots(1, len(learned), squeeze=False)[0]
    for axes, (network, several) in zip(all_axes, learned.items(), strict=True):
        for one in several:
            if one.name == CHOICE:
                continue
            seconds = torch.tensor(one.epoch_s).cumsum(0).tolist()
            axes.plot(seconds, one.accuracies, marker=".", label=one.name)
        open_frame(axes, title=network, xlabel="seconds of training", ylabel="accuracy, %")
    all_axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def as_json(learned: dict[str, list[Learning]]) -> str:
    """Write all that was found on one line."""
    return json.dumps({name: [asdict(one) for one in own] for name, own in learned.items()})
