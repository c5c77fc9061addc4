"""Refuse to thaw a weight that could not train, as a run's optimizer was built without it.

first training     freezes 2 blocks, which stay frozen behind it
second training    its optimizer is built, of weights that train: without those of 2 blocks
                   begins, and is to freeze 2 blocks: nothing thaws
                   or is to freeze fewer: what thaws would be in no optimizer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import nn

from freeze.in_place import frozen_in_place


@final
class ThawCheck:
    """Know what is frozen when a run begins, and whether it could train once it has thawed.

    Args:
        model: as it is before the run freezes or thaws anything.
        optimizers: those of the run, or what has their `param_groups`.
        is_replicated: whether DistributedDataParallel has wrapped the model.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Any], *, is_replicated: bool = False
    ) -> None:
        # What trained by then, but is in no optimizer, does not train with or without a thaw.
        self._frozen = set(frozen_in_place(model).values())
        self._optimizers, self._is_replicated = optimizers, is_replicated

    def refuse_lost(self, thawed: Mapping[str, nn.Parameter], num_frozen: int) -> None:
        """Raise a ValueError if a weight that thaws, as so many layers freeze, could not train."""
        names = [name for name, p in thawed.items() if p in self._frozen]
        if not self._is_replicated:
            # Now: a loop may have added a group since.
            groups = [group for one in self._optimizers for group in one.param_groups]
            known = {p for group in groups for p in group["params"]}
            names = [name for name in names if thawed[name] not in known]
        if not names:
            return
        more = f" and {len(names) - 1} other weights" if names[1:] else ""
        why = (
            "DistributedDataParallel has not found them to train, so that each rank would train "
            "its own"
            if self._is_replicated
            else "the optimizer does not have them, as it was built before, so that they would "
            "not train"
        )
        raise ValueError(
            f"freezing {num_frozen} blocks thaws {names[0]!r}{more}, frozen before this training "
            f"began: {why}. Call freeze.apply(model, 0), which thaws them, before you build the "
            "optimizer, or the trainer that builds it"
        )
