"""Train a sequential module as a pipeline that is not flushed between batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopipe.engine import Payload
from autopipe.gpipe.batch_norm import DeferredBatchNorm
from autopipe.gpipe.micro_batch import as_payload, scatter
from autopipe.gpipe.module import GPipe
from autopipe.gpipe.partition_work import Ends, PartitionWork, check_trains
from autopipe.gpipe.step_loss import StepLoss
from autopipe.loss import Loss, LossFunction, choose_loss
from autopipe.schedule import unflushed
from autopipe.stashing import StagePlace, StashedWork, check_versions
from autopipe.threads import CallerSettings, Randomness, ThreadPipeline

_MOST_COMPARED = 8
"""Batches of a stream whose losses may be probed; their parts are kept to the stream's end."""


class StashedPipeline(GPipe):
    """Train by asynchronous 1F1B with weight stashing: PipeDream on one machine.

    `train_on` takes many batches as one stream, so that no stage waits for a batch to end. Each
    stage updates its weights by its own optimizer, once a batch. A micro-batch goes backward with
    the weights of its forward, which `versions` selects (`autopipe.stashing`).
    With more than one stage, results differ from training without a pipeline. Nothing is
    checkpointed.

    Args:
        module, balance, devices, chunks: as for `GPipe`.
        optimizer: builds a stage's from the parameters that it trains.
        versions: "stashed", "vertical_sync" or "double_buffered".
    Attributes:
        optimizers: the stages'; None if nothing trains. Learning rates may be changed between two
            calls of `train_on`.
        peak_versions: most versions of its weights that each stage held in the last `train_on`.
    Raises:
        TypeError, ValueError, IndexError: as `GPipe`; or these counts do not allow the versions.
    Source: PipeDream (Narayanan et al. 2019); PipeDream-2BW (2021).
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        devices: Iterable[int | str | torch.device] | None = None,
        chunks: int = 1,
        versions: str = "stashed",
    ) -> None:
        super().__init__(module, balance, devices=devices, chunks=chunks, checkpoint="never")
        check_versions(versions, StagePlace(0, len(self.balance), self.chunks))
        _refuse(self)
        self.versions = versions
        self.optimizers = [
            optimizer(own) if (own := [p for p in part.parameters() if p.requires_grad]) else None
            for part in self.partitions
        ]
        self.peak_versions: list[int] = []

    def train_on(self, batches: Sequence[tuple[Any, Any]], loss_fn: LossFunction) -> list[float]:
        """Train on every batch, then let the pipeline run empty; parameters' hooks do not fire.

        Args:
            batches: (input, target) pairs as for `step`, of any lengths; a DataLoader is read
                while the stages compute.
        Returns:
            each batch's mean loss, as computed by its micro-batches' forwards.
        Raises:
            TypeError, ValueError: `step` would refuse a batch or the loss; a batch has fewer
                samples than `chunks`; there are fewer batches than `len` says; or nothing needs a
                gradient. Some of the batches before a refused one are trained on. A loss that
                depends on the split is refused only at the end.
            RuntimeError: inference mode is on.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError("train_on trains, and inference mode keeps no graph")
        partitions, num_stages = self._described(), len(self.devices)
        schedule = unflushed(num_stages, len(batches), self.chunks)
        check_trains(partitions, Payload(()))
        loss_of = choose_loss(loss_fn, None, model=type(self).__name__)
        stream = _Stream(self._cut_up(batches, loss_of), self.chunks)

        def work_of(stage: int, settings: CallerSettings, draws: Randomness) -> StashedWork:
            module = partitions[stage].module
            return StashedWork(
                PartitionWork(partitions[stage], stream, settings, draws),
                [module],
                module.parameters(),
                place=StagePlace(stage, num_stages, self.chunks),
                versions=self.versions,
                update=partial(_update, self.optimizers[stage], stream),
            )

        self.zero_grad()
        pipeline = ThreadPipeline(
            schedule,
            list(self.partitions),
            work_of,
            devices=self.devices,
            skips=self._skip_edges,
            trace=self._trace,
        )
        pipeline.run(
            schedule, grad_enabled=True, order=lambda _, instruction: instruction.micro_batch
        )
        pipeline.settings.join_streams()
        self.peak_versions = [work.peak_versions for work in pipeline.works]
        self._num_steps += len(stream.losses)
        for loss in stream.losses:
            loss.check_split()
        # Only the first batch: a later one may have nothing to learn from.
        for loss in stream.losses[:1]:
            loss.check_gradient()
        return [float(loss.mean()) for loss in stream.losses]

    def _cut_up(
        self, batches: Iterable[tuple[Any, Any]], loss: Loss
    ) -> Iterator[tuple[list[Payload], StepLoss]]:
        for place, (input, target) in enumerate(batches):
            payload = as_payload(input, what="the input")
            sizes = self._sizes(payload)
            if len(sizes) < self.chunks:
                raise ValueError(
                    f"a batch of {sum(sizes)} samples cannot be cut into {self.chunks} "
                    "micro-batches; leave it out, or lower chunks"
                )
            number = self._num_steps + place if place < _MOST_COMPARED else None
            yield scatter(payload, sizes), StepLoss(loss, target, sizes, number=number)


def _refuse(pipeline: GPipe) -> None:
    """Refuse modules that stages with their own updates would train wrongly."""
    seen: set[nn.Parameter] = set()
    for part in pipeline.partitions:
        trained = {parameter for parameter in part.parameters() if parameter.requires_grad}
        if trained & seen:
            raise ValueError(
                "a trained parameter is in two partitions, which would each update it; choose a "
                "balance that puts its layers into one"
            )
        seen |= trained
    if any(isinstance(layer, DeferredBatchNorm) for layer in pipeline.modules()):
        raise ValueError(
            "DeferredBatchNorm waits for the end of a batch, which a stream does not have; use "
            "BatchNorm, which counts every micro-batch"
        )


class _Stream(Ends):
    """Hold what is in flight of a stream of batches; stage 0 reads the next batch when needed."""

    def __init__(
        self, batches: Iterator[tuple[list[Payload], StepLoss]], num_micro_batches: int
    ) -> None:
        super().__init__([], loss=self._loss)
        self.losses: list[StepLoss] = []
        self._batches, self._num_micro_batches = batches, num_micro_batches

    def input_of(self, micro_batch: int) -> Payload:
        """Return and forget an input; micro-batches come in order."""
        if not self.inputs:
            batch = next(self._batches, None)
            if batch is None:
                raise ValueError(
                    f"the batches ended after {len(self.losses)}, fewer than their length says; "
                    "give a list of them"
                )
            pieces, loss = batch
            self.inputs.extend(pieces)
            self.losses.append(loss)
        return self.inputs.pop(0)

    def _loss(self, micro_batch: int, outputs: Payload) -> Any:
        batch, i = divmod(micro_batch, self._num_micro_batches)
        loss = self.losses[batch](i, outputs)
        if i == self._num_micro_batches - 1:
            self.losses[batch].forget_targets()
        return loss


def _update(optimizer: Optimizer | None, stream: _Stream, batch: int) -> None:
    """Step by the gradient of a batch's mean."""
    if optimizer is None:
        return
    # All losses of the batch are known: its last backward has passed the stage.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad = stream.losses[batch].scaled(parameter.grad)
    optimizer.step()
    # Autocast's cache holds casts of the old weights.
    torch.clear_autocast_cache()
