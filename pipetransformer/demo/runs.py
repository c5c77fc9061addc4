"""Train the demo's donor, and fine-tune it in three ways that take the same samples and rates.

unfrozen   nothing frozen, in a pipeline of two
elastic    layers freeze, the pipeline becomes two replicas, frozen layers' outputs are cached
plain      layers freeze in a loop by hand, in one process without the memory limit
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from autodp import EpochSampler, shuffled
from freeze import FreezeSchedule
from pipetransformer.config import cosine_with_warmup
from pipetransformer.demo.digits import BATCH_SIZE, build_model, load_digits_split
from pipetransformer.demo.results import Result, RunQueueWait
from pipetransformer.model import adamw
from pipetransformer.trainer import Trainer

NUM_SLOTS = 2
MICRO_BATCHES = 4
MAX_GRAD_NORM = 1.0
LEARNING_RATE = 6e-4
MEMORY_LIMIT_BYTES = 14_500_000
"""Modelled bytes a slot may use: the whole model with AdamW does not fit, half of it does."""
FROZEN_BY_EPOCH = (0,) * 8 + (4,) * 3 + (6,)
"""Frozen layers by epoch; the last entry holds on, with a quarter of the blocks active."""
DONOR_EPOCHS = 16


def rate_factor(step: float, max_steps: int) -> float:
    """Return the factor on LEARNING_RATE, in all runs: layers calm earlier than by a cosine."""
    warmup = (step + 1) / (0.1 * max_steps + 1)
    return float(min(warmup, (1 - min(step / max_steps, 1.0)) ** 2))


@dataclass(frozen=True)
class DemoSettings:
    """Hold what the command line sets.

    Args:
        folder: where results go; an earlier demo's are replaced.
        epochs: of fine-tuning.
        seed: of weights and order.
    """

    folder: str = "runs/demo"
    epochs: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"--epochs is {self.epochs}; give at least 1")

    @property
    def donor(self) -> Path:
        """Return where the weights are that fine-tuning starts from."""
        return Path(self.folder).parent / "demo-donor.safetensors"

    def folder_of(self, run: str) -> Path:
        """Return where a run's results go; the elastic one's are the demo's own."""
        return Path(self.folder) / ("" if run == "elastic" else run)


def train_donor(settings: DemoSettings) -> None:
    """Train on the digits 0-4 and keep the weights, without the head."""
    train, test = load_digits_split(range(5))
    with Trainer(
        build_model(5, seed=0),
        train,
        eval_dataset=test,
        optimizer=adamw(LEARNING_RATE),
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


def fine_tuned(settings: DemoSettings) -> nn.Module:
    """Build what all runs begin with: the donor's blocks, and a new head for ten digits.

    Raises:
        ValueError: the donor is of another model, as an earlier version's demo trained.
    """
    model = build_model(10, settings.seed)
    donor = safetensors.torch.load_file(settings.donor)
    if donor.keys() != {name for name in model.state_dict() if "head" not in name}:
        raise ValueError(
            f"{settings.donor} is of another model than this demo's; delete it, and the demo "
            "trains it anew"
        )
    model.load_state_dict(donor, strict=False)
    return model


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
    """Fine-tune as "unfrozen" or "elastic" by the Trainer, and write what it came to."""
    folder = settings.folder_of(run)
    train, test = load_digits_split()
    with Trainer(
        fine_tuned(settings),
        train,
        eval_dataset=test,
        optimizer=adamw(LEARNING_RATE),
        **trainer_settings(settings, run),
    ) as trainer:
        with RunQueueWait() as held_up:
            report = trainer.fit()
        trainer.save_model(folder / "model.safetensors")
        if trainer.is_main_process:
            Result(report.seconds, report.metrics["accuracy"], held_up.share).write(folder)


class PlainLoop:
    """Train all blocks in this process, and keep what the frozen ones gave for each sample.

    Args:
        model: the demo's ViT.
        images, labels: (N, 1, 32, 32) float32 and (N,) int64, that train.
    """

    def __init__(self, model: Any, images: Tensor, labels: Tensor) -> None:
        self.model, self._images, self._labels = model, images, labels
        self._kept, self._num_frozen = images, 0

    def freeze(self, num_frozen: int) -> None:
        """Freeze so many bottom blocks, and run all samples through them once."""
        if num_frozen == self._num_frozen:
            return
        self._num_frozen = num_frozen
        self.model.patch_embed.requires_grad_(False)
        self.model.pos_embed.requires_grad_(False)
        self.model.blocks[:num_frozen].requires_grad_(False)
        with torch.no_grad():
            self._kept = torch.cat([self._below(part) for part in self._images.split(BATCH_SIZE)])

    def set_gradients(self, ids: list[int]) -> None:
        """Set the clipped gradients of a batch."""
        model, rows = self.model, self._kept[ids]
        if not self._num_frozen:
            rows = self._below(rows)
        hidden = model.norm(model.blocks[self._num_frozen :](rows))
        output = model.head(model.fc_norm(hidden.mean(dim=1)))
        nn.functional.cross_entropy(output, self._labels[ids]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)

    def _below(self, images: Tensor) -> Tensor:
        hidden = self.model.patch_embed(images) + self.model.pos_embed
        rows: Tensor = self.model.blocks[: self._num_frozen](hidden)
        return rows


def train_by_hand(settings: DemoSettings, run: str) -> None:
    """Fine-tune by the plain loop, and write what it came to."""
    train, test = load_digits_split()
    images, labels = test.tensors
    model = fine_tuned(settings)
    loop = PlainLoop(model, *train.tensors)
    with RunQueueWait() as held_up:
        seconds = _train(loop, settings, len(train))
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == labels).double().mean().item()
    Result(seconds, accuracy, held_up.share).write(settings.folder_of(run))


def _train(loop: PlainLoop, settings: DemoSettings, num_samples: int) -> float:
    """Return the seconds of all steps."""
    optimizer = adamw(LEARNING_RATE)(list(loop.model.named_parameters()))
    sampler = EpochSampler(num_samples, shuffled(num_samples, seed=settings.seed))
    starts = range(0, num_samples, BATCH_SIZE)
    step, max_steps = 0, settings.epochs * len(starts)
    begin = time.perf_counter()
    for epoch in range(settings.epochs):
        loop.freeze(FROZEN_BY_EPOCH[min(epoch, len(FROZEN_BY_EPOCH) - 1)])
        for start in starts:
            optimizer.zero_grad(set_to_none=True)
            loop.set_gradients(sampler.global_batch(epoch, start, BATCH_SIZE).tolist())
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * rate_factor(step, max_steps)
            optimizer.step()
            step += 1
    return time.perf_counter() - begin
