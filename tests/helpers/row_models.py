"""Build tiny models and data sets whose rows may be wrong, and their nearest neighbours.

images ┐                    blocks, DEPTH of them frozen
texts ─┴► embed ─► 0 ─► block 0 ─► 1 ─► block 1 ─► 2 ─► block 2 ─► 3 ─► block 3 ─► 4 ─► head

At each number a model may change its hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WIDTH, LENGTH, WORDS, NUM_CLASSES = 8, 5, 20, 3
NUM_SAMPLES, NUM_BLOCKS, DEPTH = 12, 4, 2

ROWS_RUN: list[int] = []
"""Samples that each forward of a frozen block was given. No attribute, as `attach` may look."""

Change = Callable[[Any, Tensor], Tensor]
Make = Callable[[], Any]


class Block(nn.Module):
    """Add what a linear layer makes of the hidden state."""

    def __init__(self, norm: Make = nn.Identity) -> None:
        super().__init__()
        self.norm, self.linear, self.factor = norm(), nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, hidden: Tensor) -> Any:
        if not any(parameter.requires_grad for parameter in self.parameters()):
            ROWS_RUN.append(len(hidden))
        return hidden + self.factor * torch.tanh(self.linear(self.norm(hidden)))


def block_with(norm: Make) -> Make:
    return partial(Block, norm=norm)


def words() -> nn.Module:
    return nn.Embedding(WORDS, WIDTH)


def patches() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def one_patch() -> nn.Module:
    """Take (N, WIDTH), which are too few dimensions for an image: they are read."""
    return nn.Sequential(nn.Unflatten(1, (1, WIDTH)), patches())


class Model(nn.Module):
    """Classify texts by four blocks; images where `embed` takes them.

    Args:
        blocks: make all four, or each.
        changes: made to the hidden state before a block, by its index. NUM_BLOCKS is the head's,
            and -1 changes the input.
    """

    def __init__(
        self, *blocks: Make, embed: Make = words, changes: Mapping[int, Change] | None = None
    ) -> None:
        super().__init__()
        makers = blocks if len(blocks) == NUM_BLOCKS else (blocks or (Block,)) * NUM_BLOCKS
        self.embed = embed()
        self.blocks = nn.ModuleList(make() for make in makers)
        self.head, self.scale = nn.Linear(WIDTH, NUM_CLASSES), 1.0
        self.changes = dict(changes or {})

    def changed(self, place: int, hidden: Tensor) -> Tensor:
        change = self.changes.get(place)
        return hidden if change is None else change(self, hidden)

    def run(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        for place, block in enumerate(self.blocks):
            hidden = block(self.changed(place, hidden))
        hidden = self.changed(NUM_BLOCKS, hidden)
        if mask is None:
            return self.head(hidden.mean(1))
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.scale * self.embed(self.changed(-1, x)))


def model(*blocks: Make, **options: Any) -> Make:
    return partial(Model, *blocks, **options)


def picture_model(*blocks: Make, **options: Any) -> Make:
    return partial(Model, *blocks, embed=patches, **options)


class TextModel(Model):
    """Take texts by the names that transformers has for them; labels may act on them."""

    def __init__(
        self, *, divides: bool = False, labels_at: Literal["below", "above", ""] = ""
    ) -> None:
        super().__init__()
        self.divides, self.labels_at = divides, labels_at

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        hidden = self.embed(input_ids)
        if self.divides:
            hidden = hidden / input_ids.shape[1]
        if self.labels_at == "below" and labels is not None:
            hidden = hidden + labels[:, None, None]
        logits = self.run(hidden, attention_mask)
        if self.labels_at == "above" and labels is not None:
            logits = logits * (1 + labels[:, None])
        return logits


class MaskedModel(Model):
    """Take no labels."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.run(self.embed(input_ids), attention_mask)


class Pictures(Model):
    """Take images by the names that transformers has for them."""

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.run(self.embed(pixel_values))


class OverBatch(nn.Module):
    """Take off the mean of a batch."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0)


class BatchNorm(nn.BatchNorm1d):
    """Normalise features over batch and positions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(WIDTH, **options)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


class NormedWords(nn.Sequential):
    """Embed words, and normalise them over the batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(words(), BatchNorm(**options))


class NormBehind(Model):
    """Normalise below the blocks, by a module that is registered behind them."""

    def __init__(self, norm: Make) -> None:
        super().__init__(embed=patches, changes={0: lambda own, hidden: own.norm(hidden)})
        self.norm = norm()


class Paired(Block):
    """Return a number beside the hidden state."""

    is_constant = False

    def forward(self, hidden: Tensor) -> tuple[Tensor, float]:
        new = super().forward(hidden)
        return new, 0.5 if self.is_constant else float(new.detach().mean())


class ConstantPaired(Paired):
    is_constant = True


class ModelOfPairs(Model):
    """Hand each block's number to the next block, or all to the head."""

    def __init__(self, block: Make, *, hands_on: bool = False) -> None:
        super().__init__(block)
        self.hands_on = hands_on

    def forward(self, x: Tensor) -> Tensor:
        hidden, numbers = self.embed(x), [0.0]
        for block in self.blocks:
            hidden, number = block(hidden + numbers[-1] if self.hands_on else hidden)
            numbers.append(number)
        return self.head(hidden.mean(1)) * (1 if self.hands_on else 1 + sum(numbers))


class Routed(Block):
    """Leave a part of the loss in an attribute."""

    aux: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        new = super().forward(hidden)
        self.aux = new.pow(2).mean()
        return new


def standard_over(dim: int, _: Model, hidden: Tensor) -> Tensor:
    return (hidden - hidden.mean(dim, keepdim=True)) / hidden.std(dim, keepdim=True)


def when_training(change: Change) -> Change:
    return lambda own, hidden: change(own, hidden) if own.training else hidden


@when_training
def greater_in_training(_: Any, hidden: Tensor) -> Tensor:
    return hidden * 1.5


@when_training
def noisy(_: Any, hidden: Tensor) -> Tensor:
    return hidden + 0.1 * torch.randn_like(hidden)


@when_training
def noisy_by_its_own(own: Any, hidden: Tensor) -> Tensor:
    noise = torch.randn(hidden.shape, generator=own.generator, dtype=hidden.dtype)
    return hidden + 0.1 * noise


@when_training
def counted(own: Any, hidden: Tensor) -> Tensor:
    own.counter += 1
    return hidden


@when_training
def counted_plainly(own: Any, hidden: Tensor) -> Tensor:
    own.num_calls += 1
    return hidden


@when_training
def averaged(own: Any, hidden: Tensor) -> Tensor:
    own.counter.mul_(0.9).add_(0.1 * hidden.detach().mean())
    return hidden


def dropped(own: Any, hidden: Tensor) -> Tensor:
    return F.dropout(hidden, 0.5, own.training)


class Items:
    """Give tuples of columns' entries; a class that nobody knows."""

    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(column[index] for column in self.columns)


class Named(Items):
    """Give mappings."""

    def __init__(self, **columns: Any) -> None:
        super().__init__(*columns.values())
        self.names = tuple(columns)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(zip(self.names, super().__getitem__(index), strict=True))


class Nested(Items):
    """Give an input, and a tuple of targets."""

    def __getitem__(self, index: int) -> Any:
        first, *others = super().__getitem__(index)
        return first, tuple(others)


class Ragged(Items):
    """Give texts of unequal lengths."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids, mask, label = super().__getitem__(index)
        return {"input_ids": ids[mask == 1], "labels": label}


class Drawing(Items):
    """Draw a number that has no effect."""

    def __getitem__(self, index: int) -> Any:
        torch.rand(1)
        return super().__getitem__(index)


class OwnDrawing(Items):
    """Draw such a number from a generator of its own."""

    def __init__(self, *columns: Any) -> None:
        super().__init__(*columns)
        self.generator = torch.Generator().manual_seed(2)

    def __getitem__(self, index: int) -> Any:
        torch.rand(1, generator=self.generator)
        return super().__getitem__(index)


class Folder(Items):
    """Hold images and labels as torchvision's data sets do."""

    def __init__(self, images: Any, targets: Any) -> None:
        super().__init__(images, targets)
        self.images, self.targets = images, targets


class Flipped(Folder):
    """Flip few images at random."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return (image.flip(-1) if self.is_flipped(index) else image), label

    def is_flipped(self, _: int) -> bool:
        return float(torch.rand(())) < 0.02


class OwnFlipped(Flipped):
    """Draw from a generator of its own."""

    def __init__(self, images: Any, targets: Any) -> None:
        super().__init__(images, targets)
        # Whose first numbers show no flip to who looks at 16 samples twice.
        self.generator = np.random.default_rng(4)

    def is_flipped(self, _: int) -> bool:
        return self.generator.random() < 0.02


class FixedFlipped(Flipped):
    """Flip the same few images each time."""

    def is_flipped(self, index: int) -> bool:
        return index % 50 == 7


class Pair(NamedTuple):
    """Be a batch of names."""

    x: Tensor
    y: Tensor


@dataclass
class Held:
    """Be a batch of attributes."""

    x: Tensor
    y: Tensor


def entries(num: int = NUM_SAMPLES) -> dict[str, Tensor]:
    """Make texts, images, masks and labels, the same on every call."""
    generator = torch.Generator().manual_seed(1)
    return {
        "ids": torch.randint(1, WORDS, (num, LENGTH), generator=generator),
        "images": torch.randn(num, 2, WIDTH, generator=generator, dtype=torch.float64),
        "mask": (torch.arange(LENGTH) < (torch.arange(num) % 3 + 3)[:, None]).long(),
        "labels": torch.arange(num) % NUM_CLASSES,
        "others": (torch.arange(num) // 2) % NUM_CLASSES,
    }


def columns(*names: str) -> list[Tensor]:
    return [entries()[name] for name in names]


def texts() -> Any:
    return TensorDataset(*columns("ids", "labels"))


def images() -> Any:
    return TensorDataset(*columns("images", "labels"))


def ragged() -> Any:
    return Ragged(*columns("ids", "mask", "labels"))


def labelled_texts() -> Any:
    ids, mask, labels = columns("ids", "mask", "labels")
    return Named(input_ids=ids, attention_mask=mask, labels=labels)


def labelled_images() -> Any:
    return Named(pixel_values=entries()["images"], labels=entries()["labels"])
