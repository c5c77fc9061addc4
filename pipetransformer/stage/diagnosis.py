"""Refuse on all ranks what would let replicas drift apart, and name the cause.

StageWatch: what a forward writes into its own tensors depends on its samples, and so on how a
batch is split. What a user changes between two steps (modules, `requires_grad`, hooks) does not
reach the layers of other ranks, or the next transition undoes it.

Origin: where a number that is not finite began. A backward flows from the head down, so it is the
highest sublayer whose gradient is not finite, unless the loss itself was not finite. Before both
come the samples and, in a run's first step, the weights that the model came with.

named: which sample a model or its loss cannot take, such as a text too long or a class that the
head lacks. torch does not say whose it is, so samples are tried one by one; the run ends anyway.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autodp import GradientReducer, gather_json
from pipetransformer.feed import Rows, SampleError, part_of
from pipetransformer.model import Task, has_hooks, trained_parameters
from pipetransformer.processes import World

_LOGGER = logging.getLogger(__name__)


@dataclass
class _Watched:
    """Hold a tensor as it was, where the model holds it, and a buffer's values.

    Attributes:
        version: how often it was written to.
    """

    sublayer: str
    name: str
    holder: nn.Module
    attribute: str
    trains: bool
    tensor: Tensor
    version: int
    values: Tensor | None


class StageWatch:
    """Watch the tensors of a stage's sublayers, which are given by index.

    It looks twice a step, while devices wait, so what is as it was takes few operations.
    """

    def __init__(self, task: Task, frozen: Sequence[int], trained: Sequence[int]) -> None:
        self._model = model = task.model
        self._modules = [module._modules for module in model.model.modules()]
        self._children = [tuple(children.values()) for children in self._modules]
        self._watched = [
            _Watched(
                model.sublayers[index].name,
                name,
                *model.holder(name),
                tensor.requires_grad,
                tensor,
                tensor._version,
                None if isinstance(tensor, nn.Parameter) else tensor.clone(),
            )
            for index in (*frozen, *trained)
            for name, tensor in model.tensors(index).items()
        ]
        self._parameters = [one for one in self._watched if one.values is None]
        # Beside each parameter the table that holds it: nn.Module.__getattr__ is slow.
        self._tables = [one.holder._parameters for one in self._parameters]

    def begin(self) -> str:
        """Say what the user has changed since the last step, or ""; forget what was written."""
        for one in self._watched:
            one.version = one.tensor._version
        if [*map(tuple, map(dict.values, self._modules))] != self._children:
            return (
                "modules of the model were added or replaced between two steps; change weights "
                "in place, or start another Trainer"
            )
        for one, table in zip(self._parameters, self._tables, strict=True):
            now = table.get(one.attribute)
            if now is not one.tensor:
                return (
                    f"parameter {one.name!r} was replaced between two steps; write into it, as "
                    "load_state_dict does without assign=True"
                )
            if now.requires_grad is not one.trains:
                return (
                    f"requires_grad of parameter {one.name!r} was changed between two steps; let "
                    "freeze= decide which layers train, and set it before the Trainer is built "
                    "for what is never to be trained"
                )
            if has_hooks(now, but_ours=True):
                return f"parameter {one.name!r} was given a hook between two steps; remove it"
        return ""

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


_SKIPS = "leave steps out with on_nonfinite='skip'"
_CALMER = f"Lower the learning rate, clip with max_grad_norm, or {_SKIPS}"


@dataclass(frozen=True)
class Origin:
    """Say where a number that is not finite began, and what to do about it."""

    where: str
    advice: str = _CALMER


def before_the_step(task: Task, given: Iterable[int], *, rows: Rows, ids: Tensor) -> Origin | None:
    """Say what was not finite before anything was computed, if anything was.

    Args:
        given: this rank's sublayers that still have the user's weights.
        rows, ids: the samples that this rank reads.
    """
    for index in given:
        for name, tensor in task.model.tensors(index).items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                return Origin(
                    f"it began before the run, in {name!r} of the model as it was given",
                    "Load or initialise it anew",
                )
    try:
        batch = rows.look(ids) if len(ids) else {}
    except Exception as error:  # The step's own error must be told, and not this one.
        _LOGGER.warning("a bad step's samples cannot be read once more to look at: %r", error)
        return None
    for name, entry in batch.items():
        if entry.is_floating_point():
            # An attention mask that is added may hold -inf.
            bad = (entry.isnan() | (entry == torch.inf)).reshape(len(ids), -1).any(1)
            if samples := ids[bad.cpu()].tolist():
                more = f" and {len(samples) - 1} more of its samples" if samples[1:] else ""
                return Origin(
                    f"it began in the data: {name!r} of sample {samples[0]}{more} holds numbers "
                    "that are not finite",
                    f"Correct or leave out such samples, or {_SKIPS}",
                )
    return None


@dataclass(frozen=True)
class Finding:
    """Say what is not finite on a rank.

    Args:
        in_loss: whether its part of the loss.
        highest: the highest sublayer whose gradient, summed over the replicas, or -1.
        brought: whether its own gradient there was so before the sum; None if that is not known.
    """

    in_loss: bool
    highest: int = -1
    brought: bool | None = False


def find_nonfinite(
    task: Task, indices: range, *, loss: float, reducer: GradientReducer | None
) -> Finding:
    """Look at this rank's numbers.

    Args:
        indices: the sublayers that this rank trains.
        loss: this rank's part of the loss.
        reducer: still has this rank's own gradients beside the replicas' sums.
    """
    own = {} if reducer is None else reducer.own_gradients
    found = Finding(not math.isfinite(loss))
    for index in indices:
        parameters = list(trained_parameters(task, (index,)).values())
        if _has_nonfinite([p.grad for p in parameters]):
            brought = _has_nonfinite([own.get(p, p.grad) for p in parameters])
            found = Finding(found.in_loss, index, brought)
    return found


def where_it_began(task: Task, world: World, own: Finding, before: Origin | None) -> Origin:
    """Say where it began, in the same words on every rank. Collective.

    Args:
        own: what this rank found.
        before: what it found by `before_the_step`.
    """
    found = [Finding(**one) for one in gather_json(asdict(own), group=world.group)]
    return first_cause(before, world) or Origin(_where(task, found))


def first_cause(before: Origin | None, world: World) -> Origin | None:
    """Return what the lowest rank found that found something. Collective."""
    own = before and [before.where, before.advice]
    return next((Origin(*one) for one in gather_json(own, group=world.group) if one), None)


def _where(task: Task, found: Sequence[Finding]) -> str:
    """Say where it began, by what each rank found."""
    if in_loss := [rank for rank, one in enumerate(found) if one.in_loss]:
        return f"it began before the backward, in the loss of {_name(in_loss)}"
    highest = max(one.highest for one in found)
    if highest < 0:
        return "every single value is finite, but their sum is too large for a number"
    where = f"in the gradient of sublayer {task.model.sublayers[highest].name!r}"
    holders = [(rank, one.brought) for rank, one in enumerate(found) if one.highest == highest]
    if ranks := [rank for rank, brought in holders if brought]:
        return f"it began {where} on {_name(ranks)}"
    if any(brought is None for _, brought in holders):
        return f"it began {where}, on one of {_name([rank for rank, _ in holders])}"
    return f"it began {where}, in the sum over the replicas"


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
        error: what all samples together failed with; returned where no sample is to blame.
        what: could not take them: "the model".
        compute: takes some samples of what is given.
        given: entries by name, (N, ...) each, or mappings of such.
        ids: (N,) int64, the samples.
    """
    # After an error on a GPU nothing can be tried there any more.
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
    """Say the shapes, dtypes and ranges of one sample's entries."""
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
