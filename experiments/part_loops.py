"""Train a model of which a part is frozen, three ways, epoch by epoch, on the same batches.

plain       the part is frozen, in eval mode, and runs at each step
by_hand     a dict of what the part returned for each sample, filled in the first epoch
ours        `pipetransformer.attach(model, parts=[...])`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from experiments.part_cases import PartCase
from pipetransformer import attach

Batch = Mapping[str, Tensor]


class PartLoop(ABC):
    """Train a case's model.

    Args:
        autocast_to: what is computed in; None computes as the weights are.

    Attributes:
        losses: of all steps, on the device.
    """

    def __init__(
        self, case: PartCase, device: str, autocast_to: torch.dtype | None = None
    ) -> None:
        self.case, self.device, self._autocast_to = case, device, autocast_to
        self.model = case.build().to(device)
        self.part = self.model.get_submodule(case.part).requires_grad_(False)
        learned = [one for one in self.model.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(learned, lr=1e-4, eps=1e-4)
        self.losses: list[Tensor] = []

    def epoch(self) -> int:
        """Train an epoch; return the number of its steps."""
        self._set_modes()
        before = len(self.losses)
        for batch in self._batches():
            moved = {name: one.to(self.device, non_blocking=True) for name, one in batch.items()}
            dtype = self._autocast_to
            with torch.autocast(self.device, dtype, enabled=dtype is not None):
                loss = self.case.loss_of(self.model, moved)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.losses.append(loss.detach())
        return len(self.losses) - before

    def _set_modes(self) -> None:
        self.model.train()
        self.part.eval()

    def _loader(self, dataset: Any) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(len(self.losses))
        pin, size = self.device == "cuda", self.case.batch_size
        return DataLoader(dataset, size, shuffle=True, generator=generator, pin_memory=pin)

    @abstractmethod
    def _batches(self) -> Iterator[Batch]:
        """Yield an epoch's batches."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free what is held."""


class Plain(PartLoop):
    """Run the part at each step."""

    def _batches(self) -> Iterator[Batch]:
        return iter(self._loader(self.case.rows))


@final
class Ours(PartLoop):
    """Attach the model.

    Attributes:
        num_read: rows that the last epoch has read.
    """

    def __init__(self, *case: Any, **settings: Any) -> None:
        super().__init__(*case)
        self.num_read = 0
        if self._autocast_to is not None:
            settings["precision"] = "bf16"
        self.cached = attach(self.model, parts=[self.case.part], cache=True, **settings)
        self._source = self._loader(self.case.rows)

    def _batches(self) -> Iterator[Batch]:
        # One loader, as its rows are of one data set; seeded as the others' are.
        self._source.generator.manual_seed(len(self.losses))
        yield from self.cached.epoch(self._source)
        self.num_read = self.cached.stats.hits

    def close(self) -> None:
        self.cached.close()


class _Numbered(Dataset[tuple[int, Any]]):
    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._rows[index]


class ByHand(PartLoop):
    """Keep in a dict what the model reads of the part's answers."""

    def __init__(self, *case: Any) -> None:
        super().__init__(*case)
        self._run, self.part.forward = self.part.forward, self._serve
        self._kept: dict[int, Tensor] = {}
        self._places: list[int] = []
        self._made: Callable[[Tensor], Any] = lambda tensor: tensor

    def _batches(self) -> Iterator[Batch]:
        for places, batch in self._loader(_Numbered(self.case.rows)):
            self._places = places.tolist()
            yield batch

    def _serve(self, *args: Any, **kwargs: Any) -> Any:
        field, num = self.case.field, self.case.entries
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
