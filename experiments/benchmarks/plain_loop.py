"""The loop a user would write instead: plain PyTorch, with the same layers frozen.

Two tasks on which it is measured against the Trainer: the demo's ViT on digits, and a BERT of
MiniLM's shape on sentences.
"""

from __future__ import annotations

import csv
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from experiments.benchmarks.rounds import num_cores, seconds_of
from experiments.digits import build_model, load_digits_split
from pipetransformer import adamw
from pipetransformer.adapters import adapt

BATCH_SIZE = 32
NUM_SAMPLES = 37 * BATCH_SIZE
SENTENCE_LENGTH = 32


@dataclass(frozen=True)
class RivalTask:
    """State what both train.

    Args:
        name: as in the table.
        num_layers: layers that can freeze.
        build: makes the model; every call the same one.
        dataset: NUM_SAMPLES samples, as the Trainer takes them.
        loss_of: the loss that the model gives a batch of the plain loop.
    """

    name: str
    num_layers: int
    build: Callable[[], nn.Module]
    dataset: Dataset[Any]
    loss_of: Callable[[nn.Module, Any], Tensor]


def digits_task() -> RivalTask:
    """Return the demo's ViT, 12 blocks, on scikit-learn's digits."""
    train, _ = load_digits_split()

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    return RivalTask(
        "ViT on digits",
        12,
        lambda: build_model(10, seed=0),
        TensorDataset(*(tensor[:NUM_SAMPLES] for tensor in train.tensors)),
        loss_of,
    )


def sentences_task(minilm: str | None, sst2: str | None) -> RivalTask:
    """Return MiniLM on SST-2, or where they are not given random ones of their shapes.

    Args:
        minilm: a folder with a model and its tokenizer.
        sst2: GLUE's folder of SST-2, with train.tsv.
    """

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        loss = model(**batch).loss
        assert isinstance(loss, Tensor)
        return loss

    dataset = _tokenized(minilm, sst2) if minilm and sst2 else _random_sentences()
    name = "MiniLM on SST-2" if minilm and sst2 else "BERT of MiniLM's shape on random tokens"
    return RivalTask(name, 6, lambda: _build_minilm(minilm), dataset, loss_of)


class PlainLoop:
    """Train in the calling process, on as many threads as torch has.

    Args:
        task: what to train.
        learning_rate: AdamW's.
    """

    def __init__(self, task: RivalTask, *, learning_rate: float) -> None:
        self.model = task.build().train()
        self._loss_of = task.loss_of
        self._optimizer = adamw(learning_rate)(list(self.model.named_parameters()))
        self._batches = self._endless(
            DataLoader(task.dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
        )

    def freeze(self, num_frozen: int) -> None:
        """Freeze the bottom layers, as anyone would: no gradients, no dropout."""
        for sublayer in adapt(self.model).sublayers:
            if sublayer.layer < num_frozen:
                sublayer.module.requires_grad_(False).eval()

    def step(self) -> float:
        """Train on the next batch; return its loss."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss_of(self.model, next(self._batches))
        loss.backward()
        self._optimizer.step()
        return loss.item()

    @staticmethod
    def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
        while True:
            yield from loader


def plain_seconds(frozen_by_step: Sequence[int], *, num_timed: int = 20) -> float:
    """Extrapolate what a plain loop on all cores takes for the demo's steps.

    Args:
        frozen_by_step: layers frozen in every step.
        num_timed: steps whose median is taken, at each number of frozen layers.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_cores())
    loop, total_s = PlainLoop(digits_task(), learning_rate=1e-3), 0.0
    for frozen, number in sorted(Counter(frozen_by_step).items()):
        loop.freeze(frozen)
        loop.step()
        times_s = [seconds_of(loop.step) for _ in range(num_timed)]
        total_s += number * statistics.median(times_s)
    torch.set_num_threads(before)
    return total_s


def _build_minilm(folder: str | None) -> nn.Module:
    # transformers takes seconds to import, and only those who build the model need it.
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    if folder is not None:
        model: nn.Module = BertForSequenceClassification.from_pretrained(folder, num_labels=2)
        return model
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    return BertForSequenceClassification(config)


def _tokenized(minilm: str, sst2: str) -> Dataset[Any]:
    from transformers import AutoTokenizer

    with open(Path(sst2) / "train.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1 : NUM_SAMPLES + 1]
    tokens = AutoTokenizer.from_pretrained(minilm)(
        [sentence for sentence, _ in rows],
        padding="max_length",
        truncation=True,
        max_length=SENTENCE_LENGTH,
        return_tensors="pt",
    )
    return _Items({**tokens, "labels": torch.tensor([int(label) for _, label in rows])})


def _random_sentences() -> Dataset[Any]:
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_SAMPLES, SENTENCE_LENGTH)
    return _Items(
        {
            "input_ids": torch.randint(30522, shape, generator=generator),
            "attention_mask": torch.ones(shape, dtype=torch.int64),
            "labels": torch.randint(2, shape[:1], generator=generator),
        }
    )


class _Items(Dataset[dict[str, Tensor]]):
    """Give samples as mappings, as data sets of transformers do."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}
