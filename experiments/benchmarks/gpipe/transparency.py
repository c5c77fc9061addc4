"""Train a ResNet in a pipeline and without: its test error must not tell which.

    python -m experiments.benchmarks.gpipe.transparency --data cifar10.npz --out errors.json

The plain runs are torchgpipe's first table (manual, 2.4.1) at a size for cores: 8 bottleneck
blocks on CIFAR-10 for ResNet-101 on ImageNet, two partitions. Rates grow with
the batch, as Goyal et al. have them; order, rates and batch are the same in a row. What is in
--out is not run again, so that runs can be made in pieces; the last line is what is in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD

from autopipe import GPipe
from experiments.benchmarks.gpipe.resnet import resnet
from experiments.finetune.series import markdown, spread
from experiments.tasks.image_files import read_split
from experiments.tasks.images import Images

BLOCKS, CHANNELS = (2, 2, 2, 2), 8
RATE, RATE_BATCH, EPOCHS = 0.1, 128, 8
MEAN, DEVIATION = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
PUBLISHED = {64: "256: 21.99 ± 0.13", 128: "1K: 22.24 ± 0.19", 256: "4K: 22.13 ± 0.09"}
"""torchgpipe's errors of ResNet-101, by batch size; each beside a batch of ours."""
PUBLISHED_PLAIN = {64: "22.02 ± 0.11", 128: "22.04 ± 0.24", 256: "N/A"}
"""Those of nn.DataParallel."""

Tensors = tuple[Tensor, Tensor]
"""(N, 3, 32, 32) normalised images and their (N,) classes."""


def tensors(data: str, split: str, most: int) -> Tensors:
    """Read images into memory."""
    found = read_split("cifar10", data, split, most)
    images = Images(found.encoded, found.labels, np.asarray)
    pixels = torch.from_numpy(np.stack([images[index][0] for index in range(len(images))]))
    normal = (pixels / 255 - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    classes = torch.from_numpy(np.asarray(found.labels, dtype=np.int64))
    return normal.permute(0, 3, 1, 2).contiguous(), classes


def error_after_training(
    train: Tensors, test: Tensors, *, batch: int, chunks: int, seed: int
) -> float:
    """Train and return the test error in percent; `chunks` 0 is the plain model."""
    torch.manual_seed(seed)
    layers = resnet(BLOCKS, num_channels=CHANNELS, num_classes=10)
    model: nn.Module = layers
    if chunks:
        half = len(layers) // 2
        balance = [half, len(layers) - half]
        model = GPipe(layers, balance, devices=["cpu"] * 2, chunks=chunks, checkpoint="never")
    (inputs, targets), num = train, len(train[1])
    rate, steps = RATE * batch / RATE_BATCH, num // batch
    optimizer = SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=EPOCHS * steps)
    chance = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        order = torch.randperm(num, generator=chance)
        flips = torch.rand(num, generator=chance) < 0.5
        for ids in order.split(batch)[:steps]:
            images = inputs[ids]
            images = images.flip(3).where(flips[ids][:, None, None, None], images)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), targets[ids]).backward()
            optimizer.step()
            schedule.step()
    return error(model, *test)


@torch.no_grad()
def error(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Return the share of samples that are classified wrongly, in percent."""
    model.eval()
    wrong = sum(
        int((model(images).argmax(dim=1) != wanted).sum())
        for images, wanted in zip(inputs.split(512), targets.split(512), strict=True)
    )
    return 100 * wrong / len(targets)


def main() -> None:
    """Print the table and, last, one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="CIFAR-10, as for vit")
    parser.add_argument("--out", required=True, type=Path, help="errors and CPU seconds")
    parser.add_argument("--batches", type=int, nargs="+", default=list(PUBLISHED))
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 2, 4, 8], help="0: plain")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=4000, help="to train on")
    parser.add_argument("--tested", type=int, default=4000, help="samples")
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    train = tensors(options.data, "train", options.samples)
    test = tensors(options.data, "test", options.tested)
    for seed in options.seeds:
        for batch in options.batches:
            for chunks in options.chunks:
                name = f"batch {batch}, M {chunks}, seed {seed}"
                if name in found:
                    continue
                begin = time.process_time()
                percent = error_after_training(train, test, batch=batch, chunks=chunks, seed=seed)
                found[name] = (percent, time.process_time() - begin)
                print(f"{name}: {percent:.2f} % wrong, {found[name][1]:.0f} CPU s", flush=True)
                options.out.write_text(json.dumps(found))
    print(table(found, options.batches, options.chunks, options.seeds))
    print(json.dumps({"benchmark": "gpipe_transparency", "found": found}))


def table(
    found: Mapping[str, tuple[float, float]],
    batches: list[int],
    chunks: list[int],
    seeds: list[int],
) -> str:
    """Return errors with the CPU seconds of a run as a markdown table, the published beside."""
    names = ["without a pipeline" if count == 0 else f"M = {count}" for count in chunks]
    rows = [["batch", *names, "torchgpipe", "nn.DataParallel"]]
    for batch in batches:
        cells = []
        for count in chunks:
            runs = [found[f"batch {batch}, M {count}, seed {seed}"] for seed in seeds]
            seconds = statistics.median(one for _, one in runs)
            cells.append(f"{spread([one for one, _ in runs], 2)} ({seconds:.0f} s)")
        published = (PUBLISHED.get(batch, "-"), PUBLISHED_PLAIN.get(batch, "-"))
        rows.append([str(batch), *cells, *published])
    return markdown(rows)


if __name__ == "__main__":
    main()
