"""Notice between and within steps what would let replicas drift apart, or train nothing.

What a forward writes into its own tensors depends on the samples it was given, and so on K, M and
R. What a user changes between two steps (modules, `requires_grad`, hooks on parameters) does not
reach the layers that other ranks hold, or is undone by the next transition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipetransformer.adapters import has_hooks
from pipetransformer.job import Task


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
