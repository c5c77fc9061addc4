"""Train a model of which a part is frozen, three ways, epoch by epoch, on the same batches.

plain       the part runs at each step, in eval mode; with nothing frozen it trains, too
by_hand     a dict of what the part returned for each sample, filled in the first epoch
ours        `pipetransformer.attach(model, parts=[...])`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.gpu_check import loops
from experiments.gpu_check.loops import Batch
from experiments.gpu_check.part_cases import PartCase
from pipetransformer import attach


class Plain(loops.ByHand):
    """Run the part at each step."""

    def __init__(self, case: PartCase, device: str) -> None:
        super().__init__(case, device)
        self.part = self.model.get_submodule(case.blocks)

    def _batches(self, num_frozen: int) -> Iterator[Batch]:
        self.part.requires_grad_(not num_frozen).train(not num_frozen)
        yield from map(self._moved, self._loader)


class Ours(loops.ByHand):
    """Attach the model; the part is frozen from the start.

    Attributes:
        rows_read: in the last epoch; some are read in the first, too, behind the look at the part.
    """

    def __init__(self, case: PartCase, device: str, **settings: Any) -> None:
        super().__init__(case, device)
        if case.autocast_to is not None:
            settings["precision"] = "bf16"
        self.cached = attach(self.model, parts=[case.blocks], cache=True, **settings)

    def _batches(self, num_frozen: int) -> Iterator[Batch]:
        yield from map(self._moved, self.cached.epoch(self._loader))
        self.rows_read = self.cached.stats.hits

    def close(self) -> None:
        self.cached.close()


class ByHand(Plain):
    """Keep in a dict what the model reads of the part's answers."""

    def __init__(self, case: PartCase, device: str) -> None:
        super().__init__(case, device)
        self._field, self._entries = case.field, case.entries
        self._run, self.part.forward = self.part.forward, self._serve
        self._kept: dict[int, Tensor] = {}
        self._places: list[int] = []
        self._made: Callable[[Tensor], Any] = lambda tensor: tensor

    def _batches(self, num_frozen: int) -> Iterator[Batch]:
        places = torch.tensor([*self._order]).split(self.case.batch_size)
        for own, batch in zip(places, super()._batches(num_frozen), strict=True):
            self._places = own.tolist()
            yield batch

    def _serve(self, *args: Any, **kwargs: Any) -> Any:
        field, num = self._field, self._entries
        if self._places[0] in self._kept:
            kept = torch.stack([self._kept[place] for place in self._places])
            return self._made(kept if num == 1 else kept.flatten(0, 1))
        answer = self._run(*args, **kwargs)
        if field is not None:
            self._made = lambda tensor: type(answer)(**{field: tensor})
        found = answer if field is None else answer[field]
        rows = found if num == 1 else found.unflatten(0, (-1, num))
        self._kept.update(zip(self._places, rows, strict=True))
        return answer
