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
from pipetransformer.loop.given_batch import GivenBatch, marks, unread
from pipetransformer.loop.served_blocks import ServedBlocks
from pipetransformer.model import Task, adamw, names_of, present, refuse_wrapper, row_of
from pipetransformer.processes import World, connect

_SETTINGS = (
    "cache_folder", "cache_keep", "cache_fingerprint", "cache_limit_bytes", "cache_dtype",
    "cache_device", "cache_check", "prefix_chunk", "precision", "seed", "tied_weights",
)  # fmt: skip
"""Fields of `TrainConfig` that a loop may set."""

_USUAL_BATCH = 32

_MOST_ROUNDS = 100
"""How often an epoch may give each sample, on average."""


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
        TypeError: the model is a wrapper of torch's.
        ValueError: a setting is unknown or not allowed. A model without a row of blocks is refused
            where the first epoch begins, as its samples are needed to run it.
    """
    if unknown := sorted(settings.keys() - set(_SETTINGS)):
        raise ValueError(f"unknown setting(s) {', '.join(unknown)}; known: {', '.join(_SETTINGS)}")
    make_config(settings)
    refuse_wrapper(model)
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
        self._num_begun = self.num_frozen = 0
        self._parts: _Parts | None = None
        self._given: tuple[Any, Any, int] = None, None, 0
        self._is_closed = False
        self.stats = CacheStats()

    def freeze_bottom(self, num_frozen: int) -> None:
        """Freeze this many blocks from the next epoch on."""
        self._plan = [*self._plan[: self._num_begun], num_frozen]

    def epoch(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Freeze what this epoch freezes, and yield the loader's batches. Collective under DDP.

        Batches are as the loader makes them, with the entries that the model and its loss take.
        Images of samples that hit are not read: they are NaN, but for their first number. A
        forward that is given anything but the last batch, as it is, runs from its start.

        Raises:
            TypeError: the loader is none of torch's, or iterates in its own way.
            ValueError: the loader has no sampler of batches, the model cannot be cut, or it is
                given images that were not read, but not the batch that was yielded last.
        """
        # What is kept serves loops in any mode.
        with torch.inference_mode(False):
            parts = self._start(loader)
            self.num_frozen = self._plan[min(self._num_begun, len(self._plan) - 1)]
            parts.set_depth(self.num_frozen)
        parts.feed.take_stats()  # Of an epoch that the loop has left.
        parts.epoch = epoch = self._num_begun
        self._num_begun += 1
        if parts.feed.prefix.depth and parts.feed.may_cache:
            yield from self._cached(parts, loader, epoch)
        else:
            yield from loader
        if parts.epoch == epoch:
            self.stats = parts.feed.take_stats()

    def _cached(self, parts: _Parts, loader: DataLoader[Any], epoch: int) -> Iterator[Any]:
        # A DataLoader's iterator draws this number, too: the loop's own go on as without a cache.
        # Persistent workers keep theirs.
        if not loader.persistent_workers or (epoch == 0 and loader._iterator is None):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        parts.to_come.clear()  # The loop may have left the last epoch early.
        parts.to_come.extend((epoch, torch.tensor(ids)) for ids in _drawn(loader))
        while parts.to_come:
            _, ids = parts.to_come[0]
            with own_random_numbers(parts.device), torch.inference_mode(False):
                batch = parts.feed.fetch(ids, epoch=epoch, keeps=True)
                given = parts.as_yielded(batch, len(ids))
            parts.to_come.popleft()
            with parts.blocks.serving(given):
                # The loop may change its batch in place.
                own = {name: entry.clone() for name, entry in given.inputs.items()}
                yield parts.as_loaded({**batch, **own})
            if self._is_closed or parts.epoch != epoch:
                raise ValueError(
                    "this epoch has ended, as the loop was closed or has begun another epoch"
                )

    def _start(self, loader: DataLoader[Any]) -> _Parts:
        if self._is_closed:
            raise ValueError("this loop was closed; attach the model anew")
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise TypeError(
                f"a {type(loader).__name__} iterates in its own way, which would not be followed "
                "where rows are read; give the torch DataLoader itself, and do what is to be done "
                "to its batches in the loop"
            )
        dataset: Any = loader.dataset
        if self._parts is None:
            self._parts = _Parts.of(self._model, loader, self._settings)
            self._given = dataset, loader.collate_fn, len(dataset)
            weakref.finalize(self, self._parts.close)
        first, function, num = self._given
        if dataset is not first or loader.collate_fn != function:
            raise ValueError(
                "this loader has another data set or collate_fn than that of the first epoch; "
                "attach once for each"
            )
        if len(dataset) != num:
            raise ValueError(
                f"the data set has {len(dataset)} samples, but had {num} in the first epoch, and "
                "rows are kept by index; close this loop, and attach anew"
            )
        return self._parts

    def close(self) -> None:
        """Have the forward run from its start again, and free the rows; blocks stay frozen."""
        self._is_closed = True
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
    loaded: Any
    device: torch.device
    marks: Iterator[int]
    epoch: int = 0

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
        with own_random_numbers(device):
            loaded = loader.collate_fn([dataset[0], dataset[0]])
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
            ServedBlocks(feed.prefix),
            to_come,
            example,
            loaded,
            device,
            marks(),
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

    def as_yielded(self, batch: dict[str, Tensor], num: int) -> GivenBatch:
        """Return a batch's inputs and rows; what rows make needless stands there unread."""
        model, mark = self.task.model, next(self.marks)
        inputs, sides = model.inputs, model.sides_of(0, len(model.sublayers))
        rows = batch.pop(HIDDEN)
        not_read = {name: mark for name in inputs if name not in sides}
        return GivenBatch(
            {
                name: unread(self.example[name], num, mark) if name in not_read else batch[name]
                for name in inputs
                if name in not_read or name in batch
            },
            not_read,
            rows,
        )

    def as_loaded(self, batch: dict[str, Tensor]) -> Any:
        """Return a batch in the loader's shape."""
        if isinstance(self.loaded, (tuple, list)):
            model = self.task.model
            return [batch[name] for name in (*model.inputs[:1], *model.targets)]
        # transformers' tokenizers make a mapping that has `.to(device)`.
        return batch if isinstance(self.loaded, dict) else type(self.loaded)(batch)

    def close(self) -> None:
        """Give blocks their own forward back, and free the rows."""
        self.blocks.give_back()
        self.feed.close()
        self.world.close()


def _drawn(loader: DataLoader[Any]) -> Iterator[list[int]]:
    """Draw an epoch's batches of indices.

    Raises:
        ValueError: there is no end to them, it seems.
    """
    sampler: Any = loader.batch_sampler
    most, num = _MOST_ROUNDS * len(loader.dataset), 0  # type: ignore[arg-type]
    for ids in sampler:
        num += len(ids)
        if num > most:
            raise ValueError(
                f"the loader's sampler gives each sample more than {_MOST_ROUNDS} times in an "
                "epoch, and seems to have no end; all of an epoch's indices are drawn at its "
                "start, so give it an end"
            )
        yield ids
