"""Run a tiny model over kept rows, with a setting and code of each kind that may change."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

import freeze as freezing
from pipetransformer import attach

NUM_SAMPLES, BATCH_SIZE, DEPTH = 12, 4, 2
WORDS, WIDTH, LENGTH = 20, 8, 6
CONSTANT = 1.0
"""What a forward reads outside."""


@dataclass(slots=True)
class Slots:
    factor: float = 1.0


class Plain:
    """Hold a setting that is private."""

    def __init__(self) -> None:
        self._factor = 1.0


def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda hidden: hidden * factor


def powered(hidden: Tensor, *, factor: float = 1.0) -> Tensor:
    return hidden * factor


def one() -> float:
    return 1.0


class Block(nn.Module):
    """Read a setting of each kind."""

    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.number, self._number = 1.0, 1.0
        self.several, self._several = {1.0, 2.0}, frozenset({1.0, 2.0})
        self.array, self._array = np.ones(3), np.ones(3)
        self.slots, self._slots, self.plain = Slots(), [Slots()], Plain()
        self.named, self.tensor = {"a": [1.0]}, torch.ones(2, dtype=torch.float64)
        self.cell, self.part, self.memo = scaled_by(1.0), partial(powered), lru_cache(one)
        self.scalar, self.queue = np.float32(1.0), deque([1.0])
        self.logger, self.library = logging.getLogger(__name__), np
        self.register_buffer("buffer", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def factor(self) -> float:
        own = self.number * self._number * sum(self.several) * sum(self._several)
        own *= self.array.sum() * self._array.sum() * self.slots.factor * self._slots[0].factor
        own *= self.plain._factor * self.named["a"][0] * self.shared * CONSTANT * one()
        own *= self.memo() * float(self.scalar) * self.queue[0]
        return float(own * self.tensor.sum() * self.buffer.sum() * self.passing.sum()) / 1000

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.part(self.cell(torch.tanh(self.linear(hidden)))) * self.factor()


def block_of(factor: float) -> type[Block]:
    """Return a class whose forward knows a number of the function around it."""

    class Made(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) * factor

    return Made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH + 1))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


class Texts:
    """Read texts from memory, or from a file each, and change their words."""

    def __init__(self, source: list[Any], shift: int) -> None:
        self.source, self.shift = source, shift

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        own = self.source[index]
        label, *words = np.load(own).tolist() if isinstance(own, Path) else own
        return {"input_ids": [(word + self.shift) % WORDS for word in words], "labels": label}


def padded(items: list[dict[str, Any]], *, side: str) -> dict[str, Tensor]:
    rows = []
    for item in items:
        padding = [0] * (LENGTH - len(item["input_ids"]))
        own = [*item["input_ids"]]
        rows.append(own + padding if side == "right" else padding + own)
    return {
        "input_ids": torch.tensor(rows),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


@dataclass
class Case:
    """Describe a run. A text's first number is its label.

    Args:
        folder: holds kept rows, and files of texts.
        kind: of data set: "memory", "files" or "table".
        edits: made to the model that was built.
        code: functions that take another's place while the run lasts.
    """

    folder: Path
    kind: str
    texts: list[list[int]] = field(default_factory=list)
    shift: int = 0
    side: str = "right"
    dtype: torch.dtype = torch.float64
    threads: int = 1
    order: int | None = None
    edits: list[Callable[[Any], object]] = field(default_factory=list)
    code: list[tuple[Any, str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(7)
        for _ in range(NUM_SAMPLES):
            num = draw.randint(2, LENGTH - 1)
            self.texts.append([draw.randrange(3), *(draw.randrange(WORDS) for _ in range(num))])

    def write(self) -> None:
        """Write the texts, into files whose times stay."""
        folder = self.folder / "texts"
        before = {one: one.stat() for one in folder.rglob("*")}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if self.kind == "files":
            for index, own in enumerate(self.texts):
                np.save(folder / f"{index:02}.npy", np.array(own))
        elif self.kind == "table":
            columns = {
                "input_ids": [t[1:] for t in self.texts],
                "labels": [t[0] for t in self.texts],
            }
            table = datasets.Dataset.from_dict(columns)
            table._fingerprint = "of the first content"
            table.save_to_disk(folder)
        for path, own in before.items():
            if path.exists():
                os.utime(path, ns=(own.st_atime_ns, own.st_mtime_ns))

    def run(self, *, keeps: bool) -> Outcome:
        """Train an epoch over kept rows, or by hand."""
        before = torch.get_num_threads()
        with pytest.MonkeyPatch.context() as patch:
            for change in self.code:
                patch.setattr(*change)
            torch.set_num_threads(self.threads)
            try:
                return self._run(keeps=keeps)
            finally:
                torch.set_num_threads(before)

    def _run(self, *, keeps: bool) -> Outcome:
        torch.manual_seed(0)
        model: Any = Model().to(self.dtype)
        for edit in self.edits:
            edit(model)
        optimizer = SGD([*model.blocks[DEPTH].parameters(), *model.head.parameters()], lr=0.1)
        generator = torch.Generator().manual_seed(self.order or 0)
        loader: DataLoader[Any] = DataLoader(
            self._dataset(),
            BATCH_SIZE,
            shuffle=self.order is not None,
            generator=generator,
            collate_fn=partial(padded, side=self.side),
        )
        losses, hits = [], 0
        with ExitStack() as ended:
            if keeps:
                kept = {"cache_folder": self.folder / "rows", "cache_keep": True}
                cached = ended.enter_context(attach(model, freeze=DEPTH, **kept))
            else:
                freezing.apply(model, DEPTH, layers=[*model.blocks])
            for batch in cached.epoch(loader) if keeps else loader:
                loss = F.cross_entropy(model(batch["input_ids"]), batch["labels"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            hits = cached.stats.hits if keeps else 0
        trained = [*model.blocks[DEPTH].parameters(), *model.head.parameters()]
        return Outcome(losses, [one.detach() for one in trained], hits)

    def _dataset(self) -> Any:
        folder = self.folder / "texts"
        if self.kind == "table":
            return datasets.load_from_disk(folder)
        return Texts(sorted(folder.glob("*.npy")) or self.texts, self.shift)


@dataclass
class Outcome:
    """Hold what a run came to; weights are those that train."""

    losses: list[float]
    weights: list[Tensor]
    hits: int

    def equals(self, other: Outcome) -> bool:
        """Return whether all numbers have the same bits."""
        pairs = zip(self.weights, other.weights, strict=True)
        return self.losses == other.losses and all(torch.equal(*pair) for pair in pairs)
