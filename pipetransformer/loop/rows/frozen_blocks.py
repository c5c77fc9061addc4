"""Freeze the lower blocks of a loop's model, and what lies below them."""

from __future__ import annotations

from typing import final

from torch import nn

import freeze as freezing
from freeze.in_place import freeze_parameters, thawed_by
from pipetransformer.loop.rows.loop_model import LoopModel


@final
class FrozenBlocks:
    """Freeze and thaw blocks of a model, as it was looked at."""

    def __init__(self, known: LoopModel) -> None:
        self._known, self._task, self._model = known, known.task, known.task.model.model
        self._parts = self._parts_now()

    def refuse_replaced(self, num_frozen: int) -> None:
        """Raise a ValueError where what is to freeze is no more what was looked at."""
        now = [part for part in self._parts_now() if part[0] < num_frozen]
        if num_frozen and now != [part for part in self._parts if part[0] < num_frozen]:
            raise ValueError(
                f"a module of the lower {num_frozen} blocks, or below them, was replaced since "
                "they were looked at: close this loop and attach the model anew, or begin another "
                "training"
            )

    def freeze(self, num_frozen: int) -> None:
        """Have so many blocks frozen, and the others train."""
        freezing.apply(self._model, num_frozen, layers=self._known.blocks)
        freeze_parameters(self._model, self._read_below(num_frozen))

    def thawed_by(self, num_frozen: int) -> dict[str, nn.Parameter]:
        """Return by name the weights that freezing so many would thaw."""
        staying = self._read_below(num_frozen)
        thawed = thawed_by(self._model, num_frozen, layers=self._known.blocks)
        return {name: p for name, p in thawed.items() if p not in staying}

    def _parts_now(self) -> list[tuple[int, str, nn.Module, list[str]]]:
        """List what may freeze: its block, or -1 below them, its name, itself, its parameters."""
        freeze_at_once = self._known.partial.row.packing is not None
        block_of = {
            part: 0 if freeze_at_once else index
            for index, block in enumerate(self._known.blocks)
            for part in block.modules()
        }
        watched = set(self._known.watched(self._task.model.num_layers))
        return [
            (block_of.get(part, -1), name, part, [*part._parameters])
            for name, part in self._model.named_modules()
            if part in watched
        ]

    def _read_below(self, num_frozen: int) -> set[nn.Parameter]:
        """Return what frozen blocks read, also where `freeze.apply` leaves it: a learned bias."""
        model = self._task.model
        tied = model.shared_above(num_frozen)
        keeps = tied if self._task.config.tied_weights == "train" else frozenset()
        below = (
            model.tensor(name)
            for name, index in model.owners.items()
            if model.sublayers[index].layer < num_frozen and name not in keeps
        )
        return {one for one in below if isinstance(one, nn.Parameter)}
