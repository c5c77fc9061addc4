"""Find out what a row of the cache holds, and agree on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from autocache import HIDDEN, Positions, RowContent, RowField, RowLayout, by_position, own_lengths
from autodp import broadcast_json
from pipetransformer.feed.collation import Batch
from pipetransformer.feed.frozen_prefix import FrozenPrefix
from pipetransformer.feed.node_store import warn_of_no_cache
from pipetransformer.feed.samples import Samples
from pipetransformer.feed.target_source import TargetSource
from pipetransformer.model import Task
from pipetransformer.processes import World

_LOGGER = logging.getLogger(__name__)

_MOST_COMPARED = 16
"""Samples whose shapes are compared where no mask tells their lengths."""
_MOST_MEASURED = 64
"""Samples by whose lengths it is told what rows take, where not all are known."""


class RowFormat:
    """Describe the rows that hold a data set's samples behind the frozen prefix.

    Attributes:
        content: of rows in a store; known after `agree_on_layout`.
        targets: known without reading samples, for labels that were corrected since.
    """

    def __init__(
        self, prefix: FrozenPrefix, world: World, samples: Samples, *, chunk_size: int
    ) -> None:
        self._prefix, self._world, self._samples = prefix, world, samples
        self._task, self._chunk_size = prefix.task, chunk_size
        model = prefix.task.model
        sides = model.sides_of(0, len(model.sublayers))
        self._known = tuple(dict.fromkeys((*sides, *model.targets)))
        self.content, self.targets = RowContent(()), TargetSource(samples, sides)
        self._positions: Positions | None = None
        self._was_compared, self._trouble = False, ""
        self._mean: float | None = None
        self._pads_elsewhere = False

    def unstored_content(self) -> RowContent:
        """Return what a fetch hands on of samples where no store holds them."""
        dtype = self._dtype if self._task.config.cache else None
        return RowContent(self._known, dtype=dtype, checked=False)

    def refuse_others(self, batch: Batch) -> None:
        """Raise a ValueError for entries that the first sample lacks: rows have no room."""
        if others := [name for name in self._kept_of(batch) if name not in self.content.keep]:
            raise ValueError(
                f"samples come with {others}, which the first one alone comes without: the "
                "cache's rows have no room for that; give it in all or in none, or keep no cache"
            )
        self._refuse_counted_padding(batch)

    def _refuse_counted_padding(self, batch: Batch) -> None:
        """Raise a ValueError where a loss counts tokens that the mask calls padding.

        Rows do not hold their hidden states: such a token would be predicted from zeros.
        """
        mask_name = self.content.padding_mask
        # Whoever writes a LayeredModel promises this of its loss.
        if mask_name not in batch or not self._task.model.is_recorded:
            return
        assert mask_name is not None
        targets = {name: batch[name] for name in self._task.model.targets if name in batch}
        refuse_counted_padding(targets, mask_name, batch[mask_name], self._task)

    def agree_on_layout(self) -> RowLayout | None:
        """Return the layout of a row. Collective.

        None, with a warning, where samples have unequal shapes and it is not known what is
        padding.
        """
        found: Any = None
        if self._world.is_main:  # Rank 0 always holds the prefix.
            self._compare_samples()
            found = None if self._trouble else self._find()
            if found is None:
                warn_of_no_cache(self._world, self._trouble)
        found = broadcast_json(found, group=self._world.group)
        if found is None:
            return None
        keep, computed, fields, positions, mean_length = found
        self._positions = None if positions is None else Positions(**positions)
        self.content = self._describe(tuple(keep), getattr(torch, computed))
        return RowLayout(tuple(map(RowField.from_json, fields)), mean_length)

    def mean_over(self, batch: Batch) -> float:
        """Return samples' mean length over that of a batch's padded ones; 1 if none is known."""
        mask = self._task.model.padding_mask
        if mask not in batch or not self._world.is_main:
            return 1.0
        assert mask is not None
        self._compare_samples()
        return self._mean_length(mask) / batch[mask].shape[1]

    def padding_may_matter(self) -> bool:
        """Return whether samples have unequal lengths, and padding may have an effect."""
        self._compare_samples()
        of_no_mask = self._task.model.padding_mask is None
        return bool(self._trouble) and (of_no_mask or self._pads_elsewhere)

    def _find(self) -> list[Any] | None:
        """Run one sample through the prefix; return plain values that describe its row.

        None, with the trouble noted, where lengths differ and are not the hidden states', or
        these cannot be stored.
        """
        batch, positions = self._samples.probe([0]), self._positions
        if positions is not None:
            batch = positions.resize(batch, positions.most)
        # A whole chunk of it: kernels may give other last bits for another number of samples.
        repeat = torch.zeros(self._chunk_size, dtype=torch.int64)
        chunk = {name: t[repeat].to(self._world.device) for name, t in batch.items()}
        with torch.no_grad():
            hidden = self._prefix.run_layers(chunk, 0, self._prefix.depth)
        if positions is not None and not by_position(hidden, positions.most):
            self._trouble = (
                f"samples have unequal shapes of {[*positions.names[1:]]}, and the hidden states "
                f"of the longest are {tuple(hidden.shape[1:])}, not one for each position"
            )
            return None
        if not torch.equal(hidden, hidden[:1].expand_as(hidden)):
            _LOGGER.info(
                "this machine's kernels give a sample other last bits at another place of a "
                "chunk: a cached run equals an uncached one to rounding, not bit by bit"
            )
        content = self._describe(self._kept_of(batch), hidden.dtype)
        try:
            layout = content.layout(batch, hidden[:1])
        except ValueError as error:  # No tokens, which int8 needs.
            self._trouble = f"cache_dtype={self._task.config.cache_dtype!r}: {error}"
            return None
        mask, computed = content.padding_mask, str(hidden.dtype).removeprefix("torch.")
        mean_length = self._mean_length(mask) if mask is not None and layout.varies else None
        fields = [field.to_json() for field in layout.fields]
        padded = None if positions is None else asdict(positions)
        return [list(content.keep), computed, fields, padded, mean_length]

    def _mean_length(self, mask: str) -> float:
        """Return the mean of samples' own lengths: of all if they are known, or of some."""
        if self._mean is None:
            probes = (self._samples.probe([one]) for one in self._samples.spread(_MOST_MEASURED))
            lengths = [int(own_lengths(probe[mask])) for probe in probes if mask in probe]
            self._mean = sum(lengths) / max(len(lengths), 1)
        return self._mean

    def _compare_samples(self) -> None:
        """Find out, once, whether samples have unequal lengths, and how they are padded."""
        if self._was_compared or self._samples.collation.function is None:
            return
        self._was_compared = True
        mask = self._task.model.padding_mask
        parts = self._samples.collation.padded_together(len(self._samples.dataset))
        chosen = self._samples.spread(_MOST_COMPARED)
        if mask is not None:
            chosen = [index for part in parts for index in self._extremes(mask, part)]
        singly = [self._samples.probe([index]) for index in chosen]
        names = [n for n in singly[0] if len({sample[n].shape for sample in singly}) > 1]
        if not names:
            return
        if mask is None:
            self._trouble = (
                f"samples have unequal shapes of {names}, and the model names no padding_mask "
                "that says what of them is padding"
            )
            return
        padding: dict[str, float] = {}
        masks = [sample.get(mask, Tensor()).shape for sample in singly]
        odd = [n for n in names if [sample[n].shape[:2] for sample in singly] != masks]
        for place in range(0, len(chosen), 2):
            # The shortest beside the longest is certainly padded.
            shorter, other = singly[place : place + 2]
            together = self._samples.read(chosen[place : place + 2], view=0)
            for name in [n for n in names if shorter[n].shape != other[n].shape]:
                value = _padding_of(together[name], shorter[name], other[name])
                if value is None or padding.setdefault(name, value) != value:
                    odd.append(name)
        if odd or padding.get(mask, 0) != 0:
            self._trouble = (
                f"samples have unequal shapes of {names}, and collate_fn does not pad "
                f"{[*dict.fromkeys(odd)] or [mask]} behind a sample's end, {mask!r} with zeros"
            )
            self._pads_elsewhere = True
            return
        most = max(shape[1] for shape in masks)
        self._positions = Positions(mask, (HIDDEN, *names), most, padding)

    def _extremes(self, mask: str, part: range) -> list[int]:
        """Return the shortest sample and the longest of those that are padded together."""
        samples = self._samples
        if len(part) < len(samples.dataset):  # Of several texts in a sample the longest counts.
            shapes = [samples.probe([index])[mask].shape[1] for index in part]
            return [part[shapes.index(end(shapes))] for end in (min, max)]
        items = (samples.dataset[index] for index in range(len(samples.dataset)))
        lengths = [_tokens_of(item, mask) for item in items]
        if None in lengths:  # The mask is made by collate_fn, so each sample is collated alone.
            every = range(len(lengths))
            batches = (samples.probe([index]) for index in every)
            lengths = [int(own_lengths(b[mask])) if mask in b else 0 for b in batches]
        found = torch.tensor(lengths)
        self._mean = float(found.double().mean())
        return [int(found.argmin()), int(found.argmax())]

    @property
    def _dtype(self) -> torch.dtype | None:
        dtype = self._task.config.cache_dtype
        return None if dtype is None else getattr(torch, dtype)

    def _kept_of(self, batch: Mapping[str, Tensor]) -> tuple[str, ...]:
        return tuple(name for name in self._known if name in batch)

    def _describe(self, keep: tuple[str, ...], computed_dtype: torch.dtype) -> RowContent:
        mask = self._task.model.padding_mask
        return RowContent(
            keep,
            # Whole numbers, such as tokens that a first layer hands on, must not be rounded.
            dtype=self._dtype if computed_dtype.is_floating_point else None,
            computed_dtype=computed_dtype,
            padding_mask=mask if mask in keep else None,
            positions=self._positions,
            checks_every=self._task.config.cache_check == "all",
            changed=self.targets.changed,
        )


def refuse_counted_padding(
    targets: Mapping[str, Tensor], mask_name: str, mask: Tensor, task: Task
) -> None:
    """Raise a ValueError where targets by token have something to learn at padding.

    Args:
        mask: (B, S), 0 behind a sample's end; targets of other shapes are not by token.
    """
    padding = torch.arange(mask.shape[1]) >= own_lengths(mask)[:, None]
    for name, target in targets.items():
        # A mask of some tokens, such as TRL's completion_mask, leaves others out by 0.
        left_out = 0 if name.endswith("mask") else task.loss_fn.ignore_index
        if target.shape == mask.shape and bool((padding & (target != left_out)).any()):
            raise ValueError(
                f"{name!r} has other values than {left_out} where {mask_name!r} says padding, and "
                f"the cache holds no padding: label it with {left_out}, or keep no cache"
            )


def _padding_of(together: Tensor, shorter: Tensor, longer: Tensor) -> float | None:
    """Return what a batch of two is padded with behind the shorter; None without such a value.

    Args:
        together: (2, S, ...) of both.
        shorter, longer: (1, s, ...) each, of one alone.
    """
    num = shorter.shape[1]
    behind = together[0, num:]
    kept = torch.equal(together[0, :num], shorter[0]) and torch.equal(together[1], longer[0])
    if (
        not kept
        or behind.numel() == 0
        or not torch.equal(behind, behind[:1, ...].flatten()[0].expand_as(behind))
    ):
        return None
    return float(behind.flatten()[0])


def _tokens_of(item: Any, mask: str) -> int | None:
    """Return the tokens of a sample that is not yet collated, by its mask; None without one."""
    values = item.get(mask) if isinstance(item, Mapping) else None
    return None if values is None else int(own_lengths(torch.as_tensor(values).reshape(1, -1)))
