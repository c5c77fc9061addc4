"""Train as a user would without this project, and as fast as frozen layers allow at best.

The plain loop runs frozen layers at every step. The ideal one has their activations, and all else
that the layers above read, in tensors on the device: no row is checked, moved or read from a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from experiments.benchmarks.measuring.timed_loop import RivalTask
from experiments.gpu_check.workloads import Shuffled
from pipetransformer.model import OptimizerFactory, adapt

_HIDDEN = "hidden"


class PlainLoop:
    """Train a task's model on one device.

    Args:
        task: its model, samples and batches.
        model: of the task; it is trained in place.
        optimizer: builds one over named parameters.
        device: "cuda" or "cpu".
        autocast_to: the dtype that is computed in; None computes as the weights are.
        keeps: whether it is the ideal one.
    """

    def __init__(
        self,
        task: RivalTask,
        model: nn.Module,
        *,
        optimizer: OptimizerFactory,
        device: str,
        autocast_to: torch.dtype | None = None,
        keeps: bool = False,
    ) -> None:
        self._task, self._device, self._keeps = task, device, keeps
        self._autocast_to = autocast_to
        self.model = model.train().to(device)
        self._layered = adapt(self.model)
        self._optimizer = optimizer(list(self.model.named_parameters()))
        self._order = Shuffled(len(task.dataset))
        self._num_frozen = self._num_kept = 0
        self._kept: dict[str, Tensor] = {}
        self._coming = self._batches()

    def freeze(self, num_frozen: int) -> None:
        """Freeze the bottom layers, and thaw those above, between two epochs."""
        self.model.train()
        for sublayer in self._layered.sublayers:
            freezes = sublayer.layer < num_frozen
            sublayer.module.requires_grad_(not freezes).train(not freezes)
        self._num_frozen, self._num_kept, self._kept = num_frozen, 0, {}

    def step(self) -> Tensor:
        """Train on the next batch; return its loss, on the device."""
        ids, batch = next(self._coming)
        self._optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self._loss(ids, batch)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def accuracy(self, dataset: Mapping[str, Tensor]) -> float:
        """Return the share of images whose class is found; training goes on in train mode."""
        self.model.eval()
        num_right = torch.zeros((), device=self._device)
        size = self._task.batch_size
        for x, y in zip(dataset["x"].split(size), dataset["y"].split(size), strict=True):
            with self._autocast():
                found = self.model(x.to(self._device)).argmax(dim=1)
            num_right += (found == y.to(self._device)).sum()
        self.model.train()
        return float(num_right) / len(dataset["y"])

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self._device, self._autocast_to, enabled=self._autocast_to is not None
        )

    def _batches(self) -> Iterator[tuple[Tensor, dict[str, Tensor] | None]]:
        """Yield samples and their entries, epoch by epoch; None where all is kept."""
        for epoch in itertools.count():
            parts = self._order(epoch).split(self._task.batch_size)
            if self._keeps and self._num_kept >= len(self._task.dataset):
                yield from ((ids, None) for ids in parts)
                continue
            loader: DataLoader[dict[str, Tensor]] = DataLoader(
                self._task.dataset,  # type: ignore[arg-type]
                batch_sampler=[ids.tolist() for ids in parts],
                num_workers=self._task.num_workers,
                pin_memory=self._device == "cuda",
            )
            for ids, batch in zip(parts, loader, strict=True):
                moved = {n: t.to(self._device, non_blocking=True) for n, t in batch.items()}
                yield ids, moved

    def _loss(self, ids: Tensor, batch: dict[str, Tensor] | None) -> Tensor:
        if not self._keeps or not self._num_frozen:
            assert batch is not None
            return self._task.loss_of(self.model, batch)
        layered = self._layered
        first = layered.first_active(self._num_frozen)
        where = ids.pin_memory() if self._device == "cuda" else ids
        where = where.to(self._device, non_blocking=True)
        if batch is None:
            kept = {name: rows.index_select(0, where) for name, rows in self._kept.items()}
        else:
            with torch.no_grad():
                hidden = layered.run(batch, last=first)
            rest = {name: t for name, t in batch.items() if name != layered.inputs[0]}
            kept = {**rest, _HIDDEN: hidden.to(self._autocast_to or hidden.dtype)}
            self._keep(where, kept)
        output = layered.run(kept, first=first, hidden=kept[_HIDDEN])
        assert layered.loss_fn is not None
        loss = layered.loss_fn(output, layered.targets_of(kept))
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss

    def _keep(self, where: Tensor, entries: Mapping[str, Tensor]) -> None:
        for name, entry in entries.items():
            if name not in self._kept:
                shape = (len(self._task.dataset), *entry.shape[1:])
                self._kept[name] = torch.empty(shape, dtype=entry.dtype, device=self._device)
            self._kept[name].index_copy_(0, where, entry)
        self._num_kept += len(where)
