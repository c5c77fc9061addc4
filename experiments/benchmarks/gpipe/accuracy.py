"""Train a small ResNet on CIFAR-10 in a pipeline and without: accuracy must not tell which.

Run it as `python -m experiments.benchmarks.gpipe.accuracy --data cifar10.npz [--seeds 0 1 2]`; the
last line is JSON. Batch norm normalises by the samples it is given, so that micro-batches learn
slightly differently; with deferred batch norm the running statistics that evaluation uses are
those of whole mini-batches again. The mini-batch, the order and the schedule are the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torchvision.transforms import v2

from autopipe import GPipe
from experiments.benchmarks.gpipe.resnet import resnet
from experiments.finetune.series import markdown, spread
from experiments.tasks.images import Images, read_split

BATCH, RATE, CHUNKS, PARTITIONS = 128, 0.1, 4, 2
NORMAL = ((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
"""Mean and deviation of CIFAR-10's channels."""
ROWS: Mapping[str, Mapping[str, Any] | None] = {
    "without a pipeline": None,
    "K = 2, M = 1": {"chunks": 1},
    "K = 2, M = 4, deferred batch norm": {"chunks": CHUNKS, "deferred_batch_norm": True},
    "K = 2, M = 4": {"chunks": CHUNKS},
}
"""How each row wraps the model."""


Tensors = tuple[Tensor, Tensor]
"""(N, 3, 32, 32) normalised images and their (N,) classes."""


def tensors(data: str, split: str, most: int | None) -> Tensors:
    """Read images into memory."""
    found = read_split("cifar10", data, split, most)
    common = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    images = Images(found.encoded, found.labels, v2.Compose([*common, v2.Normalize(*NORMAL)]))
    stacked = torch.stack([images[index][0] for index in range(len(images))])
    return stacked, torch.from_numpy(found.labels)


def train(
    data: Tensors, test: Tensors, row: Mapping[str, Any] | None, *, seed: int, epochs: int
) -> float:
    """Return the test accuracy in percent after so many epochs."""
    torch.manual_seed(seed)
    layers = resnet((1, 1, 1, 1), num_channels=16, num_classes=10)
    model: nn.Module = layers
    if row is not None:
        half = len(layers) // PARTITIONS
        model = GPipe(layers, [half, len(layers) - half], checkpoint="never", **row)
    (inputs, targets), num = data, len(data[1])
    optimizer = SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = epochs * (num // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    chance = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(num, generator=chance)
        flips = torch.rand(num, generator=chance) < 0.5
        for ids in order.split(BATCH)[: num // BATCH]:
            batch = inputs[ids]
            batch = batch.flip(3).where(flips[ids][:, None, None, None], batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), targets[ids]).backward()
            optimizer.step()
            schedule.step()
    return accuracy(model, *test)


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Return the share of samples that are classified rightly, in percent."""
    model.eval()
    right = sum(
        int((model(batch).argmax(dim=1) == wanted).sum())
        for batch, wanted in zip(inputs.split(512), targets.split(512), strict=True)
    )
    return 100 * right / len(targets)


def main() -> None:
    """Print the table and, last, one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="CIFAR-10, as for vit")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--samples", type=int, default=8000, help="to train on")
    options = parser.parse_args()
    data = tensors(options.data, "train", options.samples)
    test = tensors(options.data, "test", None)
    found: dict[str, list[float]] = {name: [] for name in ROWS}
    seconds: dict[str, list[float]] = {name: [] for name in ROWS}
    for seed in options.seeds:
        for name, row in ROWS.items():
            begin = time.perf_counter()
            found[name].append(train(data, test, row, seed=seed, epochs=options.epochs))
            seconds[name].append(time.perf_counter() - begin)
            done = f"{found[name][-1]:.2f} % in {seconds[name][-1]:.0f} s"
            print(f"seed {seed}, {name}: {done}", flush=True)
    print(table(found, seconds))
    print(json.dumps({"benchmark": "gpipe_accuracy", "accuracy": found, "seconds": seconds}))


def table(found: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]]) -> str:
    """Return accuracies and seconds as a markdown table."""
    rows = [["", "accuracy %", "s"]]
    rows += [
        [name, spread(values, 2), f"{statistics.median(seconds[name]):.0f}"]
        for name, values in found.items()
    ]
    return markdown(rows)


if __name__ == "__main__":
    main()
