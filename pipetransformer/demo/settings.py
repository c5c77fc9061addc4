"""Say what the demo trains, and what its runs have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autodp import EpochSampler, shuffled
from pipetransformer.config import polynomial_with_warmup

NUM_SLOTS = 2
NUM_BLOCKS = 8
NUM_PATCHES = 16
BATCH_SIZE = 32
MICRO_BATCHES = 4
MAX_GRAD_NORM = 1.0
LEARNING_RATE = 6e-4
MEMORY_LIMIT_BYTES = 14_500_000
"""Modelled bytes a slot may use: the whole model with AdamW does not fit, half of it does."""
FROZEN_BY_EPOCH = (0,) * 10 + (4,) * 3 + (6,)
"""Frozen layers by epoch; the last entry holds on, with a quarter of the blocks active."""
DONOR_FILE = "demo-donor.safetensors"


@dataclass(frozen=True)
class Run:
    """Describe a run.

    Args:
        title: in the table.
        is_limited: whether each process keeps to the memory limit.
        num_slots: processes, on as many cores; one process takes all cores.
    """

    title: str
    is_limited: bool
    num_slots: int = NUM_SLOTS


RUNS = {
    "unfrozen": Run("nothing frozen, a pipeline of two", True),
    "torch": Run("layers freeze, torch's pipeline of two", True),
    "elastic": Run("layers freeze, elastic", True),
    "plain": Run("layers freeze, a loop and a cache by hand", False, 1),
}


@dataclass(frozen=True)
class DemoSettings:
    """Hold what the command line sets.

    Args:
        folder: where results go; an earlier demo's are replaced.
        epochs: of fine-tuning.
        seed: of weights and order.
    """

    folder: str = "runs/demo"
    epochs: int = 24
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"--epochs is {self.epochs}; give at least 1")

    @property
    def donor(self) -> Path:
        """Return where the weights are that fine-tuning starts from."""
        return Path(self.folder).parent / DONOR_FILE

    def folder_of(self, run: str) -> Path:
        """Return where a run's results go; the elastic one's are the demo's own."""
        return Path(self.folder) / ("" if run == "elastic" else run)


def num_frozen_in(epoch: int) -> int:
    """Return how many layers are frozen in an epoch."""
    return FROZEN_BY_EPOCH[min(epoch, len(FROZEN_BY_EPOCH) - 1)]


def batches_of(num_samples: int, seed: int) -> Callable[[int], list[list[int]]]:
    """Return epoch -> the samples of its steps, as a Trainer of this seed takes them."""
    sampler = EpochSampler(num_samples, shuffled(num_samples, seed=seed))
    starts = range(0, num_samples, BATCH_SIZE)
    return lambda epoch: [
        sampler.global_batch(epoch, start, BATCH_SIZE).tolist() for start in starts
    ]


rate_factor = polynomial_with_warmup()
"""(step, max_steps) -> factor on LEARNING_RATE, in all runs."""
