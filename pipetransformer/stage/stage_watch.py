"""Refuse on all ranks what would let replicas drift apart.

What a forward writes into its own tensors depends on its samples, and so on how a batch is split.
What a user changes between two steps (modules, `requires_grad`, hooks) does not reach the layers
of other ranks, or the next transition undoes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipetransformer.model import Task, has_hooks


@dataclass
class _WatchedTensor:
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
            _WatchedTensor(
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
