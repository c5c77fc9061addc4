"""Train a head on a frozen backbone of timm; it sees each image once, also those of evaluations.

python examples/backbone.py                        # images of ten shades, made here
python examples/backbone.py cifar10 --pretrained   # with train/<class>/<image>, and test/
"""

import argparse
import time
from typing import Any

import timm
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import pipetransformer as pt


def build(pretrained: bool) -> nn.Sequential:
    torch.manual_seed(0)  # The same weights, and the same order of images, in both trainings.
    below: Any = timm.create_model("resnet18", pretrained=pretrained, num_classes=0)
    return nn.Sequential(below.requires_grad_(False).eval(), nn.Linear(below.num_features, 10))


def samples(folder: str | None, split: str) -> Any:
    if folder is not None:
        return datasets.ImageFolder(f"{folder}/{split}", transforms.ToTensor())
    return [(torch.randn(3, 32, 32) / 4 + i % 10, i % 10) for i in range(320)]


def train(model: Any, loader: Any, held_out: Any, batches: Any, evaluation: Any) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=1e-2)
    for epoch in range(3):
        start = time.perf_counter()
        for images, labels in batches(loader):
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            right = torch.cat([(model(x).argmax(1) == y).float() for x, y in evaluation(held_out)])
        print(f"epoch {epoch}: {right.mean():.1%} right, {time.perf_counter() - start:.1f} s")
    return model[1].weight


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data_dir", nargs="?", help="else images are made")
    parser.add_argument("--pretrained", action="store_true")
    args = parser.parse_args(arguments)
    data = [samples(args.data_dir, split) for split in ("train", "test")]
    loaders = DataLoader(data[0], 32, shuffle=True), DataLoader(data[1], 32)
    plain, model = train(build(args.pretrained), *loaders, iter, iter), build(args.pretrained)
    with pt.attach(model, parts=[model[0]]) as cached:
        change = (train(model, *loaders, cached.epoch, cached.evaluation) - plain).abs().max()
    print(f"{cached.stats.hits} images' rows read in epoch 2; weights differ by {change:.1e}")


if __name__ == "__main__":
    main()
