"""Read samples that are augmented at random as the Trainer does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autodp import mix_seed
from pipetransformer.feed import SizedDataset


@dataclass(frozen=True)
class Views:
    """Hold a data set's views one behind the other: sample i's view v has number v * N + i.

    It follows from the seed, v and i alone, where the data set draws from torch.
    """

    dataset: SizedDataset
    seed: int

    def __getitem__(self, number: int) -> Any:
        view, index = divmod(number, len(self.dataset))
        with torch.random.fork_rng([]):  # Dropout's random numbers go on where they were.
            torch.default_generator.manual_seed(mix_seed(self.seed, view, index))
            return self.dataset[index]
