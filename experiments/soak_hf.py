"""Train a small BERT as a script written for transformers.Trainer does; see `soak_programs`."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainingArguments

from experiments.random_models import bert
from experiments.soak_programs import (
    BATCH_SIZE,
    EPOCHS,
    FROZEN_BY_EPOCH,
    LEARNING_RATE,
    LENGTHS,
    NUM_SAMPLES,
    SEED,
    Ledger,
    Lengths,
)
from freeze import FreezeSchedule
from pipetransformer import Loss
from pipetransformer.hf import Trainer

_WORDS, _TOKENS = 50, 8


def train_by_script(folder: Path, num_ranks: int) -> None:
    """Train as a script written for transformers.Trainer does."""
    ledger = Ledger(folder)
    _meet(folder, num_ranks)
    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=BATCH_SIZE // num_ranks,
        num_train_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        seed=SEED,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        save_total_limit=2,
        load_best_model_at_end=True,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = make_rows()
    trainer = Trainer(
        model=make_bert(),
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows,
        freeze=FreezeSchedule(FROZEN_BY_EPOCH),
        loss_fn=Loss(ledger.loss, is_exact=True),
        learning_rate_schedule=ledger.schedule,
        plan=Lengths(LENGTHS[num_ranks]),
        freeze_interval_steps=1,
    )
    with closing(trainer):
        trainer.train()


def _meet(folder: Path, num_ranks: int) -> None:
    """Make the default group as TrainingArguments would, but through a file of this attempt."""
    path = folder / f"store-{os.environ['PIPETRANSFORMER_RESTART_COUNT']}"
    rank, store = int(os.environ["RANK"]), dist.FileStore(str(path), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


def make_bert() -> nn.Module:
    """Build a BERT with dropout, the same weights on every rank."""
    sizes = {"vocab_size": _WORDS, "intermediate_size": 32, "max_position_embeddings": _TOKENS}
    return bert(16, 4, heads=2, dropout=0.1, num_labels=3, **sizes)


def make_rows() -> list[dict[str, Any]]:
    """Make sentences; labels are (2,): the class and the sample's own id."""
    sentences = torch.randint(
        1, _WORDS, (NUM_SAMPLES, _TOKENS), generator=torch.Generator().manual_seed(1)
    )
    return [
        {
            "input_ids": words,
            "attention_mask": [1] * _TOKENS,
            "labels": [sum(words) % 3, own],
        }
        for own, words in enumerate(sentences.tolist())
    ]
