"""Find where a number that is not finite began, in a step that has one.

A backward flows from the head down: of all sublayers whose gradient is not finite the highest is
where it began, unless the loss itself was not finite already. Before both come the samples, and
in a run's first step the weights that the model came with. Looking for it costs a few messages and
reading the samples once more, which only such a step pays.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autodp import GradientReducer, gather_json
from pipetransformer.feed import Rows
from pipetransformer.job import Task, trained_parameters
from pipetransformer.processes import World

_LOGGER = logging.getLogger(__name__)


_SKIPS = "leave steps out with on_nonfinite='skip'"
CALMER = f"Lower the learning rate, clip with max_grad_norm, or {_SKIPS}"


@dataclass(frozen=True)
class Origin:
    """Say where it began, and what to do about it."""

    where: str
    advice: str = CALMER


def before_the_step(
    task: Task, indices: Iterable[int], *, rows: Rows, ids: Tensor, is_first: bool
) -> Origin | None:
    """Say what was not finite before anything was computed, if anything was.

    Args:
        indices: the sublayers that this rank holds.
        rows, ids: the samples that this rank reads.
        is_first: whether this is the run's first step, which has the weights that were given.
    """
    for index in indices if is_first else ():
        for name, tensor in task.model.tensors(index).items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                return Origin(
                    f"it began before the run, in {name!r} of the model as it was given",
                    "Load or initialise it anew",
                )
    try:
        batch = rows.look(ids) if len(ids) else {}
    except Exception as error:  # What is looked into is to be told of, and not this.
        _LOGGER.warning("a bad step's samples cannot be read once more to look at: %r", error)
        return None
    for name, entry in batch.items():
        if entry.is_floating_point():
            # A mask that is added may well hold -inf.
            bad = (entry.isnan() | (entry == torch.inf)).reshape(len(ids), -1).any(1)
            if samples := ids[bad.cpu()].tolist():
                more = f" and {len(samples) - 1} more of its samples" if samples[1:] else ""
                return Origin(
                    f"it began in the data: {name!r} of sample {samples[0]}{more} holds numbers "
                    "that are not finite",
                    f"Correct or leave out such samples, or {_SKIPS}",
                )
    return None


def where_it_began(
    task: Task,
    world: World,
    indices: range,
    *,
    loss: float,
    reducer: GradientReducer | None,
    before: Origin | None,
) -> Origin:
    """Say where it began, from what all ranks find; the same words on every rank. Collective.

    Args:
        indices: the sublayers that this rank trains.
        loss: this rank's part of the loss.
        reducer: has summed the gradients over the replicas of the stage, and still has its own.
        before: what this rank found by `before_the_step`.
    """
    own = {} if reducer is None else reducer.own_gradients
    highest, brought = -1, False
    for index in indices:
        parameters = list(trained_parameters(task, (index,)).values())
        if _has_nonfinite([p.grad for p in parameters]):
            highest, brought = index, _has_nonfinite([own.get(p, p.grad) for p in parameters])
    found = gather_json([not math.isfinite(loss), highest, brought], group=world.group)
    return first_cause(before, world) or Origin(_where(task, found))


def first_cause(before: Origin | None, world: World) -> Origin | None:
    """Return what the first rank has found that has found something. Collective."""
    own = before and [before.where, before.advice]
    return next((Origin(*one) for one in gather_json(own, group=world.group) if one), None)


def _where(task: Task, found: Sequence[tuple[bool, int, bool]]) -> str:
    """Say it by whether each rank's loss is bad, its highest bad sublayer, and whose that was."""
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
