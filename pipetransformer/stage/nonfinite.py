"""Find where a number that is not finite began, in a step that has one.

A backward flows from the head down: of all sublayers whose gradient is not finite the highest is
where it began, unless the loss itself was not finite already. Looking for it costs a few messages,
which only such a step pays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch import nn

from autodp import GradientReducer, gather_json
from pipetransformer.job import Task, trained_parameters


@dataclass(frozen=True)
class Finding:
    """Report what one rank found.

    Args:
        loss: whether its own part of the loss is not finite.
        sublayer: index of its highest sublayer whose gradient is not finite; -1 for none.
        ranks: which replicas brought that gradient; none where only their sum overflowed.
    """

    loss: bool
    sublayer: int
    ranks: tuple[int, ...]


def highest_nonfinite(parameters: Mapping[int, Iterable[nn.Parameter]]) -> int:
    """Return the highest sublayer, by index, with a gradient that is not finite, or -1."""
    gradients = ((index, p.grad) for index, own in parameters.items() for p in own)
    found = [index for index, one in gradients if one is not None and not one.isfinite().all()]
    return max(found, default=-1)


def find_nonfinite(
    task: Task,
    indices: range,
    *,
    loss: float,
    reducer: GradientReducer | None,
    members: Sequence[int],
    rank: int,
) -> Finding:
    """Look for it on one rank, in its loss and in the gradients of the sublayers that it trains.

    Args:
        task: what is trained.
        indices: its sublayers that this rank trains.
        loss: this rank's part of the loss.
        reducer: has summed the gradients over the replicas of the stage.
        members: ranks of these replicas.
        rank: this one.
    """
    parameters = {
        index: tuple(trained_parameters(task, range(index, index + 1)).values())
        for index in indices
    }
    highest = highest_nonfinite(parameters)
    ranks: tuple[int, ...] = (rank,)
    if highest >= 0 and reducer is not None:
        replicas = reducer.nonfinite_replicas(parameters[highest])
        ranks = tuple(members[replica] for replica in replicas)
    return Finding(not math.isfinite(loss), highest, ranks)


def locate(
    finding: Finding, name_of: Callable[[int], str], *, group: dist.ProcessGroup | None
) -> str:
    """Say where it began, from all ranks' findings; the same words on every rank. Collective."""
    found = [Finding(**one) for one in gather_json(asdict(finding), group=group)]
    if ranks := [rank for rank, one in enumerate(found) if one.loss]:
        return f"it began before the backward, in the loss of {_name(ranks)}"
    first = max(found, key=lambda one: one.sublayer)
    if first.sublayer < 0:
        return "every single value is finite, but their sum is too large for a number"
    where = f"in the gradient of sublayer {name_of(first.sublayer)!r}"
    if not first.ranks:
        return f"it began {where}, in the sum over the replicas"
    return f"it began {where} on {_name(first.ranks)}"


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
