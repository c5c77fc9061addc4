"""Build sentences and feeds that cache them, and say what fetches must give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import autocache.sample_checks
from autocache.prefix_cache import CacheStats
from autopipe.loss import Loss
from pipetransformer import adamw
from pipetransformer.config import TrainConfig
from pipetransformer.feed import node_store as store_choice
from pipetransformer.feed.frozen_prefix import FrozenPrefix
from pipetransformer.feed.sample_feed import SampleFeed, samples_of
from pipetransformer.feed.samples import Batch
from pipetransformer.model import Task, adapt
from pipetransformer.processes.world import World
from tests.helpers.adapted import LENGTH
from tests.helpers.models import tiny_data, tiny_model

NUM_SENTENCES = 24


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentences of 1 to LENGTH tokens, padded at their ends."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, 20, (NUM_SENTENCES, LENGTH), generator=generator)
        lengths = torch.arange(NUM_SENTENCES) % LENGTH + 1
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        self.reads = 0

    def __len__(self) -> int:
        return NUM_SENTENCES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        label = self.ids[index].sum() % 3
        return {"input_ids": self.ids[index], "attention_mask": self.mask[index], "labels": label}


ALONE = World(0, 1, 1, torch.device("cpu"), None, owned=False)


IDS = torch.tensor([5, 0, 9, 3, 7])


def put_half_on_device(patch: pytest.MonkeyPatch) -> None:
    """Have `cache_device="auto"` put half of the rows on the device, and half into the file."""
    patch.setattr(store_choice, "_num_on_device", lambda world, layout, num, *_: num // 2)


def leave_rows_unchecked(patch: pytest.MonkeyPatch) -> None:
    """Check a row in a billion."""
    patch.setattr(autocache.sample_checks, "_DENSE_CHECKS", 1 << 30)
    patch.setattr(autocache.sample_checks, "_SPARSE_CHECKS", 1 << 30)


class Counted(Dataset[tuple[Tensor, Tensor]]):
    """Note which samples are read; `noise` makes each read another."""

    def __init__(self, noise: float = 0.0) -> None:
        self.data = tiny_data()
        self.noise = noise
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        x, y = self.data[index]
        return x + self.noise * torch.rand_like(x), y


class Feed:
    """Hold a prefix over the tiny model, its dataset and its model, and fetch with counts."""

    def __init__(
        self,
        folder: Path,
        world: World = ALONE,
        *,
        model: nn.Sequential | None = None,
        noise: float = 0.0,
        **settings: Any,
    ) -> None:
        self.layered = adapt((model or tiny_model()).eval())
        self.data = Counted(noise)
        config = TrainConfig(**{"cache_folder": str(folder), "prefix_chunk": 4, **settings})
        loss_fn = Loss(nn.CrossEntropyLoss())
        task = Task(self.layered, loss_fn, adamw(), config, frozenset())
        self.prefix = FrozenPrefix(task)
        keeps = config.cache_views or 1
        self.samples = SampleFeed(
            self.prefix, world, samples_of(self.prefix.task, self.data), keeps=keeps
        )

    def set_depth(self, depth: int, *, use_cache: bool = True, on_stage_0: bool = True) -> None:
        self.prefix.set_depth(depth, on_stage_0=on_stage_0, use_cache=use_cache)
        self.samples.follow_prefix()

    def fetch(self, ids: Tensor = IDS) -> tuple[Batch, list[int], CacheStats]:
        """Return the batch, the samples the dataset was asked for, and the cache's counts."""
        self.data.read.clear()
        batch = self.samples.rows(0).fetch(ids)
        return batch, sorted(self.data.read), self.samples.take_stats()

    def expect(self, depth: int, ids: Tensor = IDS) -> Tensor:
        """Compute the activations behind `depth` layers without a cache."""
        with torch.no_grad():
            hidden = self.data.data.tensors[0][ids]
            for layer in range(depth):
                hidden = self.layered.sublayers[layer].module(hidden)
        return hidden


def counts(stats: CacheStats) -> tuple[int, int, int]:
    return stats.hits, stats.upgrades, stats.misses


def assert_fetch(feed: Feed, depth: int, expected: tuple[int, int, int]) -> None:
    """Fetch; compare the values with an uncached run's, and the counts with those expected."""
    batch, read, stats = feed.fetch()
    torch.testing.assert_close(batch["hidden"], feed.expect(depth), rtol=1e-12, atol=1e-12)
    assert torch.equal(batch["y"], feed.data.data.tensors[1][IDS])
    assert counts(stats) == expected
    assert read == (sorted(IDS.tolist()) if expected[2] else [])
