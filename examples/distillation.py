"""Train a small network to answer as a large one, its teacher, which sees each digit once.

    python examples/distillation.py

Rows hold what the teacher returns. Around a language model, put `pipetransformer.TopLogits`.
"""

import argparse
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import pipetransformer as pt


def network(width: int) -> nn.Sequential:
    torch.manual_seed(0)  # The same weights, and the same order of digits, in both trainings.
    first, second = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
    head = nn.Linear(64 * width, 10)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), head)


def train(model: nn.Module, loader: Any, teacher: Any = None, batches: Any = iter) -> Tensor:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for epoch in range(4):
        start = time.perf_counter()
        for images, labels in batches(loader):
            with torch.no_grad():
                told = labels if teacher is None else teacher(images).softmax(1)
            losses.append(cross_entropy(model(images), told))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {losses[-1]:.3f}, {time.perf_counter() - start:.1f} s")
    return torch.stack(losses)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--teacher_width", type=int, default=96)
    args = parser.parse_args(arguments)
    images, labels = load_digits(return_X_y=True)
    scans = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    loader = DataLoader(TensorDataset(scans, torch.tensor(labels)), 32, shuffle=True)
    teacher = network(args.teacher_width)
    train(teacher, loader)
    plain, student = train(network(4), loader, teacher.requires_grad_(False)), network(4)
    with pt.attach(student, parts=[teacher]) as cached:
        change = (train(student, loader, teacher, cached.epoch) - plain).abs().max()
    print(f"{cached.stats.hits} rows read in epoch 3; losses differ by {change:.1e}")


if __name__ == "__main__":
    main()
