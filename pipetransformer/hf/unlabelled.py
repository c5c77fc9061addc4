"""Measure with samples that have no labels, where a run only evaluates and predicts.

data set    collate_fn of the script         loss
no labels   never sees that they are missed  a stand-in, of the outputs alone
labels      as ever                          as ever
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from pipetransformer.data import SizedDataset
from pipetransformer.loss import Loss, LossValue

_LABELS = ("labels", "label", "label_ids")
"""Names of one and the same entry."""


def missing_targets(item: Mapping[str, Any], targets: tuple[str, ...]) -> list[str]:
    """Name the targets that an item, or a batch, does not have."""
    names = {name: _LABELS if name in _LABELS else (name,) for name in targets}
    return [name for name, known in names.items() if all(item.get(n) is None for n in known)]


@final
@dataclass(frozen=True)
class Measured:
    """Give a data set's samples, and say of those without labels that they have none."""

    dataset: SizedDataset
    targets: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        if not isinstance(item, Mapping):
            return item
        return {**item, **dict.fromkeys(missing_targets(item, self.targets), _Missing())}


@final
@dataclass(frozen=True)
class MeasuredCollate:
    """Make batches by a script's function; targets that samples lack become (N, 0)."""

    function: Any
    targets: tuple[str, ...]

    def __call__(self, items: list[Any]) -> Any:
        if not items or not isinstance(items[0], Mapping):
            return self.function(items)
        lacks = any(isinstance(value, _Missing) for value in items[0].values())
        given = [
            {name: value for name, value in item.items() if not isinstance(value, _Missing)}
            for item in items
        ]
        batch = self.function(given)
        if not lacks:
            return batch
        missing = missing_targets(batch, self.targets)
        return {**batch, **dict.fromkeys(missing, torch.empty(len(items), 0))}


class _Missing:
    """Stand for a target that a sample lacks, also in a worker's process."""


def loss_without_targets(loss: Loss) -> Loss:
    """Return a loss that is of the outputs alone where targets are (N, 0)."""

    def compute(output: Tensor, target: Any) -> LossValue:
        targets = target.values() if isinstance(target, Mapping) else (target,)
        if all(one.shape[1:].numel() for one in targets):
            return loss(output, target)
        return output.float().square().mean()

    def smoothed(share: float) -> Loss:
        assert loss.smoothed is not None
        return loss_without_targets(loss.smoothed(share))

    return Loss(
        compute,
        is_exact=loss.is_exact,
        ignore_index=loss.ignore_index,
        smoothed=smoothed if loss.smoothed else None,
    )
