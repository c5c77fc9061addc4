"""Train in a plain loop with frozen blocks, three ways, epoch by epoch.

plain    `freeze.apply`, and every block runs
ideal    the frozen blocks' place is taken by a module that holds their outputs on the device,
         where the whole data set lies, too
ours     `pipetransformer.attach`; batches come from a DataLoader, as in the plain loop
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

import freeze
from experiments.gpu_check.workloads import Rows
from pipetransformer import CachedLoop, attach

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class LoopCase:
    """Describe what loops train.

    Args:
        build: makes the model; every call the same one.
        blocks: the name of its list of blocks.
        loss_of: the loss of a batch.
        autocast_to: the dtype that is computed in; None computes as the weights are.
    """

    name: str
    build: Callable[[], nn.Module]
    blocks: str
    rows: Rows
    loss_of: Callable[[nn.Module, Any], Tensor]
    batch_size: int
    num_frozen: int
    autocast_to: torch.dtype | None = torch.bfloat16
    num_workers: int = 0

    @property
    def steps_per_epoch(self) -> int:
        return len(self.rows) // self.batch_size

    def model_on(self, device: str) -> nn.Module:
        return self.build().train().to(device)

    def autocast(self, device: str) -> AbstractContextManager[Any]:
        if self.autocast_to is None:
            return nullcontext()
        return torch.autocast(device, self.autocast_to)

    def loader(self, device: str) -> DataLoader[Any]:
        return DataLoader(
            self.rows,
            self.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(0),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=device == "cuda",
        )


class Loop:
    """Train a case's model, epoch by epoch; losses stay on the device."""

    def __init__(self, case: LoopCase, device: str) -> None:
        self.case, self.device = case, device
        self.model = case.model_on(device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        # Large, so that Adam does not make a step of rounding where the true gradient is 0.
        eps = 1e-4 if case.autocast_to is None else 1e-8
        self._optimizer = torch.optim.AdamW(trained, lr=1e-4, eps=eps, fused=device == "cuda")
        self.losses: list[Tensor] = []

    def epoch(self, num_frozen: int) -> None:
        """Train an epoch with so many frozen blocks."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what is held."""

    def step(self, batch: Batch) -> None:
        with self.case.autocast(self.device):
            loss = self.case.loss_of(self.model, batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.detach())

    def moved(self, batch: Batch) -> dict[str, Tensor]:
        return {name: entry.to(self.device, non_blocking=True) for name, entry in batch.items()}


class Plain(Loop):
    """Run every block in each step."""

    def __init__(self, case: LoopCase, device: str) -> None:
        super().__init__(case, device)
        self._loader = case.loader(device)

    def epoch(self, num_frozen: int) -> None:
        blocks: Any = self.model.get_submodule(self.case.blocks)
        freeze.apply(self.model, num_frozen, layers=list(blocks))
        for batch in self._loader:
            self.step(self.moved(batch))


class Ours(Loop):
    """Attach the model."""

    def __init__(self, case: LoopCase, device: str, **settings: Any) -> None:
        super().__init__(case, device)
        self._loader = case.loader(device)
        precision = {torch.bfloat16: "bf16", None: None}[case.autocast_to]
        more: dict[str, Any] = {} if precision is None else {"precision": precision}
        self.cached: CachedLoop = attach(self.model, freeze=0, **more, **settings)
        self.hits: list[int] = []

    def epoch(self, num_frozen: int) -> None:
        self.cached.freeze_bottom(num_frozen)
        for batch in self.cached.epoch(self._loader):
            self.step(self.moved(batch))
        self.hits.append(self.cached.stats.hits)

    def close(self) -> None:
        self.cached.close()


class Ideal(Loop):
    """Read what frozen blocks return from one tensor on the device; nothing is checked."""

    def __init__(self, case: LoopCase, device: str) -> None:
        super().__init__(case, device)
        whole = range(len(case.rows))
        items = [case.rows[index] for index in whole]
        self._columns = {n: torch.stack([one[n] for one in items]).to(device) for n in items[0]}
        self._loader, self._has_begun = case.loader(device), False
        self._held: _Held | None = None

    def epoch(self, num_frozen: int) -> None:
        if self._held is None and num_frozen:
            layers: Any = self.model.get_submodule(self.case.blocks)
            freeze.apply(self.model, num_frozen, layers=list(layers))
            self._held = _Held(list(layers)[:num_frozen], len(self.case.rows))
            parent, _, name = self.case.blocks.rpartition(".")
            rest = [self._held, *list(layers)[num_frozen:]]
            kind: Any = type(layers)
            made = kind(*rest) if isinstance(layers, nn.Sequential) else kind(rest)
            setattr(self.model.get_submodule(parent), name, made)
        for ids in self._batches():
            if self._held is not None:
                self._held.ids = ids
            self.step({n: column.index_select(0, ids) for n, column in self._columns.items()})
        if self._held is not None:
            self._held.is_full = True

    def _batches(self) -> Iterator[Tensor]:
        loader = self._loader
        # An iteration draws a seed for its workers first; persistent workers keep theirs.
        if not (loader.persistent_workers and self._has_begun):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        self._has_begun = True
        # To the sampler's end, where it draws once more.
        order = torch.tensor([*loader.sampler]).to(self.device)
        return iter(order.split(self.case.batch_size))


class _Held(nn.Module):
    """Take the place of frozen blocks: run them in a first epoch, give their outputs later."""

    def __init__(self, blocks: list[nn.Module], num_rows: int) -> None:
        super().__init__()
        self._blocks, self._num_rows = [blocks], num_rows  # In a list: not part of the model.
        self.ids, self.is_full = torch.empty(0), False
        self._rows: Tensor | None = None
        self._answer: Any = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_full:
            rows = self._rows.index_select(0, self.ids)  # type: ignore[union-attr]
            return tree_map(lambda leaf: rows, self._answer)
        with torch.no_grad():
            answer: Any = hidden
            for block in self._blocks[0]:
                answer = block.eval()(hidden, *args, **kwargs)
                hidden = answer if isinstance(answer, Tensor) else answer[0]
        if self._rows is None:
            shape = (self._num_rows, *hidden.shape[1:])
            self._rows = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
            self._answer = answer if isinstance(answer, Tensor) else type(answer)([hidden])
        self._rows.index_copy_(0, self.ids, hidden)
        return answer
