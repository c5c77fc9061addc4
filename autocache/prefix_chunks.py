"""Choose which samples run through layers together, and run them in chunks of one size.

Space that is left in a chunk goes to samples of later fetches, which then find their rows::

    chunks of 8      found at 0   found at 2    of later fetches
    layers 0, 1      x x x                      x x
    layers 2, 3      x x x        x x x         x x
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from autocache.row_content import HIDDEN
from autocache.uploads import Uploader, send_like

SampleRows: TypeAlias = tuple[Tensor, Tensor]
"""Sample ids and row ids, (B,) int64 each, on the CPU. A row id beyond the store means no row."""
NOTHING: SampleRows = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
NO_ROW = torch.iinfo(torch.int64).max

RunLayers: TypeAlias = Callable[[dict[str, Tensor], int, int], Tensor]
"""Runs layers first..last-1 of (batch, first, last) and returns the hidden states."""


@dataclass(frozen=True)
class FoundSamples:
    """Hold a fetch's own samples, then those of later fetches; (B,) int64 each, on the CPU.

    `found` are the depths at which their rows are found, or will be; 0 for none.
    """

    ids: Tensor
    row_ids: Tensor
    found: Tensor

    @property
    def num_found(self) -> int:
        return int((self.found > 0).sum())

    def with_depths(self, depths: Tensor) -> FoundSamples:
        """Return the same samples, whose rows are found at other (B,) depths."""
        return FoundSamples(self.ids, self.row_ids, depths)


@dataclass(frozen=True)
class LoadedSamples:
    """Hold what the dataset gave: (N,) ids, each once, and its entries, (N, ...) each."""

    ids: Tensor
    entries: dict[str, Tensor]

    def entries_of(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the entries of some of the ids, in the order given."""
        if torch.equal(self.ids, ids):
            return dict(self.entries)
        ascending, order = self.ids.sort()
        index = order[torch.searchsorted(ascending, ids)]
        return {name: entry[send_like(index, entry)] for name, entry in self.entries.items()}


class ChunkedLayers:
    """Run layers on chunks of one number of samples, whatever the batch's size."""

    def __init__(self, run_layers: RunLayers, chunk_size: int, *, device: torch.device) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; give at least one sample per chunk")
        self._run_layers, self.chunk_size = run_layers, chunk_size
        self._device, self._uploader = device, Uploader(device)

    def send(self, hidden: Tensor) -> Tensor:
        """Return hidden states on the layers' device."""
        return self._uploader.send({HIDDEN: hidden})[HIDDEN]

    @torch.no_grad()
    def run(self, batch: dict[str, Tensor], first: int, last: int) -> Tensor:
        """Return the (N, ...) hidden states behind layers first..last-1."""
        num = len(next(iter(batch.values())))
        chunks = self._chunks(self._uploader.send(batch), num)
        starts = range(0, num, self.chunk_size)
        parts = [
            self._run_layers(chunk, first, last)[: num - start]
            for start, chunk in zip(starts, chunks, strict=True)
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _chunks(self, batch: dict[str, Tensor], num: int) -> Iterator[dict[str, Tensor]]:
        """Cut a batch into chunks; pad the last one with its last sample."""
        if num == self.chunk_size and self._device.type == "cuda":
            # It was sent into memory of its own, aligned as all memory there is.
            yield batch
            return
        for start in range(0, num, self.chunk_size):
            # A copy even where a slice would do: kernels may sum in another order when their
            # input is aligned differently.
            index = torch.arange(start, start + self.chunk_size, device=self._device)
            index = index.clamp_(max=num - 1)
            yield {name: entry.index_select(0, index) for name, entry in batch.items()}


def room_in_chunks(found: Tensor, *, chunk_size: int, depth: int) -> dict[int, int]:
    """Return how many more samples fit into the chunks that a fetch runs anyway.

    No layer runs on more chunks than without them: other stages may be waiting for this step.
    The answer is by depth, ascending, for samples found there or below; {} if there is no room.
    `found` are the fetch's (B,) depths; rows found at the `depth` wanted are not run.
    """
    numbers = sorted(Counter(first for first in found.tolist() if first < depth).items())
    running = list(accumulate(number for _, number in numbers))
    # A sample passes through the chunks of its own depth and of all depths above: the least room
    # among them counts.
    room = [*accumulate((-num % chunk_size for num in reversed(running)), min)][::-1]
    depths = (first for first, _ in numbers)
    return dict(zip(depths, room, strict=True)) if any(room) else {}


def filling(room: Mapping[int, int], later: Tensor) -> Tensor:
    """Return the positions of the samples to fill room with, from `room_in_chunks`.

    `later` are the (N,) depths at which samples of later fetches are found, the sooner first.
    """
    chosen = NOTHING[0]
    for first, most in room.items():
        # Samples chosen at smaller depths pass through these chunks, too.
        fitting = (later == first).nonzero().flatten()[: max(0, most - len(chosen))]
        chosen = torch.cat((chosen, fitting))
    return chosen


def each_once(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids, in the order they first appear, and each id's place among them.

    Not sorted: a collate function gets the samples of a step in the order of the step.
    """
    places: dict[int, int] = {}
    inverse = [places.setdefault(number, len(places)) for number in ids.tolist()]
    return torch.tensor([*places], dtype=torch.int64), torch.tensor(inverse, dtype=torch.int64)


def one_each(positions: Tensor, num: int, inverse: Tensor) -> Tensor:
    """Return one position for each of `num` distinct ids; `inverse` is from `each_once`."""
    if len(positions) == num:  # No id twice, so they are in order already.
        return positions
    # Where an id has several positions, any of them will do.
    return positions.new_empty(num).scatter_(0, inverse, positions)


def select(values: Tensor, positions: Tensor) -> Tensor:
    """Return the values at distinct ascending positions, without a copy where these are all."""
    return values if len(positions) == len(values) else values[send_like(positions, values)]


def place(
    rows: dict[str, Tensor], positions: Tensor, fresh: dict[str, Tensor], inverse: Tensor
) -> None:
    """Put fresh rows, one for each distinct id, at all positions of that id.

    Raises:
        ValueError: they have other shapes than the rows that are there.
    """
    for name, row in fresh.items():
        own = row if len(row) == len(inverse) else row[send_like(inverse, row)]
        if name not in rows:  # Nothing was read, so these are all the positions there are.
            rows[name] = own
        elif own is not rows[name]:
            if row.shape[1:] != rows[name].shape[1:]:
                raise ValueError(
                    f"{name!r} has the shape {tuple(row.shape[1:])} for some samples, and "
                    f"{tuple(rows[name].shape[1:])} for others: pad all samples to one length, "
                    "or keep no cache"
                )
            rows[name][send_like(positions, row)] = own
