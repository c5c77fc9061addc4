"""Train with frozen blocks, four ways, epoch by epoch, on the same batches.

plain     `freeze.apply`, and every block runs
ideal     the frozen blocks' place is taken by a module that holds their outputs on the device,
          where the whole data set lies, too: no row is checked, moved or read from a file
attached  `pipetransformer.attach`; batches come from a DataLoader, as in the plain loop
trainer   our Trainer
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Sampler

import freeze
from experiments.gpu_check.workloads import LoopCase, Shuffled
from freeze import FreezeContext, FreezePolicy
from pipetransformer import CachedLoop, Trainer, attach, named_optimizer
from pipetransformer.model import OptimizerFactory

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """Hold the losses of all steps, and the final weights in host memory.

    Args:
        rows_read: of the cache.
        lengths: stages K in the order of the pipelines.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    rows_read: int = 0
    lengths: tuple[int, ...] = ()


class Loop(ABC):
    """Train a case's model, epoch by epoch."""

    case: LoopCase
    rows_read = 0

    @abstractmethod
    def epoch(self, num_frozen: int) -> None:
        """Train an epoch with so many frozen blocks; nothing waits for the device."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """Return what was learned."""

    @abstractmethod
    def accuracy(self, test: Any) -> float:
        """Return the share of images whose class is found."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free what is held."""

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def trained(self, frozen: tuple[int, ...]) -> Outcome:
        """Train to the end, and close."""
        with self:
            for num_frozen in frozen:
                self.epoch(num_frozen)
            return self.outcome()


class ByHand(Loop):
    """Take the steps that a user writes; losses stay on the device."""

    def __init__(self, case: LoopCase, device: str) -> None:
        self.case, self.device = case, device
        self.model = case.build().train().to(device)
        self._optimizer = optimizer_of(case, device)(
            [(name, one) for name, one in self.model.named_parameters() if one.requires_grad]
        )
        self._order = _EpochsOrder(len(case.rows))
        self._loader: DataLoader[Any] = DataLoader(
            case.rows,
            case.batch_size,
            sampler=self._order,
            num_workers=case.num_workers,
            collate_fn=case.collate,
            persistent_workers=case.num_workers > 0,
            pin_memory=device == "cuda",
        )
        self.losses: list[Tensor] = []

    def epoch(self, num_frozen: int) -> None:
        self._order.epoch += 1
        for batch in self._batches(num_frozen):
            with self._autocast():
                loss = self.case.loss_of(self.model, batch)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.losses.append(loss.detach())

    def outcome(self) -> Outcome:
        weights = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
        return Outcome([float(loss) for loss in self.losses], weights, self.rows_read)

    @torch.no_grad()
    def accuracy(self, test: Any) -> float:
        self.model.eval()
        num_right = torch.zeros((), device=self.device)
        for batch in map(self._moved, DataLoader(test, self.case.batch_size)):
            with self._autocast():
                num_right += (self.model(batch["x"]).argmax(dim=1) == batch["y"]).sum()
        self.model.train()
        return float(num_right) / len(test)

    @abstractmethod
    def _batches(self, num_frozen: int) -> Iterator[Batch]:
        """Freeze, and yield an epoch's batches on the device."""

    def _moved(self, batch: Batch) -> Batch:
        return {name: entry.to(self.device, non_blocking=True) for name, entry in batch.items()}

    def _autocast(self) -> torch.autocast:
        dtype = self.case.autocast_to
        return torch.autocast(self.device, dtype, enabled=dtype is not None)


class Plain(ByHand):
    """Run every block in each step."""

    def _batches(self, num_frozen: int) -> Iterator[Batch]:
        blocks: Any = self.model.get_submodule(self.case.blocks)
        freeze.apply(self.model, num_frozen, layers=list(blocks))
        yield from map(self._moved, self._loader)


class Attached(ByHand):
    """Attach the model."""

    def __init__(self, case: LoopCase, device: str, **settings: Any) -> None:
        super().__init__(case, device)
        if case.autocast_to is not None:
            settings["precision"] = "bf16"
        self.cached: CachedLoop = attach(self.model, freeze=0, **settings)

    def _batches(self, num_frozen: int) -> Iterator[Batch]:
        self.cached.freeze_bottom(num_frozen)
        yield from map(self._moved, self.cached.epoch(self._loader))
        self.rows_read += self.cached.stats.hits

    def close(self) -> None:
        self.cached.close()


class Ideal(ByHand):
    """Read what frozen blocks return from one tensor on the device; nothing is checked."""

    def __init__(self, case: LoopCase, device: str) -> None:
        super().__init__(case, device)
        items = [case.rows[index] for index in range(len(case.rows))]
        self._columns = {n: torch.stack([one[n] for one in items]).to(device) for n in items[0]}
        self._blocks: Any = self.model.get_submodule(case.blocks)
        self._held: _Held | None = None
        self._depth = 0

    def _batches(self, num_frozen: int) -> Iterator[Batch]:
        if num_frozen != self._depth:
            self._freeze(num_frozen)
        order = torch.tensor([*self._order]).to(self.device)
        for ids in order.split(self.case.batch_size):
            if self._held is not None:
                self._held.ids = ids
            yield {name: column.index_select(0, ids) for name, column in self._columns.items()}
        if self._held is not None:
            self._held.is_full = True

    def outcome(self) -> Outcome:
        self._put(self._blocks)  # So that weights have the names that they have elsewhere.
        return super().outcome()

    def _freeze(self, num_frozen: int) -> None:
        layers, self._depth = list(self._blocks), num_frozen
        self._put(self._blocks)
        freeze.apply(self.model, num_frozen, layers=layers)
        self._held = _Held(layers[:num_frozen], len(self.case.rows)) if num_frozen else None
        if self._held is not None:
            kind: Any = type(self._blocks)
            rest = [self._held, *layers[num_frozen:]]
            self._put(kind(*rest) if isinstance(self._blocks, nn.Sequential) else kind(rest))

    def _put(self, blocks: nn.Module) -> None:
        parent, _, name = self.case.blocks.rpartition(".")
        setattr(self.model.get_submodule(parent), name, blocks)


class _Held(nn.Module):
    """Take the place of frozen blocks: run them in a first epoch, give their outputs later."""

    def __init__(self, blocks: list[nn.Module], num_rows: int) -> None:
        super().__init__()
        self._blocks, self._num_rows = [blocks], num_rows  # In a list: not part of the model.
        self.ids, self.is_full = torch.empty(0), False
        self._rows: Tensor | None = None
        self._answer: Any = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_full and self.training:
            rows = self._rows.index_select(0, self.ids)  # type: ignore[union-attr]
            return tree_map(lambda leaf: rows, self._answer)
        with torch.no_grad():
            answer: Any = hidden
            for block in self._blocks[0]:
                answer = block.eval()(hidden, *args, **kwargs)
                hidden = answer if isinstance(answer, Tensor) else answer[0]
        if self.training:
            if self._rows is None:
                shape = (self._num_rows, *hidden.shape[1:])
                self._rows = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
                self._answer = answer if isinstance(answer, Tensor) else type(answer)([hidden])
            self._rows.index_copy_(0, self.ids, hidden)
        return answer


class ByTrainer(Loop):
    """Have the Trainer take the steps; what it measures before the first is done at once.

    Args:
        num_frozen: of the first epoch.
    """

    def __init__(
        self, case: LoopCase, device: str, *, num_frozen: int = 0, **settings: Any
    ) -> None:
        self.case, self._num_frozen = case, num_frozen
        self._losses: list[Any] = []
        # Rows are stored where a later epoch reads them: of epochs there are more than are run.
        settings = {"epochs": 1000, **settings}
        self.trainer = make_trainer(case, device, freeze=self._decide, **settings)
        self.trainer.begin()

    def epoch(self, num_frozen: int) -> None:
        self._num_frozen = num_frozen
        self._losses += [self.trainer.step().loss for _ in range(self.case.steps_per_epoch)]
        self.rows_read = self.trainer.report.cache_hits

    def outcome(self) -> Outcome:
        state = self.trainer.state_dict()
        weights = {name: tensor.cpu().clone() for name, tensor in state.items()}
        return Outcome([float(loss) for loss in self._losses], weights, self.rows_read)

    def accuracy(self, test: Any) -> float:
        return float(self.trainer.evaluate(test)["accuracy"])

    def close(self) -> None:
        self.trainer.close()

    def _decide(self, context: FreezeContext) -> int:
        return self._num_frozen


def make_trainer(
    case: LoopCase, device: str, *, freeze: FreezePolicy | Callable[..., Any], **settings: Any
) -> Trainer:
    """Return the Trainer that does as loops by hand do; its caller begins it."""
    return Trainer(
        case.build(),
        case.rows,
        optimizer=optimizer_of(case, device),
        freeze=freeze,
        device=device,
        **{
            "global_batch_size": case.batch_size,
            "sample_order": Shuffled(len(case.rows)),
            "num_workers": case.num_workers,
            "precision": None if case.autocast_to is None else "bf16",
            "evaluate_every_epochs": 0,
            "progress": False,
            **settings,
        },
    )


def optimizer_of(case: LoopCase, device: str) -> OptimizerFactory:
    """Return the optimizer as fast as torch has it."""
    fused = device == "cuda"
    return named_optimizer("adamw", case.learning_rate, eps=case.eps, fused=fused)


class _EpochsOrder(Sampler[int]):
    """Give the samples of an epoch as the Trainer takes them."""

    def __init__(self, num_samples: int) -> None:
        self._order, self._num_samples, self.epoch = Shuffled(num_samples), num_samples, -1

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        yield from self._order(self.epoch).tolist()
