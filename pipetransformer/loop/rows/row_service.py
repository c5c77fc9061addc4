"""Serve one model and one data set: freeze blocks, and put rows in the place of what they do.

loader ─ indices ─► row_batches: rows, or samples ─► a batch in the loader's form
                                                       └─► the loop ─► the model's short forward
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, final
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate
from tqdm import tqdm

from autocache import CacheStats
from autodp import broadcast_json
from freeze.in_place import freeze_modules
from pipetransformer.feed import SampleFeed, check_dataset, own_random_numbers
from pipetransformer.loop.batches import (
    BatchForm,
    base_of,
    begun_within,
    collating_kept,
    giving_indices,
    is_same_dataset,
    is_same_function,
)
from pipetransformer.loop.forward import LoopCall, ShardedWeights, ShortForward, all_agree
from pipetransformer.loop.rows.frozen_blocks import FrozenBlocks
from pipetransformer.loop.rows.frozen_parts import FrozenParts
from pipetransformer.loop.rows.loop_model import look_at
from pipetransformer.loop.rows.model_check import check_model, expected_call
from pipetransformer.loop.rows.released_parts import ReleasedParts
from pipetransformer.loop.rows.row_account import RowAccount
from pipetransformer.loop.rows.row_batches import LoopPlace, RowBatches
from pipetransformer.loop.rows.settings import LoopSettings
from pipetransformer.model import NoRowError, Task
from pipetransformer.processes import World, connect

_LOGGER = logging.getLogger(__name__)


@final
class RowService:
    """Freeze a model's blocks, and give a loader batches whose rows the blocks return.

    Collective where several processes train.

    Args:
        keeps_to_labels: whether the loss reads no position that its label leaves out.
        beside: another service of the model, which has frozen its blocks, and whose call is this
            one's where the loader has its entries.
    Raises:
        TypeError, ValueError: the loader's samples are not known by index, or the model cannot be
            cut.

    Attributes:
        num_frozen: blocks that are frozen; -1 before any was asked for.
        sees_first: whether a loop's first batch is yet to show what the model is given. Until the
            next one blocks freeze without rows.
        num_of_others: hits by rows that another run has kept.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Any,
        settings: Mapping[str, Any],
        *,
        call: LoopCall | None = None,
        keeps_to_labels: bool = False,
        beside: RowService | None = None,
    ) -> None:
        self._model, self._freezes = model, beside is None
        self._settings = known = LoopSettings.of(settings, keeps_to_labels=keeps_to_labels)
        self._released: ReleasedParts | None = None if beside is None else beside._released
        if beside is None and known.releases_beside is not None:
            folder = known.config(base_of(loader)).cache_folders[-1]
            models = (model, known.releases_beside)
            self._released = ReleasedParts(known.parts, models, folder)
        self._new_calls, self.sees_first = list[LoopCall](), False
        self._stats, self.num_frozen = CacheStats(), -1
        self._new_stats, self.num_of_others, self._has_filled = CacheStats(), 0, False
        # What is shown of the model is of parts where so many blocks are frozen.
        self._parts: FrozenParts | None = None
        self._shown_for = 0
        self._has_told = False
        self._begun = WeakSet[DataLoader[Any]]()  # Loaders that have begun an epoch.
        self._ends_workers = False  # Where the loader's own begin anew with each epoch.
        self._account: RowAccount | None = None
        check_model(model, known)
        self._weights: ShardedWeights | None = (
            ShardedWeights.of(model) if beside is None else beside._weights
        )
        self._base = base = base_of(loader)
        check_dataset(base.dataset, "the loader's dataset")
        self._place = LoopPlace(len(base.dataset))  # type: ignore[arg-type]
        self.device = next(model.parameters()).device
        with collating_kept(base.dataset, base.collate_fn):
            with own_random_numbers(self.device):
                self._whole_form = BatchForm.of(base, has_bundles=bool(self._settings.parts))
            if beside is not None and {*beside._call.parameters} <= {*self._whole_form.names}:
                call = beside._call
            with self._whole():
                self._begin((call or expected_call(model, self._whole_form),))
        # Until it is said what that changes.
        self._place.tells_rounding = self.task.config.cache_dtype is not None

    def _begin(self, calls: tuple[LoopCall, ...]) -> None:
        tied = str(self._settings.cache.get("tied_weights", "train"))
        if named := self._settings.parts:
            self._parts = FrozenParts(self._model, named, tied_weights=tied)
            freeze_modules(self._model, named.values())
        try:
            self._take_up(calls)
        except NoRowError as error:
            if self._weights is not None:
                raise  # Rows of parts are not made of parted weights.
            # Blocks hand several tensors on: the last frozen one is a part.
            self._parts = FrozenParts(self._model, {}, tied_weights=tied)
            try:
                self._settings = replace(self._settings, parts=self._parts.at(1))
                self._take_up(calls)
            except ValueError as other:
                raise ValueError(f"{error}. Nor by what a block returns: {other}") from error

    def _take_up(self, calls: tuple[LoopCall, ...]) -> None:
        """Look at the model as it is called, and make all that serves it."""
        self._bring_back()
        known = look_at(self._model, self._base, self._whole_form, calls, self._settings)
        known.weights = self._weights
        self._known, self._blocks = known, FrozenBlocks(known)
        self.world: World = connect(self.device.type, timeout_s=self.task.config.setup_timeout_s)
        self._batches = RowBatches(known, self.world, self._place, learn=self._learn)
        if self._released is not None:
            self._released.users.add(self._batches)

    @property
    def epoch(self) -> int:
        """Return the loop's epoch."""
        return self._place.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._place.epoch = epoch

    @property
    def task(self) -> Task:
        return self._known.task

    @property
    def feed(self) -> SampleFeed:
        return self._batches.feed

    @property
    def forward(self) -> ShortForward:
        return self._batches.forward

    def _learn(self, call: LoopCall) -> ShortForward:
        """Serve the loop as it calls its model, which is not what was expected, or is more."""
        given, known = ({*one.targets.values()} for one in (call, self._call))
        # Targets that were not looked at may reach what is frozen.
        keeps = given <= known and (given == known or not self.task.model.reads_by_labels)
        if self.forward.is_confirmed:
            self._add_column(call)
        elif self._call.has_rows_of(call) and keeps:
            self._known.expect(call)
            self.forward.expect(call)
        else:
            self._serve((call,))
        return self.forward

    def _add_column(self, call: LoopCall) -> None:
        """Note that the loop gives the model another column of its batches, in the same way."""
        if not all(map(call.is_column_beside, (*self._known.calls, *self._new_calls))):
            return
        leaves, rows = self._whole_form.leaf_names, self._whole_form.rows
        pads = self.task.model.padding_mask is not None
        pairs = [(leaves[name], self._known.example[own]) for name, own in call.parameters.items()]
        # Rows of one layout must hold both.
        is_alike = all(
            one.dtype == other.dtype and one.shape[1 + pads :] == other.shape[1 + pads :]
            for one, other in pairs
        )
        is_of_rows = len({rows[name] for name in call.parameters}) == 1
        if is_alike and is_of_rows and self.task.config.cache_views is None:
            self._new_calls.append(call)

    def take_up_columns(self) -> None:
        """Serve what the first batch has shown, from the next one on."""
        if self._new_calls or self.sees_first:
            calls = (*self._known.calls, *self._new_calls)
            self._new_calls, self.sees_first = [], False
            with torch.inference_mode(False):
                self._serve(calls)

    def _serve(self, calls: tuple[LoopCall, ...]) -> None:
        """Look at the model anew, and serve what the loop gives it."""
        num_frozen, self.num_frozen = self.num_frozen, -1
        if calls != self._known.calls:
            is_awaited, num_served = self.forward.is_awaited, self.forward.num_served
            expected = self._known.calls
            try:
                self._take_up_anew(calls)
            except Exception:
                with self._whole():
                    self._take_up(expected)  # A loop may mend a call that fails, and go on.
                self.set_depth(max(0, num_frozen))
                raise
            self.forward.is_confirmed = True
            self.forward.is_awaited, self.forward.num_served = is_awaited, num_served
        if num_frozen >= 0:
            self.set_depth(num_frozen)

    def _take_up_anew(self, calls: tuple[LoopCall, ...]) -> None:
        self._note_stats()
        self._batches.close()
        self.world.close()
        with self._whole():
            self._take_up(calls)

    def _whole(self) -> AbstractContextManager[None]:
        """Have parted weights be whole here within a block. Collective."""
        return nullcontext() if self._weights is None else self._weights.whole()

    def refuse_another(self, loader: Any) -> None:
        """Raise a ValueError for a loader of other samples than those that were looked at."""
        dataset: Any = base_of(loader).dataset
        if not self.serves(loader):
            raise ValueError(
                "this loader has another data set or collate_fn than that of the first epoch, and "
                "rows are kept by index; attach once for each, or begin another training"
            )
        if len(dataset) != (num := self._place.num_samples):
            raise ValueError(
                f"the data set has {len(dataset)} samples, but had {num} in the "
                "first epoch, and rows are kept by index; close this loop and attach anew, or "
                "begin another training"
            )

    def serves(self, loader: Any) -> bool:
        """Return whether a loader has the data set and collate_fn that were looked at."""
        base, samples = base_of(loader), self._known.whole
        function = samples.collation.function or default_collate
        is_same = is_same_dataset(base.dataset, samples.dataset)
        return is_same and is_same_function(base.collate_fn, function)

    @property
    def _call(self) -> LoopCall:
        return self._known.calls[0]

    @property
    def row_blocks(self) -> Sequence[nn.Module]:
        """Return the model's row of blocks, bottom first."""
        return self._known.blocks if self._parts is None else self._parts.blocks

    @property
    def part_weights(self) -> set[nn.Parameter]:
        """Return the weights of parts that a user names, which never train."""
        return set() if self._parts is None else self._parts.weights

    @property
    def num_still(self) -> int:
        """Return a number that tells what is frozen: blocks, and one more for named parts."""
        return max(0, self.num_frozen) + bool(self.part_weights)

    @property
    def may_serve(self) -> bool:
        """Return whether there are frozen blocks, and rows may be kept of them."""
        return self.feed.prefix.depth > 0 and self.feed.keeper.may_cache

    @property
    def may_ever_serve(self) -> bool:
        """Return whether rows may be kept of any number of frozen blocks."""
        depths = range(1, self.task.model.num_layers + 1)
        return self.feed.keeper.may_cache and any(map(self.task.prefix_depth, depths))

    def agreed(self, num_frozen: int) -> int:
        """Return rank 0's number. Collective."""
        return int(broadcast_json(num_frozen, group=self.world.group))

    def set_depth(self, num_frozen: int) -> None:
        """Freeze so many blocks, and have rows of what is frozen. Collective."""
        is_steady = all_agree(not self._batches.are_wrong, self.world.group)
        if num_frozen == self.num_frozen and is_steady:
            return
        self._bring_back()
        if self._parts is not None:
            self._set_parts(self._parts, num_frozen)
            return
        model = self.task.model
        if num_frozen > model.num_layers:
            raise ValueError(
                f"freeze asks for {num_frozen} blocks, but the model has {model.num_layers}"
            )
        self._notice_changes(num_frozen)
        if self._freezes:
            self._blocks.freeze(num_frozen)
        self.num_frozen, depth = num_frozen, self.task.prefix_depth(num_frozen)
        if depth < num_frozen and not self._has_told:
            self._has_told = True
            _LOGGER.warning(
                "no cache: the embedding is tied to the head and goes on training, so that what "
                "frozen blocks make of it changes with every step. tied_weights='freeze' freezes "
                "it with the first block, 'untie' gives the head a copy"
            )
        with self._whole():
            self._have_rows(depth)
        self._batches.note_parts()

    def _set_parts(self, parts: FrozenParts, num_frozen: int) -> None:
        """Have rows of the parts, and of what the last frozen block returns, whatever it is."""
        named = parts.at(num_frozen)
        if self._freezes and max(0, self.num_frozen) != num_frozen:
            self.forward.give_back()
            with own_random_numbers(self.device):
                parts.freeze(num_frozen, self._known.run_example)
        self.num_frozen = num_frozen
        self._have_rows_of(named, num_frozen)
        if num_frozen and not self.feed.prefix.depth and parts.at(0):
            # Those of the block cannot be had, or do not pay.
            self._have_rows_of(parts.at(0), 0)

    def _have_rows_of(self, named: Mapping[str, nn.Module], num_frozen: int) -> None:
        if num_frozen != self._shown_for:
            self._shown_for, self._account = num_frozen, None
            # Where nothing is frozen any part shows the model.
            self._settings = replace(self._settings, parts=named or self._settings.parts)
            is_confirmed = self.forward.is_confirmed
            self._take_up_anew(self._known.calls)
            self.forward.is_confirmed = is_confirmed
        else:
            self._notice_changes(1)
        self._have_rows(1 if named else 0)

    def _notice_changes(self, num_layers: int) -> None:
        """Take note of what changed in layers of the model as it was looked at."""
        self._blocks.refuse_replaced(num_layers)
        self._batches.notice_changes()  # Another depth is watched anew.
        self.forward.give_back()

    def _have_rows(self, depth: int) -> None:
        is_asked = self._settings.caches is not False
        is_to_come = depth == 0 and is_asked and self.may_ever_serve
        may_have = depth > 0 and is_asked and self.feed.keeper.may_cache and not self.sees_first
        may_have &= all_agree(not self._batches.is_unsteady, self.world.group)
        self._batches.are_wrong = False
        if not (may_have and self._are_rows_right(depth) and self._pays()):
            depth = 0
        self._note_stats()
        # What is kept serves loops in any mode.
        with torch.inference_mode(False), own_random_numbers(self.device):
            self.feed.prefix.set_depth(depth, on_stage_0=True, use_cache=depth > 0)
            self.feed.follow_prefix()
        self.forward.set_depth(depth, is_to_come=is_to_come)

    def _pays(self) -> bool:
        """Return whether rows of parts save enough of a step; rows of blocks do. Collective."""
        if self._parts is None or not self._parts.at(0):
            return True
        if self._account is not None or not self._freezes:
            return True
        is_told = bool(self._settings.caches) or self.task.config.cache_keep
        if is_told and not _LOGGER.isEnabledFor(logging.INFO):
            return True
        with collating_kept(self._base.dataset, self._base.collate_fn):
            self._account = account = self._batches.account()
        pays = is_told or bool(self.agreed(account.pays))
        if not pays:
            _LOGGER.warning(
                "no cache: %s. That saves %.0f %% of it, so the part runs at every step; "
                "cache=True has rows all the same",
                account,
                100 * account.saved_share,
            )
        elif self.world.is_main:
            _LOGGER.info("%s, in %s", account, *self.task.config.cache_folders[:1])
        return pays

    def _are_rows_right(self, depth: int) -> bool:
        """Return whether rows may take the blocks' place; a warning says why not."""
        with collating_kept(self._base.dataset, self._base.collate_fn):
            why = self._batches.why_not(depth)
        if why and not self._has_told:
            self._has_told = True
            _LOGGER.warning(
                "no cache of %s of %s: %s; they run at every step",
                f"the lower {depth} blocks"
                if self._known.partial.row.packing is None
                else self._known.partial.row.name,
                type(self.task.model.model).__name__,
                why,
            )
        return not why

    def thawed_by(self, num_frozen: int) -> dict[str, nn.Parameter]:
        """Return by name the weights that `set_depth` would thaw."""
        if self._parts is not None:
            return self._parts.thawed_by(num_frozen)
        return self._blocks.thawed_by(num_frozen)

    def taken_over(
        self, loader: Any, *, begun: Callable[[], None] = lambda: None
    ) -> AbstractContextManager[None]:
        """Have iterations of the loader that begin within the block give cached batches.

        Args:
            begun: called where one draws its first batch; it may end the block.
        """
        base = base_of(loader)
        # Persistent workers keep their first seeds.
        is_first = base not in self._begun and base._iterator is None
        self._begun.add(base)
        draws = not base.persistent_workers or is_first
        # Now, as meanwhile the loader has none.
        self._ends_workers = base.num_workers > 0 and not base.persistent_workers

        def announce(drawn: Sequence[list[int]]) -> None:
            self.announce(drawn)
            begun()

        return giving_indices(base, announce, self.made, draws=draws)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch of the loader."""
        return begun_within(self.taken_over(loader), loader)

    def marked(self, loader: Any) -> Iterator[Any]:
        """Yield the loader's own batches; until it is known, these say what the model is given."""
        for batch in loader:
            yield batch if self.forward.is_confirmed else self._whole_form.to_learn_from(batch)

    def announce(self, drawn: Sequence[list[int]]) -> None:
        """Take note of all batches of an epoch."""
        if self._ends_workers:
            self.feed.end_workers()
        self._batches.announce(drawn)
        self.release()

    def made(self, indices: list[int]) -> Any:
        """Return a batch in the loader's form, whose entries know its rows."""
        self.take_up_columns()
        return self._batches.made(indices)

    def fill(self) -> None:
        """Compute the rows that samples lack, of this process' share. Collective."""
        self._has_filled = True
        config, num = self.task.config, self._place.num_samples
        num_own, rank, step = -(-num // self.world.size), self.world.rank, self.world.size
        # All have as many; the last ones may have the first samples, too.
        own = [index % num for index in range(rank, rank + num_own * step, step)]
        size = config.global_batch_size
        batches = [own[first : first + size] for first in range(0, num_own, size)]
        num_views = config.cache_views or 1
        with tqdm(
            total=num_views * num_own,
            desc="rows",
            unit=" samples",
            disable=not self.world.is_main,
        ) as bar:
            for self.epoch in range(num_views):
                self.announce(batches)
                for batch in batches:
                    self.made(batch)
                    bar.update(len(batch))
                    num_bytes = 0 if (store := self.feed.keeper.store) is None else store.num_bytes
                    bar.set_postfix_str(f"{num_bytes / 2**20:.0f} MiB", refresh=False)
        self.take_stats()  # They are of no step.
        self.feed.compare_weights()
        self.release()

    def release(self) -> None:
        """Have parts leave their device where that is asked for, and every sample has its row."""
        if self._released is None or not self._freezes or not self.may_serve:
            return
        if num_lacking := self.feed.num_lacking():
            _LOGGER.info("parts stay on their device, as %d rows are missing", num_lacking)
        else:
            self._released.leave()

    def _bring_back(self) -> None:
        """Have parts on their device, as looks at the model run them, and compare buffers."""
        if self._released is not None:
            self._released.come_back("the model is looked at")

    @property
    def stats(self) -> CacheStats:
        """Return the cache's counts and times since they were last forgotten."""
        self._note_stats()
        return self._stats

    def take_stats(self) -> CacheStats:
        """Return the cache's counts and times since the last call, forgotten or not."""
        self._note_stats()
        stats, self._new_stats = self._new_stats, CacheStats()
        return stats

    def forget_stats(self) -> None:
        """Begin to count anew."""
        self._note_stats()
        self._stats = CacheStats()

    def _note_stats(self) -> None:
        # A cache of another depth begins to count anew.
        taken, config = self.feed.take_stats(), self.task.config
        self._stats += taken
        self._new_stats += taken
        # What is read the first time around was there before, unless it was computed ahead.
        if config.cache_keep and not self._has_filled and self.epoch < (config.cache_views or 1):
            self.num_of_others += taken.hits - taken.ahead

    def close(self) -> None:
        """Give the model its own forward back, and free the rows."""
        self._note_stats()
        self._batches.close()
        self.world.close()
        if self._weights is not None and self._freezes:
            self._weights.close()
        if self._released is not None and self._freezes:
            self._released.close()
        self._released = None
