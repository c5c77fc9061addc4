"""Train the donor, and fine-tune it with the Trainer."""

from __future__ import annotations

from typing import Any

import safetensors.torch

from freeze import FreezeSchedule
from pipetransformer.config import cosine_with_warmup
from pipetransformer.demo.digits import build_model, fine_tuned, load_digits_split
from pipetransformer.demo.held_up import HeldUp
from pipetransformer.demo.results import Result
from pipetransformer.demo.settings import (
    BATCH_SIZE,
    FROZEN_BY_EPOCH,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MEMORY_LIMIT_BYTES,
    MICRO_BATCHES,
    NUM_SLOTS,
    DemoSettings,
    rate_factor,
)
from pipetransformer.model import adamw
from pipetransformer.trainer import Trainer

DONOR_LEARNING_RATE = 6e-4
DONOR_EPOCHS = 16


def train_donor(settings: DemoSettings) -> None:
    """Train on the digits 0-4 and keep the weights, without the head."""
    train, test = load_digits_split(range(5))
    with Trainer(
        build_model(5, seed=0),
        train,
        eval_dataset=test,
        optimizer=adamw(DONOR_LEARNING_RATE),
        epochs=DONOR_EPOCHS,
        global_batch_size=BATCH_SIZE,
        evaluate_every_epochs=DONOR_EPOCHS,
        learning_rate_schedule=cosine_with_warmup(),
        max_grad_norm=MAX_GRAD_NORM,
        device="cpu",
        label="donor",
    ) as trainer:
        trainer.fit()
        state = {n: t.clone() for n, t in trainer.state_dict().items() if "head" not in n}
        if trainer.is_main_process:
            settings.donor.parent.mkdir(parents=True, exist_ok=True)
            safetensors.torch.save_file(state, settings.donor)


def trainer_settings(settings: DemoSettings, run: str) -> dict[str, Any]:
    """Return the Trainer's settings of "unfrozen" or "elastic": the same but for freezing."""
    is_fixed = run == "unfrozen"
    return {
        "freeze": None if is_fixed else FreezeSchedule(FROZEN_BY_EPOCH),
        "pipeline_length": NUM_SLOTS if is_fixed else None,
        "micro_batches": MICRO_BATCHES if is_fixed else None,
        "device": "cpu",
        "epochs": settings.epochs,
        "global_batch_size": BATCH_SIZE,
        "seed": settings.seed,
        "memory_limit_bytes": MEMORY_LIMIT_BYTES,
        "learning_rate_schedule": rate_factor,
        "max_grad_norm": MAX_GRAD_NORM,
        "evaluate_every_epochs": settings.epochs,
        "folder": settings.folder_of(run),
        "checkpoint_every_epochs": settings.epochs,
        "keep_checkpoints": 1,
        "label": run,
    }


def train_here(settings: DemoSettings, run: str) -> None:
    """Fine-tune as "unfrozen" or "elastic", and write what it came to."""
    folder = settings.folder_of(run)
    train, test = load_digits_split()
    with Trainer(
        fine_tuned(settings),
        train,
        eval_dataset=test,
        optimizer=adamw(LEARNING_RATE),
        **trainer_settings(settings, run),
    ) as trainer:
        with HeldUp() as held_up:
            report = trainer.fit()
        trainer.save_model(folder / "model.safetensors")
        if trainer.is_main_process:
            Result(report.seconds, report.metrics["accuracy"], held_up.share).write(folder)
