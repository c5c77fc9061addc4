"""Find where a number that is not finite began, in a step that has one.

A backward flows from the head down: of all sublayers whose gradient is not finite the highest is
where it began, unless the loss itself was not finite already. Looking for it costs a few messages,
which only such a step pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from autodp import GradientReducer, gather_json
from pipetransformer.job import Task, trained_parameters
from pipetransformer.processes import World


def where_it_began(
    task: Task,
    world: World,
    indices: range,
    *,
    loss: float,
    reducer: GradientReducer | None,
) -> str:
    """Say where it began, from what all ranks find; the same words on every rank. Collective.

    Args:
        indices: the sublayers that this rank trains.
        loss: this rank's part of the loss.
        reducer: has summed the gradients over the replicas of the stage, and still has its own.
    """
    own = {} if reducer is None else reducer.own_gradients
    highest, brought = -1, False
    for index in indices:
        parameters = list(trained_parameters(task, (index,)).values())
        if _has_nonfinite([p.grad for p in parameters]):
            highest, brought = index, _has_nonfinite([own.get(p, p.grad) for p in parameters])
    found = gather_json([not math.isfinite(loss), highest, brought], group=world.group)
    if in_loss := [rank for rank, (is_in_loss, _, _) in enumerate(found) if is_in_loss]:
        return f"it began before the backward, in the loss of {_name(in_loss)}"
    highest = max(index for _, index, _ in found)
    if highest < 0:
        return "every single value is finite, but their sum is too large for a number"
    where = f"in the gradient of sublayer {task.model.sublayers[highest].name!r}"
    ranks = [rank for rank, (_, *one) in enumerate(found) if one == [highest, True]]
    if not ranks:
        return f"it began {where}, in the sum over the replicas"
    return f"it began {where} on {_name(ranks)}"


def _has_nonfinite(gradients: Sequence[Tensor | None]) -> bool:
    return any(one is not None and not bool(one.isfinite().all()) for one in gradients)


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
