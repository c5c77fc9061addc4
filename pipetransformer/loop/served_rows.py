"""Hold what serves one model and one data set: the feed, and the blocks that are given rows.

loader ─ indices ─► made ─► feed: rows, or samples ─► a batch in the loader's shape
                      └─► blocks: know the batch, and its rows
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from itertools import chain, islice
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import freeze as freezing
from autocache import HIDDEN, CacheStats
from autodp import broadcast_json
from autopipe.loss import Loss
from pipetransformer.config import make_config
from pipetransformer.feed import (
    FrozenPrefix,
    HeldTargets,
    SampleFeed,
    check_dataset,
    first_samples,
    names_for,
    own_random_numbers,
    samples_of,
)
from pipetransformer.loop.given_batch import GivenBatch, marks, unread
from pipetransformer.loop.loaders import base_of, giving_indices
from pipetransformer.loop.randomness import draws_below, generators_kept
from pipetransformer.loop.replaced_forward import in_own_forward
from pipetransformer.loop.rounding import compare_rounded
from pipetransformer.loop.served_blocks import ServedBlocks
from pipetransformer.model import Task, adamw, names_of, present, row_of
from pipetransformer.processes import World, connect

_LOGGER = logging.getLogger(__name__)

SETTINGS = (
    "cache_folder", "cache_keep", "cache_fingerprint", "cache_limit_bytes", "cache_dtype",
    "cache_device", "cache_check", "augment_hidden", "prefix_chunk", "precision", "seed",
    "tied_weights",
)  # fmt: skip
"""Fields of `TrainConfig` that a loop may set."""

_USUAL_BATCH = 32


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError for settings that are unknown or not allowed."""
    if unknown := sorted(settings.keys() - set(SETTINGS)):
        raise ValueError(f"unknown setting(s) {', '.join(unknown)}; known: {', '.join(SETTINGS)}")
    make_config(dict(settings))


@final
@dataclass
class ServedRows:
    """Freeze a model's blocks, and give a loader batches whose rows the blocks return.

    Attributes:
        depth: number of blocks that have rows.
    """

    task: Task
    world: World
    feed: SampleFeed
    example: Mapping[str, Tensor]
    loaded: Any
    device: torch.device
    to_come: deque[tuple[int, Tensor]]
    epoch: int = 0
    marks: Iterator[int] = field(default_factory=marks)

    def __post_init__(self) -> None:
        self.blocks = ServedBlocks(self.feed.prefix, self._fetched_anew)
        self._stats, self._num_frozen = CacheStats(), -1
        self._has_told = False
        self._num_samples = len(self.feed.samples.dataset)
        # Frozen by this class, where `freeze.apply` leaves them: it must thaw them, too.
        self._also_frozen: list[nn.Parameter] = []
        # Until it is said what that changes.
        self._rounds = self.task.config.cache_dtype is not None

    @staticmethod
    def of(
        model: nn.Module,
        loader: Any,
        settings: Mapping[str, Any],
        *,
        keeps_to_labels: bool = False,
    ) -> ServedRows:
        """Look at a model and a loader's samples. Collective where several processes train.

        Args:
            keeps_to_labels: whether the loss reads no position that its label leaves out.
        Raises:
            TypeError, ValueError: the loader's samples are not known by index, or the model
                cannot be cut.
        """
        base = base_of(loader)
        with generators_kept(base.collate_fn, base.dataset):
            return ServedRows._looked_at(model, base, settings, keeps_to_labels=keeps_to_labels)

    @staticmethod
    def _looked_at(
        model: nn.Module,
        base: DataLoader[Any],
        settings: Mapping[str, Any],
        *,
        keeps_to_labels: bool,
    ) -> ServedRows:
        _refuse_sharded(model)
        _refuse_prompts(model)
        dataset: Any = base.dataset
        check_dataset(dataset, "the loader's dataset")
        collate = None if base.collate_fn is default_collate else base.collate_fn
        config = make_config(
            {
                **settings,
                "collate_fn": collate,
                "num_workers": base.num_workers,
                **({"prefetch_factor": base.prefetch_factor} if base.num_workers else {}),
                # Of a sampler that does not say it, batches are run in chunks of the most usual.
                "global_batch_size": getattr(base.batch_sampler, "batch_size", None)
                or _USUAL_BATCH,
                "remove_unused_columns": False,
            }
        )
        with in_own_forward(model):
            names = names_of(model)
            example = first_samples(
                dataset, names, collate_fn=collate, drops_unknown=False, seed=config.seed
            )
            layered = present(
                model,
                example,
                F.cross_entropy,
                unties=config.tied_weights == "untie",
                keeps_to_labels=keeps_to_labels,
            )
        trainable = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
        task = Task(layered, Loss(F.cross_entropy), adamw(), config, trainable)
        samples = samples_of(task, dataset, needs_targets=False)
        device = next(model.parameters()).device
        with own_random_numbers(device):
            loaded = base.collate_fn([dataset[0], dataset[0]])
            if "cache_check" not in settings and not HeldTargets(samples).knows():
                # A corrected label is seen in its sample alone, so each sample is read.
                task = replace(task, config=replace(config, cache_check="all"))
        world = connect(device.type, timeout_s=config.setup_timeout_s)
        to_come: deque[tuple[int, Tensor]] = deque()
        feed = SampleFeed(
            FrozenPrefix(task), world, samples, to_come=lambda: tuple(to_come), augments=True
        )
        with own_random_numbers(device):
            feed.look_for_randomness()
        _warn_of_lost_entries(loaded, task)
        return ServedRows(task, world, feed, example, loaded, device, to_come)

    def refuse_another(self, loader: Any) -> None:
        """Raise a ValueError for a loader of other samples than those that were looked at."""
        base, samples = base_of(loader), self.feed.samples
        dataset: Any = base.dataset
        function = samples.collation.function or default_collate
        if dataset is not samples.dataset or base.collate_fn != function:
            raise ValueError(
                "this loader has another data set or collate_fn than that of the first epoch, and "
                "rows are kept by index; attach once for each"
            )
        if len(dataset) != self._num_samples:
            raise ValueError(
                f"the data set has {len(dataset)} samples, but had {self._num_samples} in the "
                "first epoch, and rows are kept by index; close this loop, and attach anew"
            )

    @property
    def row_blocks(self) -> Sequence[nn.Module]:
        """Return the model's row of blocks, bottom first."""
        return row_of(self.task.model).blocks

    @property
    def depth(self) -> int:
        return self.feed.prefix.depth

    @property
    def may_serve(self) -> bool:
        """Tell whether there are frozen blocks, and rows may be kept of them."""
        return self.depth > 0 and self.feed.may_cache

    @property
    def may_ever_serve(self) -> bool:
        """Tell whether rows may be kept of any number of frozen blocks."""
        depths = range(1, self.task.model.num_layers + 1)
        return self.feed.may_cache and any(map(self.task.prefix_depth, depths))

    def agreed(self, num_frozen: int) -> int:
        """Return rank 0's number. Collective."""
        return int(broadcast_json(num_frozen, group=self.world.group))

    def set_depth(self, num_frozen: int) -> None:
        """Freeze blocks, and have rows of that depth. Collective."""
        model = self.task.model
        if num_frozen > model.num_layers:
            raise ValueError(
                f"freeze asks for {num_frozen} blocks, but the model has {model.num_layers}"
            )
        if num_frozen == self._num_frozen:
            return
        self._num_frozen, depth = num_frozen, self.task.prefix_depth(num_frozen)
        if depth < num_frozen and not self._has_told:
            self._has_told = True
            _LOGGER.warning(
                "no cache: the embedding is tied to the head and goes on training, so that what "
                "frozen blocks make of it changes with every step. tied_weights='freeze' freezes "
                "it with the first block, 'untie' gives the head a copy"
            )
        self.blocks.give_back()
        self._freeze(num_frozen)
        if depth and self._draws_below(depth):
            depth = 0
        self._note_stats()
        # What is kept serves loops in any mode.
        with torch.inference_mode(False), own_random_numbers(self.device):
            self.feed.prefix.set_depth(depth, on_stage_0=True, use_cache=depth > 0)
            self.feed.follow_prefix()
        self.blocks.set_depth(depth)

    def _draws_below(self, depth: int) -> bool:
        """Tell, with a warning, whether frozen blocks are not all that lies below `depth`."""
        model = self.task.model
        names = (*model.inputs, *model.sides_of(0, len(model.sublayers)))
        entries = {n: self.example[n].to(self.device) for n in names if n in self.example}
        with in_own_forward(model.model), self.task.computing(self.device):
            draws = draws_below(model.model, self.row_blocks[depth - 1], entries)
        if draws and not self._has_told:
            self._has_told = True
            _LOGGER.warning(
                "no cache: a training forward of %s draws random numbers below block %d (it drops "
                "blocks, or hidden states between them), which rows would lack; set that to 0 in "
                "its configuration",
                type(model.model).__name__,
                depth,
            )
        return draws

    def _freeze(self, num_frozen: int) -> None:
        """Freeze blocks, and what they read, but `freeze.apply` leaves: a learned bias, say."""
        model = self.task.model
        for parameter in self._also_frozen:
            parameter.requires_grad_(True)
        freezing.apply(model.model, num_frozen, layers=self.row_blocks)
        tied = model.shared_above(num_frozen)
        keeps = tied if self.task.config.tied_weights == "train" else frozenset()
        below = [
            model.tensor(name)
            for name, index in model.owners.items()
            if model.sublayers[index].layer < num_frozen and name not in keeps
        ]
        self._also_frozen = [
            one for one in below if isinstance(one, nn.Parameter) and one.requires_grad
        ]
        for parameter in self._also_frozen:
            parameter.requires_grad_(False)
            parameter.grad = None

    def taken_over(self, loader: Any) -> AbstractContextManager[None]:
        """Have iterations of the loader that begin within the block give cached batches."""
        base = base_of(loader)
        # Persistent workers keep their first seeds.
        is_first = self.epoch == 0 and base._iterator is None
        draws = not base.persistent_workers or is_first
        return giving_indices(base, self._announce, self._made, draws=draws)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch of the loader."""
        # Others than torch's own may look one batch ahead, as accelerate's do.
        is_own = type(loader).__iter__ is DataLoader.__iter__
        self.blocks.serve_none(num_known=1 if is_own else 2)
        with self.taken_over(loader):
            batches = iter(loader)
            first = list(islice(batches, 1))
        yield from chain(first, batches)

    def _announce(self, drawn: Sequence[list[int]]) -> None:
        self.to_come.clear()  # The loop may have left the last epoch early.
        self.to_come.extend((self.epoch, torch.tensor(ids)) for ids in drawn)

    def _made(self, indices: list[int]) -> Any:
        """Return a batch in the loader's shape, and have the blocks know it."""
        ids = torch.tensor(indices)
        # Some may have been skipped, as where a run is resumed.
        while self.to_come and not torch.equal(self.to_come[0][1], ids):
            self.to_come.popleft()
        epoch = self.to_come[0][0] if self.to_come else self.epoch
        batch = self._fetch(ids, epoch)
        if self.to_come:
            self.to_come.popleft()
        given = self._as_given(batch, ids, epoch)
        if self._rounds and given.rows is not None:
            self._rounds = False
            self._compare_rounded(ids, epoch)
        self.blocks.serve(given)
        # The loop may change its batch in place.
        own = {name: entry.clone() for name, entry in given.inputs.items()}
        return self._as_loaded({**batch, **own})

    def _fetch(self, ids: Tensor, epoch: int) -> dict[str, Tensor]:
        with own_random_numbers(self.device), torch.inference_mode(False):
            batch = self.feed.fetch(ids, epoch=epoch, keeps=True)
            # The cache reads into the same memory again, but a loop may keep its batches.
            return {name: entry.clone() for name, entry in batch.items()}

    def _compare_rounded(self, ids: Tensor, epoch: int) -> None:
        """Log what rounded rows change of a batch."""
        with own_random_numbers(self.device), torch.inference_mode(False):
            batches = [self.feed.computed_rows(ids, rounded=one) for one in (False, True)]
            targets = {n: batches[0][n] for n in self.task.model.targets if n in batches[0]}
            exact, rounded = (self._as_given(batch, ids, epoch) for batch in batches)
            compare_rounded(
                self.task,
                self.blocks,
                exact=exact,
                rounded=rounded,
                targets=targets,
                tells=self.world.is_main,
            )

    def _fetched_anew(self, given: GivenBatch) -> GivenBatch:
        """Return a batch that was given before the depth has changed, with what it needs now."""
        self.to_come.appendleft((given.epoch, given.ids))
        try:
            batch = self._fetch(given.ids, given.epoch)
        finally:
            self.to_come.popleft()
        rows = batch.get(HIDDEN)
        read = {} if rows is not None else {name: batch[name] for name in given.not_read}
        return replace(given, depth=self.depth, rows=rows, read=read)

    def _as_given(self, batch: dict[str, Tensor], ids: Tensor, epoch: int) -> GivenBatch:
        """Return a batch's inputs and rows; what rows make needless stands there unread."""
        model, mark = self.task.model, next(self.marks)
        inputs, sides = model.inputs, model.sides_of(0, len(model.sublayers))
        rows = batch.pop(HIDDEN, None)
        not_read = frozenset(() if rows is None else (n for n in inputs if n not in sides))
        num = len(ids)
        entries = {
            name: unread(self.example[name], num, mark) if name in not_read else batch[name]
            for name in inputs
            if name in not_read or name in batch
        }
        return GivenBatch(ids, epoch, self.depth, entries, not_read, rows)

    def _as_loaded(self, batch: dict[str, Tensor]) -> Any:
        if isinstance(self.loaded, (tuple, list)):
            names = (*self.task.model.inputs[:1], *self.task.model.targets)
            # A data set without labels serves losses that need none.
            return [batch[name] for name in names[: len(self.loaded)]]
        # transformers' tokenizers make a mapping that has `.to(device)`.
        return batch if isinstance(self.loaded, dict) else type(self.loaded)(batch)

    def take_stats(self) -> CacheStats:
        """Return the cache's counts and times since the last call, and start over."""
        self._note_stats()
        stats, self._stats = self._stats, CacheStats()
        return stats

    def _note_stats(self) -> None:
        # A cache of another depth begins to count anew.
        more, known = self.feed.take_stats(), self._stats
        self._stats = CacheStats(
            *(getattr(known, one.name) + getattr(more, one.name) for one in fields(CacheStats))
        )

    def close(self) -> None:
        """Give blocks their own forward back, and free the rows."""
        self.blocks.serve_none()
        self.blocks.give_back()
        self.feed.close()
        self.world.close()


def _refuse_prompts(model: nn.Module) -> None:
    configs = getattr(model, "peft_config", {})
    if any(getattr(one, "is_prompt_learning", False) for one in configs.values()):
        raise ValueError(
            "the model puts prompts that it learns before each sample, so that frozen blocks "
            "return something else at every step: there is nothing to cache"
        )


def _warn_of_lost_entries(loaded: Any, task: Task) -> None:
    """Warn of what batches lose: entries that neither the model nor its loss takes."""
    model = task.model
    known = {*model.inputs, *model.sides_of(0, len(model.sublayers)), *model.targets}
    known |= {name for one in model.targets for name in names_for(one)}
    lost = [name for name in loaded if name not in known] if isinstance(loaded, Mapping) else []
    if lost:
        _LOGGER.warning(
            "batches come without %s, which the model does not take: rows do not hold them. A "
            "loop that reads them needs another way to them, or no cache",
            lost,
        )


def _refuse_sharded(model: nn.Module) -> None:
    # By its name: importing that class takes half as long as importing torch.
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        raise ValueError(
            "FSDP gathers a block's weights on all ranks at once, but ranks compute rows for "
            "unequal numbers of samples, and would wait for each other: use "
            "DistributedDataParallel, or freeze without rows by freeze.apply"
        )
