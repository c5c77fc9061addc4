"""Show what a loop of one's own has: two lines, and rows that a later run reads.

loop   the lower blocks are frozen, and run at every step
rows   the same loop with two lines more; their rows are kept
kept   another learning rate, from these rows
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import freeze
from pipetransformer.demo.digits import BATCH_SIZE, load_digits_split
from pipetransformer.demo.results import Result, RunQueueWait
from pipetransformer.demo.runs import LEARNING_RATE, DemoSettings, fine_tuned
from pipetransformer.loop import attach

NUM_FROZEN, NUM_EPOCHS = 6, 6
RATES = {"loop": LEARNING_RATE, "rows": LEARNING_RATE, "kept": 2 * LEARNING_RATE}


def train_in_loops(settings: DemoSettings) -> None:
    """Train the upper blocks in each loop, and write what it came to."""
    train, test = load_digits_split()
    images, labels = test.tensors
    folder = settings.folder_of("rows")
    found = dict[str, list[float]]()
    for run, rate in RATES.items():
        torch.manual_seed(settings.seed)  # Of the order of samples, too.
        model, start = fine_tuned(settings), time.perf_counter()
        loader = DataLoader(train, BATCH_SIZE, shuffle=True)
        with RunQueueWait() as held_up:
            if run == "loop":
                freeze.apply(model, NUM_FROZEN)
                found[run] = _trained(model, rate, partial(iter, loader))
            else:
                with attach(
                    model, freeze=NUM_FROZEN, cache_folder=folder, cache_keep=True
                ) as cached:
                    found[run] = _trained(model, rate, partial(cached.epoch, loader))
        seconds = time.perf_counter() - start
        with torch.no_grad():
            right = model.eval()(images).argmax(dim=1) == labels
        pairs = zip(found[run], found["loop"], strict=True)
        differ = max(abs(mine - other) for mine, other in pairs)
        result = Result(seconds, right.double().mean().item(), held_up.share, differ)
        result.write(settings.folder_of(run))


def _trained(
    model: nn.Module, rate: float, epoch: Callable[[], Iterable[Sequence[Tensor]]]
) -> list[float]:
    """Train on the batches of each epoch, and return the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=rate), list[float]()
    for _ in range(NUM_EPOCHS):
        for images, labels in epoch():
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses
