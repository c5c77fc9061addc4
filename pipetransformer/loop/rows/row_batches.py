"""Give a loader batches whose entries know the rows of their samples."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from autocache import HIDDEN, by_position
from pipetransformer.feed import (
    Batch,
    FrozenPrefix,
    SampleFeed,
    find_changed,
    own_random_numbers,
    refuse_counted_padding,
)
from pipetransformer.loop.batches import collating_kept, refuse_unlike, warn_of_draws
from pipetransformer.loop.forward import (
    LoopCall,
    ModelWatch,
    NotHereError,
    Place,
    RowBatch,
    ShortForward,
    all_agree,
    compare_rounded,
)
from pipetransformer.loop.rows.loop_model import LoopModel
from pipetransformer.loop.rows.row_account import RowAccount, row_account
from pipetransformer.loop.rows.row_probe import RowProbe
from pipetransformer.processes import World

_LOGGER = logging.getLogger(__name__)

_MOST_CHANGES = 3
"""Of a model by hand; where more come, most epochs would make their rows in vain."""
_NUM_READ_AGAIN = 16
"""Samples that are kept, to be compared where an attribute of the data set was changed."""
_IF_RANDOM = (
    "cache_views= keeps a few fixed views of each sample; or change in the loop, behind the data "
    "set, what is to vary"
)


@final
@dataclass(frozen=True)
class _Coming:
    """Name a batch to come: its epoch, what its sampler has drawn, and the samples, (B,)."""

    epoch: int
    indices: list[int]
    ids: Tensor


@dataclass
class LoopPlace:
    """Say where a loop is.

    Attributes:
        num_samples: of its data set, as it began.
        epoch: of the loop.
        edit_epoch: in which samples were edited in memory last.
        numbers: of batches.
        to_come: its batches.
        tells_rounding: whether it is yet to be said what rounded rows change.
    """

    num_samples: int
    epoch: int = 0
    edit_epoch: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)
    to_come: deque[_Coming] = field(default_factory=deque)
    tells_rounding: bool = False


@final
class RowBatches:
    """Make batches in a loader's form, and have the model's forward know their rows.

    Args:
        learn: see `ShortForward`.
    Attributes:
        feed: samples, and rows of them.
        forward: of the model, from rows.
        num_changes: how often the user has changed what is frozen, or lies around it.
        are_wrong: whether such a change made rows wrong: then forwards have none.
    """

    def __init__(
        self,
        known: LoopModel,
        world: World,
        place: LoopPlace,
        *,
        learn: Callable[[LoopCall], ShortForward],
    ) -> None:
        self._known, self._task, self._world, self._place = known, known.task, world, place
        self._device = next(self._task.model.model.parameters()).device
        self._is_made_of_rows = known.form.is_whole and not known.is_read_whole
        self._weights = weights = known.weights
        self.num_changes, self.are_wrong = 0, False
        self._above: ModelWatch | None = None
        watch = self._are_edited if weights is not None else None
        prefix = FrozenPrefix(self._task, known.run_blocks, watch)
        self._places, self._versions, self._values = list[Place](), list[tuple[int, ...]](), 0
        self.feed = SampleFeed(
            prefix,
            world,
            known.samples,
            to_come=self._fetches_to_come,
            keeps=self._task.config.cache_views or 1,
        )
        self.feed.copies = True  # A loop may keep its batches.
        self.feed.keeper.advice = _IF_RANDOM
        with own_random_numbers(self._device):
            self.feed.keeper.look_for_randomness()
        if self._task.config.cache_views is None:  # Else each view is drawn under its own seed.
            warn_of_draws(self.feed, known.whole, is_read_here=known.is_read_here)
        self._seen = self._read_some()
        known.data.settle()
        # Last, as it hooks into the model.
        self.forward = ShortForward(
            prefix,
            known.calls,
            ModelWatch(known.watched(0)),
            learn=learn,
            renew=self._renew,
            read=self._read_inputs,
        )
        self.forward.place = place
        self.forward.agree = None if weights is None else self._agree

    def announce(self, drawn: Sequence[list[int]]) -> None:
        """Take note of all batches of an epoch. Collective where weights are parted."""
        self._notice_edits()
        self._notice_edited_parts()
        self._notice_changes_above()
        self._place.to_come.clear()  # The loop may have left the last epoch early.
        self._place.to_come.extend(
            _Coming(self._place.epoch, own, self._ids(own)) for own in drawn
        )

    def note_parts(self) -> None:
        """Take parted weights of frozen blocks for what they are now."""
        if self._weights is not None:
            self._places = self._known.places(self.feed.prefix.depth)
            self._versions = self._weights.versions(self._places)
            self._values = self._weights.values(self._places)

    def _are_edited(self) -> bool:
        assert self._weights is not None
        return self._weights.versions(self._places) != self._versions

    def _notice_edited_parts(self) -> None:
        """Use no row that was made before parted weights were edited, on whatever rank."""
        weights, prefix = self._weights, self.feed.prefix
        if weights is None or not prefix.stamps:
            return
        weights.let_go(self)
        is_same = not self._are_edited() and weights.values(self._places) == self._values
        if all_agree(is_same, self._world.group):
            return
        _LOGGER.warning(
            "weights of frozen layers were changed between two steps: their activations are "
            "computed anew"
        )
        with weights.whole():
            prefix.stamp_anew()
        self.note_parts()

    def _agree(self, has_rows: bool, idle: Sequence[nn.Module]) -> bool:
        """Return whether all ranks' forwards have rows; units of idle modules rest, then."""
        weights = self._weights
        if weights is None or weights.is_apart:
            return has_rows
        if self.forward.depth:
            has_rows = all_agree(has_rows, self._world.group)
        weights.serve(idle if has_rows else ())
        return has_rows

    def _notice_edits(self) -> None:
        """Use no row, and no batch, of samples that were edited in memory since."""
        if not (what := self._known.data.changed(self._samples_differ)):
            return
        self._place.edit_epoch = self._place.epoch
        self.feed.prefix.begin_edition()
        if self.feed.prefix.depth:
            _LOGGER.warning(
                "%s since the last epoch: what frozen blocks return is computed anew", what
            )

    def _samples_differ(self) -> bool:
        """Return whether some samples are read otherwise than they were."""
        before, self._seen = self._seen, self._read_some()
        pairs = zip(before, self._seen, strict=True)
        return any(one.keys() != now.keys() or find_changed(now, one) for one, now in pairs)

    def _read_some(self) -> list[Batch]:
        samples = self._known.samples
        with self._data_left_alone():
            return [samples.probe([index]) for index in samples.spread(_NUM_READ_AGAIN)]

    @contextmanager
    def _data_left_alone(self) -> Iterator[None]:
        """Have looks at samples within the block move no random number and no count."""
        data = self._known.whole
        with (
            collating_kept(data.dataset, data.collation.function),
            own_random_numbers(self._device),
        ):
            yield

    def _ids(self, indices: list[int]) -> Tensor:
        """Return samples' places; those that a sampler counts from the end, from the beginning."""
        num = self._place.num_samples
        return torch.tensor([i if i >= 0 else i + num for i in indices])

    def _fetches_to_come(self) -> Iterator[tuple[int, Tensor]]:
        """Yield what the feed will be asked for: of each batch its columns, in turn."""
        for coming in tuple(self._place.to_come):
            for column in range(len(self._known.calls)):
                yield coming.epoch, self._known.pieces.ids(coming.ids, column)

    def made(self, indices: list[int]) -> Any:
        """Return a batch in the loader's form, whose entries know its rows."""
        known, to_come = self._known, self._place.to_come
        # Some may have been skipped, as where a run is resumed.
        while to_come and to_come[0].indices != indices:
            to_come.popleft()
        due = to_come[0] if to_come else _Coming(self._place.epoch, indices, self._ids(indices))
        ids, epoch = due.ids, due.epoch
        read = None if self._is_made_of_rows else self._read_as_loaded(indices, epoch)
        own = {} if read is None else known.form.entries_of(read)
        if known.collation.gives_inputs_alone:
            self._refuse_counted_padding(own)
        fetches, batches = list[dict[str, Tensor]](), list[RowBatch]()
        entries: dict[str, Tensor] = {}
        for column, call in enumerate(known.calls):
            fetched = self._fetch(ids, epoch, column)
            if own:
                given = {parameter: own[name] for name, parameter in call.parameters.items()}
                fetched = {**given, **self._as_wide(fetched, given)}
            fetches.append(fetched)
            number = batches[0].number if batches else None
            batches.append(self._row_batch(fetched, ids, epoch, call, number))
            inputs = batches[-1].entries()
            entries = {name: inputs[one] for name, one in call.parameters.items()} | entries
        for name in [name for name in known.form.names if name not in entries]:
            rows = known.form.rows[name]
            column = known.pieces.column_of(rows) or 0
            value = own[name] if own else fetches[column][known.collation.known_as(name)]
            # Each piece of a sample has it.
            if known.joined is None and len(value) != len(ids) * rows.num:
                value = value[known.pieces.columns[column].places(len(ids))[:, 0]]
            if not self.forward.is_confirmed:  # The loop may give the model any of them.
                value = batches[column].entry(name, value)
            entries[name] = value
        if self._place.tells_rounding and batches[0].rows is not None:
            self._place.tells_rounding = False
            self._compare_rounded(ids, epoch)
        if to_come:
            to_come.popleft()
        return known.form.with_entries(entries, read)

    def _refuse_counted_padding(self, own: Batch) -> None:
        """Raise a ValueError where entries beside a text have something to learn at padding."""
        given = {name for call in self._known.calls for name in call.parameters}
        end = self._task.model.padding_mask or ""
        starts = [name.removesuffix(end) for name in own if end and name.endswith(end)]
        for start in (one for one in starts if one + end in given):
            others = tuple(one for one in starts if len(one) > len(start))
            beside = (name for name in own.keys() - given if name.startswith(start))
            targets = {name: own[name] for name in beside if not name.startswith(others)}
            refuse_counted_padding(targets, start + end, own[start + end], self._task)

    def _as_wide(self, fetched: Batch, given: Batch) -> Batch:
        """Return rows, if there are some, with as many positions as the loader's own batch has."""
        fetched = self._joined(fetched)
        if self._known.joined is not None:
            refuse_unlike(fetched, given)
        rows, mask = fetched.get(HIDDEN), self._task.model.padding_mask
        if rows is None:
            return {}
        if mask is not None and mask in fetched and mask in given:
            own, num = fetched[mask].shape[1], given[mask].shape[1]
            if own < num and by_position(rows, own):
                rows = pad(rows, (0, 0) * (rows.ndim - 2) + (0, num - own))
        return {HIDDEN: rows}

    def _joined(self, fetched: Batch) -> Batch:
        """Return samples joined along their tokens, where the loader joins them."""
        joined = self._known.joined
        return fetched if joined is None else joined.opened(fetched)

    def _read_as_loaded(self, indices: list[int], epoch: int) -> Any:
        """Read a batch as the loader does."""
        with own_random_numbers(self._device):
            return self._known.whole.collated(indices, view=self.feed.keeper.view(epoch))

    def _fetch(self, ids: Tensor, epoch: int, column: int) -> dict[str, Tensor]:
        """Fetch the rows that a column has of some samples."""
        own = self._known.pieces.ids(ids, column)
        self.forward.refuse_replaced()
        with torch.inference_mode(False):
            # Rows of a model that was changed are not used, as the forward finds.
            batch = self.feed.take_read(own, epoch=epoch)
            if batch is None:
                self.notice_changes()
                with own_random_numbers(self._device):
                    batch = self._fetch_anew(own, epoch)
            elif self._weights is not None:
                self._have_weights(True)
        return batch

    def _fetch_anew(self, ids: Tensor, epoch: int) -> dict[str, Tensor]:
        if self._weights is None:
            return self.feed.fetch(ids, epoch=epoch, keeps=True)
        self._weights.let_others_go(self)  # Theirs may be newer than what our stamps say.
        try:
            batch = self.feed.fetch(ids, epoch=epoch, keeps=True)
        except NotHereError:
            self._have_weights(False)
            return self.feed.fetch(ids, epoch=epoch, keeps=True)
        self._have_weights(True)
        return batch

    def _have_weights(self, has_rows: bool) -> None:
        """Have whole frozen weights for the rest of the epoch where a rank lacks rows."""
        weights = self._weights
        assert weights is not None
        if weights.is_apart or weights.holds(self):
            return
        if not all_agree(has_rows, self._world.group):
            if self._are_edited():
                # Rows of these copies are of no use once the weights are what they were.
                self.feed.prefix.begin_edition()
            weights.hold(self, self._places)

    def notice_changes(self) -> None:
        """Use no row that was made before the user has changed the model by hand."""
        watch = self.forward.watch
        self.forward.refuse_replaced()
        if self.feed.prefix.depth and watch.changed():
            what = watch.change()
            watch.renew()
            self.num_changes += 1
            if not self.is_unsteady:
                _LOGGER.warning(
                    "%s: what is frozen is computed anew, as it may depend on it. What a loop "
                    "notes for itself belongs elsewhere",
                    what,
                )
            self.feed.prefix.begin_edition()
            self._look_again(f"{what} again" if self.is_unsteady else "")

    @property
    def is_unsteady(self) -> bool:
        """Return whether the model was changed so often that rows are made in vain."""
        return self.num_changes > _MOST_CHANGES

    def _notice_changes_above(self) -> None:
        """Look at the model again where modules above the blocks are others than they were."""
        if self._above is not None and self.feed.prefix.depth and self._above.changed():
            self._look_again()

    def _look_again(self, why: str = "") -> None:
        """Use no rows from now on where there is a reason, or a look finds one."""
        if self._weights is not None:  # Ranks look together, and may find a change apart.
            return
        depth, forward = self.feed.prefix.depth, self.forward
        if not why and self._world.size > 1:  # All look, together, as the next epoch begins.
            self.are_wrong, forward.is_awaited = True, False
            return
        if not why:
            is_awaited, forward.is_awaited = forward.is_awaited, False
            with self._data_left_alone():
                why = self.why_not(depth)
            forward.set_depth(depth)
            forward.is_awaited = is_awaited
        if why and not self.are_wrong:
            self.are_wrong, forward.is_awaited = True, False
            _LOGGER.warning("no cache from now on: %s", why)

    def _compare_rounded(self, ids: Tensor, epoch: int) -> None:
        """Log what rounded rows change of a batch."""
        with own_random_numbers(self._device), torch.inference_mode(False):
            own = self._known.pieces.ids(ids, 0)
            computed = (self.feed.computed_rows(own, rounded=one) for one in (False, True))
            batches = [*map(self._joined, computed)]
            targets = {n: batches[0][n] for n in self._task.model.targets if n in batches[0]}
            exact, rounded = (self._row_batch(batch, ids, epoch) for batch in batches)
            with self._by_ourselves():
                compare_rounded(
                    self._task,
                    exact=exact,
                    rounded=rounded,
                    targets=targets,
                    tells=self._world.is_main,
                )

    def _renew(self, batch: RowBatch, call: LoopCall) -> None:
        """Bring a batch, given before the blocks have changed, to a column's rows of today."""
        if batch.epoch < self._place.edit_epoch:
            batch.rows, batch.depth, batch.call = None, self.feed.prefix.depth, call
            batch.stamp = self.feed.prefix.stamp
            return
        column = next(c for c, one in enumerate(self._known.calls) if one.has_rows_of(call))
        self._place.to_come.appendleft(_Coming(batch.epoch, batch.ids.tolist(), batch.ids))
        try:
            fetched = self._joined(self._fetch(batch.ids, batch.epoch, column))
        finally:
            self._place.to_come.popleft()
        batch.rows, batch.depth, batch.call = self._rows_in(fetched), self.feed.prefix.depth, call
        batch.stamp = self.feed.prefix.stamp

    def _rows_in(self, fetched: Mapping[str, Tensor]) -> Tensor | None:
        """Return a batch's rows; None where one of its samples has none."""
        rows, packing = fetched.get(HIDDEN), self._known.partial.row.packing
        lacks = rows is not None and packing is not None and packing.lacks(rows)
        return None if lacks or self.are_wrong else rows

    def _read_inputs(self, batch: RowBatch) -> Mapping[str, Tensor]:
        if batch.epoch < self._place.epoch:
            self._notice_edits()
        if batch.epoch < self._place.edit_epoch:
            raise ValueError(
                "a batch of an earlier epoch was kept, and not read; since then samples were "
                "edited in memory, and what it held is not known. Give reads= the names of the "
                "model's inputs, or keep no batches"
            )
        return self._known.form.entries_of(self._read_as_loaded(batch.ids.tolist(), batch.epoch))

    def _row_batch(
        self,
        fetched: dict[str, Tensor],
        ids: Tensor,
        epoch: int,
        call: LoopCall | None = None,
        number: int | None = None,
    ) -> RowBatch:
        """Return a batch's inputs and rows; what rows make needless was not read."""
        known, prefix = self._known, self.feed.prefix
        inputs, sides = self._task.model.inputs, known.sides
        rows = self._rows_in(fetched)
        not_read = frozenset(name for name in inputs if name not in fetched)
        names = dict.fromkeys((*inputs, *sides, *known.partial.beside))
        entries = {name: fetched.get(name, known.example[name]) for name in names}
        number = next(self._place.numbers) if number is None else number
        num = len(ids) if known.bundle_names else len(next(iter(fetched.values())))
        depth, stamp = prefix.depth, prefix.stamp
        call = call or known.calls[0]
        return RowBatch(
            number, ids, num, epoch, depth, rows, entries, not_read, call, stamp,
            place=self._place, read=self._read_inputs, bundles=known.bundle_names,
        )  # fmt: skip

    def why_not(self, depth: int) -> str:
        """Return why rows of so many blocks would be wrong; "" where nothing was found."""
        known, forward = self._known, self.forward
        forward.watch = watch = ModelWatch(known.watched(depth))
        below = {*watch.modules}
        model = self._task.model.model
        self._above = above = ModelWatch(one for one in model.modules() if one not in below)
        forward.set_depth(depth)
        probe = RowProbe(
            self._task,
            known.samples,
            known.partial,
            (watch, above),
            self._device,
            short=self._from_rows,
            leave_out=partial(setattr, forward, "leaves_out"),
        )
        try:
            why = probe.why_not(depth)
        finally:
            forward.give_back()
        watch.renew()
        above.renew()
        return why

    def account(self) -> RowAccount:
        """Reckon what rows of frozen parts cost, and save."""
        self.forward.set_depth(1)
        try:
            return row_account(self._known, self._from_rows)
        finally:
            self.forward.give_back()

    def _from_rows(
        self, entries: Mapping[str, Tensor], rows: Tensor, targets: Mapping[str, Tensor]
    ) -> Any:
        """Run the model from rows, as a loop will have it run."""
        known = self._known
        kept = [name for name in entries if known.is_read_whole or name in known.sides]
        fetched = known.bundles.opened({name: entries[name] for name in kept})
        fetched |= known.partial.beside_of(len(rows))
        ids = torch.full((len(rows),), -1)  # Nothing is read for it.
        fetched = self._joined({**fetched, HIDDEN: rows})
        batch = self._row_batch(fetched, ids, self._place.epoch)
        batch.depth = self.forward.depth
        given = {name: entry.to(self._device) for name, entry in batch.entries().items()}
        num_served = self.forward.num_served
        with self._by_ourselves():
            answer = known.partial.whole({**given, **targets}, is_opened=True)
        if self.forward.num_served == num_served:
            raise RuntimeError("a forward to be looked at has not used its rows")
        self.forward.num_served = num_served
        return answer

    @contextmanager
    def _by_ourselves(self) -> Iterator[None]:
        """Have forwards within the block say nothing of how the loop calls its model."""
        forward = self.forward
        was_confirmed, forward.is_confirmed = forward.is_confirmed, True
        try:
            yield
        finally:
            forward.is_confirmed = was_confirmed

    def close(self) -> None:
        """Give the model its own forward back, and free the rows."""
        self.forward.close()
        self.feed.close()
        if self._weights is not None:
            self._weights.let_go(self)
