"""The loop a user would write instead: plain PyTorch, with the same layers frozen.

Two tasks on which it is measured against the Trainer: the demo's ViT on digits, and a BERT of
MiniLM's shape on sentences. It sees the samples in the Trainer's order, so that losses can be
compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autodp import EpochSampler, shuffled
from experiments.gpu_check.workloads import LoopCase, Rows, own_loss
from experiments.random_models import bert
from pipetransformer import adamw
from pipetransformer.demo import build_model, load_digits_split
from pipetransformer.model import adapt

LEARNING_RATE, BATCH_SIZE = 5e-5, 32
NUM_SAMPLES = 37 * BATCH_SIZE
SENTENCE_LENGTH = 32
"""In tokens."""


def classes_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of images' classes."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def digits_task(num_samples: int = NUM_SAMPLES) -> LoopCase:
    """Return the demo's ViT, wider and of 12 blocks, on scikit-learn's digits, whole batches."""
    train, _ = load_digits_split()
    images = TensorDataset(*(tensor[:num_samples] for tensor in train.tensors))
    build = partial(build_model, 10, seed=0, width=192, num_blocks=12)
    return LoopCase(
        "ViT on digits", build, "blocks", images, classes_loss, BATCH_SIZE, 8, None,
        learning_rate=LEARNING_RATE,
    )  # fmt: skip


def sentences_task() -> LoopCase:
    """Return a BERT of MiniLM's shape on random tokens, which take as long as real sentences."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_SAMPLES, SENTENCE_LENGTH)
    sentences = Rows(
        {
            "input_ids": torch.randint(30522, shape, generator=generator),
            "attention_mask": torch.ones(shape, dtype=torch.int64),
            "labels": torch.randint(2, shape[:1], generator=generator),
        }
    )
    build = partial(bert, 384, 6, heads=12, dropout=0.1)
    return LoopCase(
        "BERT of MiniLM's shape on random tokens", build, "bert.encoder.layer", sentences,
        own_loss, BATCH_SIZE, 4, None, learning_rate=LEARNING_RATE,
    )  # fmt: skip


class TimedLoop:
    """Train in the calling process, on as many threads as torch has.

    Args:
        task: what to train.
        max_grad_norm: which a step's gradient is clipped at; None leaves it as it is.
    """

    def __init__(self, task: LoopCase, *, max_grad_norm: float | None = None) -> None:
        self.model = task.build().train()
        self._loss_of, self._max_grad_norm = task.loss_of, max_grad_norm
        self._optimizer = adamw(task.learning_rate)(list(self.model.named_parameters()))
        self._batches = iter(
            DataLoader(
                task.rows,
                batch_sampler=_TrainersOrder(len(task.rows), task.batch_size),
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
    """Give the samples of every step without an end, as a Trainer of seed 0 takes them."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self._num_samples, self._batch_size = num_samples, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        num, size = self._num_samples, self._batch_size
        sampler = EpochSampler(num, shuffled(num, seed=0))
        for epoch in itertools.count():
            for first in range(0, num, size):
                yield sampler.global_batch(epoch, first, size).tolist()
