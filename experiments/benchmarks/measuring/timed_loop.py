"""The loop a user would write instead: plain PyTorch, with the same layers frozen.

Two tasks on which it is measured against the Trainer: the demo's ViT on digits, and a BERT of
MiniLM's shape on sentences. It sees the samples in the Trainer's order, so that losses can be
compared.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autodp import EpochSampler, shuffled
from pipetransformer import adamw
from pipetransformer.config import CollateFunction
from pipetransformer.demo import build_model, load_digits_split
from pipetransformer.feed import SizedDataset
from pipetransformer.model import adapt

BATCH_SIZE = 32
NUM_SAMPLES = 37 * BATCH_SIZE
SENTENCE_LENGTH, LONGEST_SENTENCE = 32, 128
"""Tokens of all sentences, and of the longest where each batch is padded to its own."""


@dataclass(frozen=True)
class RivalTask:
    """State what both train; it can be sent to another process.

    Args:
        name: as in the table.
        num_layers: layers that can freeze.
        build: makes the model; every call the same one.
        dataset: as the Trainer takes it; a multiple of the batch size.
        loss_of: the loss that the model gives a batch of the plain loop.
        batch_size: samples of a step.
        num_workers: processes that read ahead, each as far as DataLoader does by default.
        collate_fn: makes a batch; None stacks.
    """

    name: str
    num_layers: int
    build: Callable[[], nn.Module]
    dataset: SizedDataset
    loss_of: Callable[[nn.Module, Any], Tensor]
    batch_size: int = BATCH_SIZE
    num_workers: int = 0
    collate_fn: CollateFunction | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps of a pass over the samples."""
        return len(self.dataset) // self.batch_size


@dataclass(frozen=True)
class Sentences:
    """State on which sentences a BERT of MiniLM's shape is trained, and how they are read.

    Args:
        minilm: a folder with a model and its tokenizer; None takes random weights.
        sst2: GLUE's folder of SST-2, with train.tsv; None, or no model, takes random tokens.
        padding: "longest" pads to the longest of a batch, with transformers' collator;
            "max_length" pads all to SENTENCE_LENGTH beforehand.
        num_workers: processes that read ahead.
    Raises:
        ValueError: random tokens, which are of one length, are to be padded.
    """

    minilm: str | None = None
    sst2: str | None = None
    padding: Literal["longest", "max_length"] = "max_length"
    num_workers: int = 0

    def __post_init__(self) -> None:
        if self.padding == "longest" and not (self.minilm and self.sst2):
            raise ValueError(
                "padding is 'longest', but random tokens are all of one length; give the folders "
                "of MiniLM, with its tokenizer, and of SST-2, or choose 'max_length'"
            )


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a model and its sentences; see `Sentences`."""
    parser.add_argument("--minilm", help="folder with MiniLM and its tokenizer")
    parser.add_argument("--sst2", help="GLUE's folder of SST-2")


def classes_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of images' classes."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that transformers' model returns."""
    loss = model(**batch).loss
    assert isinstance(loss, Tensor)
    return loss


def digits_task(num_samples: int = NUM_SAMPLES) -> RivalTask:
    """Return the demo's ViT, wider and of 12 blocks, on scikit-learn's digits, whole batches."""
    train, _ = load_digits_split()
    return RivalTask(
        "ViT on digits",
        12,
        partial(build_model, 10, seed=0, width=192, num_blocks=12),
        TensorDataset(*(tensor[:num_samples] for tensor in train.tensors)),
        classes_loss,
    )


def sentences_task(sentences: Sentences) -> RivalTask:
    """Return MiniLM on SST-2, or where they are not given random ones of their shapes."""
    dataset: SizedDataset = _random_sentences()
    name, collate_fn = "BERT of MiniLM's shape on random tokens", None
    if sentences.minilm and sentences.sst2:
        name = "MiniLM on SST-2"
        dataset, collate_fn = _tokenized(sentences.minilm, sentences.sst2, sentences.padding)
    return RivalTask(
        name,
        6,
        partial(_build_minilm, sentences.minilm),
        dataset,
        own_loss,
        num_workers=sentences.num_workers,
        collate_fn=collate_fn,
    )


class TimedLoop:
    """Train in the calling process, on as many threads as torch has.

    Args:
        task: what to train.
        learning_rate: AdamW's.
        max_grad_norm: which a step's gradient is clipped at; None leaves it as it is.
    """

    def __init__(
        self, task: RivalTask, *, learning_rate: float, max_grad_norm: float | None = None
    ) -> None:
        self.model = task.build().train()
        self._loss_of, self._max_grad_norm = task.loss_of, max_grad_norm
        self._optimizer = adamw(learning_rate)(list(self.model.named_parameters()))
        self._batches = iter(
            DataLoader(
                task.dataset,  # type: ignore[arg-type]
                batch_sampler=_TrainersOrder(len(task.dataset), task.batch_size),
                num_workers=task.num_workers,
                collate_fn=task.collate_fn,
            )
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
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self._optimizer.step()
        return loss.item()


class _TrainersOrder(Iterable[list[int]]):
    """Give the samples of every step without an end, as a Trainer of seed 0 takes them.

    An epoch's end so lets the plain loop's workers read on, as it does the Trainer's.
    """

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self._num_samples, self._batch_size = num_samples, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        num, size = self._num_samples, self._batch_size
        sampler = EpochSampler(num, shuffled(num, seed=0))
        for epoch in itertools.count():
            for first in range(0, num, size):
                yield sampler.global_batch(epoch, first, size).tolist()


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


def _tokenized(
    minilm: str, sst2: str, padding: str
) -> tuple[SizedDataset, CollateFunction | None]:
    """Return the samples, and what makes a batch of those that are not padded yet."""
    from transformers import AutoTokenizer, DataCollatorWithPadding

    with open(Path(sst2) / "train.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1 : NUM_SAMPLES + 1]
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    pads_later = padding == "longest"
    tokens = tokenizer(
        [sentence for sentence, _ in rows],
        padding=False if pads_later else padding,
        truncation=True,
        max_length=LONGEST_SENTENCE if pads_later else SENTENCE_LENGTH,
        return_tensors=None if pads_later else "pt",
    )
    labels = [int(label) for _, label in rows]
    if not pads_later:
        return _Items({**tokens, "labels": torch.tensor(labels)}), None
    columns = {**tokens, "labels": labels}
    samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return samples, DataCollatorWithPadding(tokenizer)


def _random_sentences() -> SizedDataset:
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
