"""Say which samples run through layers together, and where each of them stands.

As layers run on chunks of one fixed number of samples, what the fullest lacks is filled up with
samples of later fetches, which then find their rows::

    chunks of 8      found at 0   found at 2    of later fetches
    layers 0, 1      x x x                      x x
    layers 2, 3      x x x        x x x         x x
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from autocache.uploads import beside

SampleRows: TypeAlias = tuple[Tensor, Tensor]
"""(B,) int64 each, on CPU: ids of samples, and those of their rows in the store, out of its range
where they have none."""
NOTHING: SampleRows = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
NO_ROW = torch.iinfo(torch.int64).max


@dataclass
class FoundSamples:
    """Hold the samples of a fetch, those of later ones behind its own; (B,) int64 each, on CPU.

    Args:
        ids, row_ids: see `SampleRows`.
        found: the depths at which their rows are found, or will be.
    """

    ids: Tensor
    row_ids: Tensor
    found: Tensor

    def without_rows(self, num: int) -> Tensor:
        """Return the ids of the rows, where the first samples have none."""
        return self.row_ids.index_fill(0, torch.arange(num), NO_ROW)


def room_in_chunks(found: Tensor, *, chunk_size: int, depth: int) -> dict[int, int]:
    """Return how many samples more, found at a depth or below it, run in the chunks of a fetch.

    No layer runs on more chunks than without them, so that no step takes longer: others may be
    waiting for it.

    Args:
        found: (B,) the depths at which the rows of a fetch were found.
        depth: what is wanted; rows found there are not run.
    Returns:
        by depth, ascending; {} if there is no room.
    """
    numbers = sorted(Counter(one for one in found.tolist() if one < depth).items())
    running = list(accumulate(number for _, number in numbers))
    # Of a depth, and of those above it, which what comes from below passes through, too.
    room = [*accumulate((-one % chunk_size for one in reversed(running)), min)][::-1]
    depths = (first for first, _ in numbers)
    return dict(zip(depths, room, strict=True)) if any(room) else {}


def filling(room: Mapping[int, int], later: Tensor) -> Tensor:
    """Return the positions of those later samples that fill up chunks which are run anyway.

    Args:
        room: from `room_in_chunks`.
        later: (N,) the depths at which samples of later fetches are found, the sooner first.
    """
    taken, chosen = 0, [torch.empty(0, dtype=torch.int64)]
    for first, most in room.items():
        chosen.append((later == first).nonzero().flatten()[: max(0, most - taken)])
        taken += len(chosen[-1])
    return torch.cat(chosen)


def each_once(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids each once, in the order in which they first come, and where among them each is.

    Not sorted: a collate function gets the samples of a step in the order of the step.
    """
    places: dict[int, int] = {}
    inverse = [places.setdefault(number, len(places)) for number in ids.tolist()]
    return torch.tensor([*places], dtype=torch.int64), torch.tensor(inverse, dtype=torch.int64)


def one_each(positions: Tensor, num: int, inverse: Tensor) -> Tensor:
    """Return a position of each of so many ids; `inverse` says whose each of all is."""
    if len(positions) == num:  # Nobody comes twice, and they are in order.
        return positions
    # Any one position of each id will do.
    return positions.new_empty(num).scatter_(0, inverse, positions)


def taken(values: Tensor, positions: Tensor) -> Tensor:
    """Return the values at distinct ascending positions, without a copy where these are all."""
    return values if len(positions) == len(values) else values[beside(positions, values)]


def of_ids(batch: Mapping[str, Tensor], held: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Return the rows of some ids of those that a batch holds."""
    if torch.equal(held, ids):
        return dict(batch)
    ascending, order = held.sort()
    index = order[torch.searchsorted(ascending, ids)]
    return {name: entry[beside(index, entry)] for name, entry in batch.items()}


def place(
    rows: dict[str, Tensor], positions: Tensor, fresh: dict[str, Tensor], inverse: Tensor
) -> None:
    """Put fresh rows, each id once, at all its positions."""
    for name, row in fresh.items():
        own = row if len(row) == len(inverse) else row[beside(inverse, row)]
        if name not in rows:  # Nothing was read, so these are all the positions there are.
            rows[name] = own
        elif own is not rows[name]:
            rows[name][beside(positions, row)] = own
