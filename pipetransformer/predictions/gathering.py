"""Bring the replicas' outputs together, in the order of the data set, on every rank.

A replica's samples are a contiguous slice, and replicas are in order. Workers of one stage have
micro-batches by turns; their rows are put in order in the end::

    rank 1, last stage of replica 0    rows 0 1 2 3    padded to the widest of all
    rank 3, last stage of replica 1    rows 4 5 6
    every rank                         rows 0 1 2 3 4 5 6
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from autodp import broadcast_tensor, gather_json
from pipetransformer.predictions.kept_outputs import IDS, KeptOutputs

PADDING = -100
"""What fills the rows that are shorter than others: transformers' choice."""


def gather_outputs(
    kept: KeptOutputs, *, group: dist.ProcessGroup | None
) -> dict[str, np.ndarray[Any, Any]]:
    """Return outputs and targets by name, (N, ...) each, on every rank. Collective.

    Where the second dimension differs, rows are padded with -100; truth values and unsigned
    numbers, which cannot be -100, become int64. What was kept is let go of as it is copied.

    Raises:
        ValueError: on every rank: outputs differ in dtype, or in another dimension.
        PeerError: a rank is gone, or silent for longer than the group's time limit.
    """
    described = gather_json(kept.describe(), group=group)
    rank = 0 if group is None else dist.get_rank()
    arrays = {}
    for name in dict.fromkeys(name for one in described for name in one):
        parts = {source: one[name] for source, one in enumerate(described) if name in one}
        whole, first = _make_whole(name, list(parts.values())), 0
        for source, part in parts.items():
            rows = whole[first : first + part["rows"]]
            if source == rank:
                _copy_into(rows, kept.parts.pop(name))
            broadcast_tensor(rows, source, group=group, what=f"its {name}")
            first += len(rows)
        arrays[name] = whole.numpy()
    ids = arrays.pop(IDS)
    if (ids[1:] < ids[:-1]).any():
        places = ids.argsort()
        arrays = {name: array[places] for name, array in arrays.items()}
    return arrays


def _make_whole(name: str, parts: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return what holds all ranks' rows; those of unequal width are padded to the widest."""
    dtypes = {part["dtype"] for part in parts}
    shapes = {tuple(shape) for part in parts for shape in part["shapes"]}
    widest = tuple(map(max, zip(*shapes, strict=False)))
    rests = {(len(shape), shape[1:]) for shape in shapes}
    if len(dtypes) > 1 or len(rests) > 1:
        raise ValueError(
            f"{name} of one data set have the dtypes {sorted(dtypes)} and, for a sample, the "
            f"shapes {sorted(shapes)}; only the first dimension of a sample may differ: pad the "
            "others"
        )
    size = sum(part["rows"] for part in parts), *widest
    dtype = getattr(torch, dtypes.pop())
    if len(shapes) == 1:
        return torch.empty(size, dtype=dtype)
    return torch.full(size, PADDING, dtype=dtype if dtype.is_signed else torch.int64)


def _copy_into(rows: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy parts one below the other, each into the beginning of its rows."""
    first = 0
    for part in parts:
        place = rows[first : first + len(part)]
        if part.ndim > 1:
            place = place[:, : part.shape[1]]
        place.copy_(part)
        first += len(part)
