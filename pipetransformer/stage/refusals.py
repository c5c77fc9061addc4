"""Notice between and within steps what would let replicas drift apart, or train nothing.

What a forward writes into its own tensors depends on the samples it was given, and so on K, M and
R. What a user changes between two steps (modules, `requires_grad`, hooks on parameters) does not
reach the layers that other ranks hold, or is undone by the next transition.

Find where a number that is not finite began, in a step that has one.

A backward flows from the head down: of all sublayers whose gradient is not finite the highest is
where it began, unless the loss itself was not finite already. Before both come the samples, and
in a run's first step the weights that the model came with. Looking for it costs a few messages and
reading the samples once more, which only such a step pays.

Name the sample that a model or its loss cannot take, once a batch of them has failed.

A text too long, a token beyond the vocabulary, a class that the head has not: torch says what it
is, and not whose. So the samples are tried one by one; only a run that ends pays for that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autodp import GradientReducer, gather_json
from pipetransformer.feed import Rows, SampleError, part_of
from pipetransformer.model import Task, has_hooks, trained_parameters
from pipetransformer.processes import World


@dataclass
class _Watched:
    """Hold a tensor as it was: the object, how often it was written to, and a buffer's values."""

    sublayer: str
    name: str
    trains: bool
    tensor: Tensor
    version: int
    values: Tensor | None


class StageWatch:
    """Watch the tensors of a stage's sublayers, which are given by index.

    It looks twice a step, while devices wait: at what is as it was in few operations each.
    """

    def __init__(self, task: Task, frozen: Sequence[int], trained: Sequence[int]) -> None:
        self._model = model = task.model
        self._modules = [module._modules for module in model.model.modules()]
        self._children = [tuple(children.values()) for children in self._modules]
        self._watched = [
            _Watched(
                model.sublayers[index].name,
                name,
                tensor.requires_grad,
                tensor,
                tensor._version,
                None if isinstance(tensor, nn.Parameter) else tensor.clone(),
            )
            for index in (*frozen, *trained)
            for name, tensor in model.tensors(index).items()
        ]
        self._parameters = [
            (one, *model.holder(one.name)) for one in self._watched if one.values is None
        ]
        self._places = [
            (holder._parameters, attribute) for _, holder, attribute in self._parameters
        ]
        self._flags = [(one.tensor, one.trains) for one, *_ in self._parameters]

    def begin(self) -> str:
        """Say what the user has changed since the last step, or ""; forget what was written."""
        for one in self._watched:
            one.version = one.tensor._version
        if [*map(tuple, map(dict.values, self._modules))] != self._children:
            return (
                "modules of the model were added or replaced between two steps; change weights "
                "in place, or start another Trainer"
            )
        if self._parameters_are_as_they_were():
            return ""
        for one, holder, attribute in self._parameters:
            if holder._parameters.get(attribute) is not one.tensor:
                return (
                    f"parameter {one.name!r} was replaced between two steps; write into it, as "
                    "load_state_dict does without assign=True"
                )
            if one.tensor.requires_grad is not one.trains:
                return (
                    f"requires_grad of parameter {one.name!r} was changed between two steps; let "
                    "freeze= decide which layers train, and set it before the Trainer is built "
                    "for what is never to be trained"
                )
            if has_hooks(one.tensor, but_ours=True):
                return f"parameter {one.name!r} was given a hook between two steps; remove it"
        return ""

    def _parameters_are_as_they_were(self) -> bool:
        """Tell whether there is nothing to say of them, in little time: each step waits for it."""
        found = (table.get(attribute) for table, attribute in self._places)
        return all(
            now is tensor and now.requires_grad is trains and not has_hooks(now, but_ours=True)
            for now, (tensor, trains) in zip(found, self._flags, strict=True)
        )

    def find_written(self, *, trained: bool = True) -> str:
        """Say what was written since `begin`, or ""; a buffer may get the values it had.

        Args:
            trained: whether trained parameters count; an update writes into them, too.
        """
        for one in self._watched:
            now = one.tensor if one.values is None else self._model.tensor(one.name)
            if now is one.tensor and now._version == one.version:
                continue
            if one.trains and not trained:
                continue
            one.tensor, one.version = now, now._version
            if one.values is None or not torch.equal(now, one.values):
                return written_text(one.name, one.sublayer)
        return ""


def written_text(tensor: str, sublayer: str) -> str:
    """Say that a forward writes, and what to do."""
    return (
        f"the forward of sublayer {sublayer!r} writes into its own {tensor!r}; what it writes "
        "depends on how a batch is split over micro-batches and replicas, which would drift "
        "apart: use a layer without running statistics, power iteration or max_norm, or compute "
        "what it needs within each forward"
    )


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


def named(
    error: Exception,
    what: str,
    compute: Callable[[Any], Any],
    given: Mapping[str, Any],
    ids: Tensor,
) -> Exception:
    """Return an error that names a sample which fails by itself, where others do not.

    Args:
        error: what all of them together failed with; returned where no sample is to blame. After
            an error of a GPU nothing can be tried there any more.
        what: could not take them: "the model".
        compute: takes some samples of what is given.
        given: entries by name, (N, ...) each, or mappings of such.
        ids: (N,) int64, the samples.
    """
    if isinstance(error, torch.OutOfMemoryError) or torch.cuda.is_initialized():
        return error
    causes: list[tuple[int, Exception]] = []
    for place in range(len(ids)):
        try:
            with torch.no_grad():
                compute(part_of(dict(given), slice(place, place + 1)))
        except Exception as raised:
            causes.append((place, raised))
    if not 0 < len(causes) < len(ids):
        return error
    place, cause = causes[0]
    shown = _shown(part_of(dict(given), slice(place, place + 1)))
    others = f" (as it cannot {len(causes) - 1} others of its batch)" if len(causes) > 1 else ""
    return SampleError(f"{what} cannot take sample {int(ids[place])}{others}: {cause}; {shown}")


def _shown(entries: Mapping[str, Any]) -> str:
    """Say what entries of one sample hold: shape, dtype, and from where to where values go."""
    texts = []
    for name, entry in entries.items():
        if isinstance(entry, Mapping):
            texts.append(_shown(entry))
            continue
        dtype = str(entry.dtype).removeprefix("torch.")
        text = f"{name} is {tuple(entry.shape[1:])} {dtype}"
        if entry.numel() and not entry.is_complex():
            text += f" from {entry.min().item():g} to {entry.max().item():g}"
        texts.append(text)
    return ", ".join(texts)
