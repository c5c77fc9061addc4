"""Freeze and cache within a training loop of one's own.

    cached = attach(model, freeze=[0, 4, 8])
    for _ in range(3):
        for batch in cached.epoch(loader):            loader: a DataLoader, as before
            loss = model(**batch).loss                starts above the frozen blocks
            loss.backward(); optimizer.step(); optimizer.zero_grad()

`epoch` takes the samples' indices from the loader's sampler. Rows are read for samples that have
one; others are loaded, run through the frozen blocks, and stored. Optimizer, scheduler, autocast,
clipping, accumulation and wrappers stay as they are.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import freeze as freezing
from autocache import HIDDEN, CacheStats
from autopipe.loss import Loss
from pipetransformer.config import make_config
from pipetransformer.feed import (
    FrozenPrefix,
    HeldTargets,
    SampleFeed,
    check_dataset,
    first_samples,
    own_random_numbers,
    samples_of,
)
from pipetransformer.loop.served_blocks import ServedBlocks
from pipetransformer.model import Task, adamw, names_of, present, row_of
from pipetransformer.processes import World, connect

_SETTINGS = (
    "cache_folder", "cache_limit_bytes", "cache_dtype", "cache_device", "cache_check", "precision",
    "seed", "tied_weights",
)  # fmt: skip
"""Fields of `TrainConfig` that a loop may set."""

_USUAL_BATCH = 32


def attach(
    model: nn.Module,
    *,
    freeze: int | Sequence[int],
    **settings: Any,
) -> CachedLoop:
    """Have a model's forward start above its frozen blocks, on samples whose rows are cached.

    Args:
        model: what the loop calls, or what DDP or torch.compile wrap.
        freeze: how many blocks are frozen, by epoch; a number holds for all. `freeze_bottom`
            changes it between two epochs, as a policy or an advisor says.
        settings: `cache_folder`, `cache_limit_bytes`, `cache_dtype`, `cache_device`,
            `cache_check`, `precision`, `seed` and `tied_weights`, as in `TrainConfig`. Where the
            loop computes in autocast, give its dtype as `precision`.
    Raises:
        ValueError: a setting is unknown or not allowed. A model without a row of blocks is refused
            where the first epoch begins, as its samples are needed to run it.
    """
    if unknown := sorted(settings.keys() - set(_SETTINGS)):
        raise ValueError(f"unknown setting(s) {', '.join(unknown)}; known: {', '.join(_SETTINGS)}")
    make_config(settings)
    plan = [freeze] if isinstance(freeze, int) else list(freeze)
    if not plan or not all(isinstance(n, int) and n >= 0 for n in plan):
        raise ValueError(f"freeze is {freeze!r}; give a number of blocks, or one for each epoch")
    return CachedLoop(model, plan, settings)


@final
class CachedLoop:
    """Give a loop its batches; see `attach`. Use it as a context manager, or call `close`.

    Attributes:
        num_frozen: blocks that the present epoch, or the last one, has frozen.
        stats: what the last epoch found: hits, upgrades, misses, and the seconds of the cache.
    """

    def __init__(self, model: nn.Module, plan: Sequence[int], settings: Mapping[str, Any]) -> None:
        self._model, self._plan, self._settings = model, list(plan), dict(settings)
        self._epoch = self.num_frozen = 0
        self._parts: _Parts | None = None
        self._given: tuple[Any, Any] = None, None
        self.stats = CacheStats()

    def freeze_bottom(self, num_frozen: int) -> None:
        """Freeze this many blocks from the next epoch on."""
        self._plan = [*self._plan[: self._epoch], num_frozen]

    def epoch(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Freeze what this epoch freezes, and yield the loader's batches. Collective under DDP.

        Batches are as the loader makes them, with the entries that the model and its loss take.
        Images of samples that hit are zeros: nothing above the frozen blocks reads them.

        Raises:
            ValueError: the loader has no sampler of batches, or the model cannot be cut.
        """
        parts = self._start(loader)
        self.num_frozen = self._plan[min(self._epoch, len(self._plan) - 1)]
        parts.set_depth(self.num_frozen)
        if parts.feed.prefix.depth and parts.feed.may_cache:
            yield from self._cached(parts, loader)
        else:
            yield from loader
        self.stats = parts.feed.take_stats()
        self._epoch += 1

    def _cached(self, parts: _Parts, loader: DataLoader[Any]) -> Iterator[Any]:
        # A DataLoader's iterator draws this number, too: the loop's own go on as without a cache.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        sampler: Any = loader.batch_sampler
        parts.to_come.extend((self._epoch, torch.tensor(ids)) for ids in sampler)
        while parts.to_come:
            _, ids = parts.to_come[0]
            with own_random_numbers(parts.device):
                batch = parts.feed.fetch(ids, epoch=self._epoch, keeps=True)
            parts.to_come.popleft()
            rows = batch.pop(HIDDEN)
            with parts.blocks.serving(rows):
                yield parts.as_loaded(batch, len(ids))

    def _start(self, loader: DataLoader[Any]) -> _Parts:
        given = loader.dataset, loader.collate_fn
        if self._parts is None:
            self._parts, self._given = _Parts.of(self._model, loader, self._settings), given
            weakref.finalize(self, self._parts.close)
        elif any(one is not other for one, other in zip(given, self._given, strict=True)):
            raise ValueError(
                "this loader has another data set or collate_fn than that of the first epoch; "
                "attach once for each"
            )
        return self._parts

    def close(self) -> None:
        """Have the forward run from its start again, and free the rows; blocks stay frozen."""
        if self._parts is not None:
            self._parts.close()

    def __enter__(self) -> CachedLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Parts:
    """Hold what one model and one loader need."""

    task: Task
    world: World
    feed: SampleFeed
    blocks: ServedBlocks
    to_come: deque[tuple[int, Tensor]]
    example: Mapping[str, Tensor]
    as_tuple: bool
    device: torch.device

    @staticmethod
    def of(model: nn.Module, loader: DataLoader[Any], settings: Mapping[str, Any]) -> _Parts:
        dataset: Any = loader.dataset
        check_dataset(dataset, "the loader's dataset")
        sampler: Any = loader.batch_sampler
        if sampler is None:
            raise ValueError("the loader makes no batches (batch_size=None); give it a batch size")
        collate = None if loader.collate_fn is default_collate else loader.collate_fn
        config = make_config(
            {
                **settings,
                "collate_fn": collate,
                "num_workers": loader.num_workers,
                # Of a sampler that does not say it, batches are run in chunks of the most usual.
                "global_batch_size": getattr(sampler, "batch_size", None) or _USUAL_BATCH,
                "remove_unused_columns": False,
            }
        )
        example = first_samples(
            dataset,
            names_of(model),
            collate_fn=collate,
            drops_unknown=False,
            seed=config.seed,
        )
        layered = present(model, example, F.cross_entropy, unties=config.tied_weights == "untie")
        trainable = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
        task = Task(layered, Loss(F.cross_entropy), adamw(), config, trainable)
        samples = samples_of(task, dataset, needs_targets=False)
        if "cache_check" not in settings and not HeldTargets(samples).knows():
            # A corrected label is seen in its sample alone, so each sample is read.
            task = replace(task, config=replace(config, cache_check="all"))
        device = next(model.parameters()).device
        world = connect(device.type, timeout_s=config.setup_timeout_s)
        to_come: deque[tuple[int, Tensor]] = deque()
        feed = SampleFeed(
            FrozenPrefix(task),
            world,
            samples,
            to_come=lambda: tuple(to_come),
        )
        with own_random_numbers(device):
            feed.look_for_randomness()
        return _Parts(
            task,
            world,
            feed,
            ServedBlocks(row_of(layered)),
            to_come,
            example,
            isinstance(dataset[0], (tuple, list)),
            device,
        )

    def set_depth(self, num_frozen: int) -> None:
        """Freeze blocks, and have rows of that depth."""
        model, row = self.task.model, row_of(self.task.model)
        if num_frozen > model.num_layers:
            raise ValueError(
                f"freeze asks for {num_frozen} blocks, but the model has {model.num_layers}"
            )
        depth = self.task.prefix_depth(num_frozen)
        if depth == self.feed.prefix.depth and self.feed.prefix.generation:
            return
        self.blocks.give_back()
        freezing.apply(model.model, num_frozen, layers=row.blocks)
        self._freeze_like_the_first_block(num_frozen)
        self.feed.prefix.set_depth(depth, on_stage_0=True, use_cache=depth > 0)
        with own_random_numbers(self.device):
            self.feed.follow_prefix()
        self.blocks.set_depth(depth)

    def _freeze_like_the_first_block(self, num_frozen: int) -> None:
        """Freeze what frozen blocks read, but `freeze.apply` leaves: a learned bias, say."""
        model = self.task.model
        tied = model.shared_above(num_frozen)
        keeps = tied if self.task.config.tied_weights == "train" else frozenset()
        for name, index in model.owners.items():
            if model.sublayers[index].layer < num_frozen and name not in keeps:
                tensor = model.tensor(name)
                if isinstance(tensor, nn.Parameter):
                    tensor.requires_grad_(False)
                    tensor.grad = None

    def as_loaded(self, batch: dict[str, Tensor], num: int) -> Any:
        """Return a batch in the loader's shape, with zeros for inputs that nothing reads."""
        for name, example in self.example.items():
            if name not in batch and name in self.task.model.inputs:
                batch[name] = example.new_zeros(()).expand(num, *example.shape[1:])
        if not self.as_tuple:
            return batch
        model = self.task.model
        return [batch[name] for name in (*model.inputs[:1], *model.targets)]

    def close(self) -> None:
        """Give blocks their own forward back, and free the rows."""
        self.blocks.give_back()
        self.feed.close()
        self.world.close()
