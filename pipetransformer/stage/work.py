"""Say what one stage computes on a micro-batch: to train, to evaluate, to look at its layers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from autocache import HIDDEN, CacheStats, Uploader
from autodp import mix_seed
from autopipe.engine import Payload, StageWork
from autopipe.loss import LossValue, SplitProbe, head_of
from freeze.signals import gram
from pipetransformer.config import Metric
from pipetransformer.feed import Batch, Rows, SampleError, seed_plainly, seed_torch
from pipetransformer.model import Task
from pipetransformer.stage.batch_cut import Turn
from pipetransformer.stage.predictions import KeptOutputs
from pipetransformer.stage.refusals import named
from pipetransformer.stage.side_inputs import SideReceiver, SideSender
from pipetransformer.stage.step_result import StepSums


@dataclass(frozen=True)
class StageLayers:
    """Name what a stage runs.

    Args:
        task: whose sublayers.
        indices: the sublayers this stage runs.
        device: where they live.
        side_out: on stage 0, one sender for every other stage that needs side inputs or targets.
        side_in: on those stages, where these arrive.
        is_last: whether the targets are needed here, after the forward.
        turn: the micro-batches that this worker of the stage takes.
        uploader: brings what is in host memory to the device.
    """

    task: Task
    indices: range
    device: torch.device
    side_out: tuple[SideSender, ...]
    side_in: SideReceiver | None
    is_last: bool
    turn: Turn
    uploader: Uploader


@dataclass(frozen=True)
class MicroBatches:
    """Name a replica's samples of a step, and how they are cut and fetched.

    Args:
        ids: (n,) int64 dataset indices, in order.
        sizes: samples of every micro-batch.
        rows: gives stage 0 their entries; asked once a step.
        next_ids: (m,) those that this rank will fetch in the coming step, where they are known;
            they are prepared meanwhile.
        first: which micro-batch of a stream of steps the first one is. Side inputs are then the
            stream's, and further steps are fetched before this one's backward, so that what is
            fetched must be copied. None for a step by itself.
    """

    ids: Tensor
    sizes: Sequence[int]
    rows: Rows
    next_ids: Tensor | None = None
    first: int | None = None

    def in_stream(self, micro_batch: int) -> int:
        """Return which micro-batch of the stream one of this step is."""
        return (self.first or 0) + micro_batch


@dataclass(frozen=True)
class Results:
    """Collect what this rank makes of a data set.

    Args:
        totals: [sum, count] of the loss and of each metric; a GPU's stay there until all are read.
        kept: its outputs and targets, where these are asked for.
    """

    totals: dict[str, list[Tensor | float]] = field(default_factory=dict)
    kept: KeptOutputs | None = None

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add one micro-batch's contribution, or another rank's."""
        before = self.totals.get(name, [0.0, 0.0])
        self.totals[name] = [
            one + _precise(more) for one, more in zip(before, (total, count), strict=True)
        ]

    def read(self) -> dict[str, list[float]]:
        """Return the totals as numbers; waits for the device."""
        return {name: [float(one) for one in pair] for name, pair in self.totals.items()}


class LayerWork(StageWork):
    """Run a stage's sublayers on micro-batches, with the entries each of them takes.

    Attributes:
        where: which step this is, for the beginning of an error's text.
    """

    where = ""

    def __init__(self, layers: StageLayers, batches: MicroBatches) -> None:
        self.layers = layers
        self.batches = batches
        self._parts: dict[int, Batch] = {}
        self._sent: dict[int, Batch] = {}
        self._entries: dict[int, Batch] = {}
        self.data_s = 0.0
        if layers.side_in is not None and batches.first is None:
            # Until stage 0 has its data.
            start = time.perf_counter()
            layers.side_in.begin(batches.sizes, layers.turn.own(len(batches.sizes)))
            self.data_s += time.perf_counter() - start

    def first_input(self, micro_batch: int) -> Payload:
        start = time.perf_counter()
        # For the whole step at once: few samples at a time would fill few of the prefix's chunks.
        if not self._parts:
            self._read()
        for sender in self.layers.side_out:
            sender.send(self.batches.in_stream(micro_batch), self._sent[micro_batch])
        batch = self._parts[micro_batch]
        # Slices are copied: a layer may write into its input, and autograd counts writes for all
        # slices of a tensor together.
        if len(self._parts) > 1 or self.batches.first is not None:
            batch = {name: part.clone() for name, part in batch.items()}
        self._entries[micro_batch] = batch
        self.data_s += time.perf_counter() - start
        name = HIDDEN if HIDDEN in batch else self.layers.task.model.inputs[0]
        return Payload((batch[name],))

    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        entries = self._entries_of(micro_batch)
        value: Tensor | Mapping[str, Tensor] = only_tensor(inputs)
        if self.layers.indices.start == 0:
            value = entries
        try:
            value = self._run_layers(micro_batch, value, entries)
        except Exception as error:
            if self.layers.indices.start:
                raise
            task = self.layers.task
            run = partial(task.model.run, last=self.layers.indices.stop)
            ids = self._ids_of(micro_batch)
            raise named(error, f"{self.where}the model", run, entries, ids) from error
        assert isinstance(value, Tensor)
        size = self.batches.sizes[micro_batch]
        if value.ndim == 0 or len(value) != size:
            raise ValueError(
                f"the stage's output has shape {tuple(value.shape)} for {size} samples; every "
                "layer must keep the sample as its first dimension"
            )
        if not self.layers.is_last:
            del self._entries[micro_batch]
        return Payload((value,))

    def _run_layers(
        self, micro_batch: int, value: Tensor | Mapping[str, Tensor], entries: Batch
    ) -> Tensor | Mapping[str, Tensor]:
        task = self.layers.task
        with task.computing(self.layers.device):
            for index in self.layers.indices:
                self.seed(micro_batch, index)
                value = task.run(index, value, sides=entries)
                self.see(index, value)
        return value

    def _loss_of(self, micro_batch: int, output: Tensor, target: Any) -> LossValue:
        loss_fn = self.layers.task.loss_fn
        try:
            return loss_fn(output, target)
        except Exception as error:
            ids, given = self._ids_of(micro_batch), {"output": output.detach(), "target": target}
            what = f"{self.where}the loss {loss_fn.name!r}"

            def compute(part: dict[str, Any]) -> Any:
                return loss_fn(part["output"], part["target"])

            raise named(error, what, compute, given, ids) from error

    def _ids_of(self, micro_batch: int) -> Tensor:
        return self.batches.ids.split(list(self.batches.sizes))[micro_batch]

    def finish_step(self) -> None:
        """Wait until the side inputs have left."""
        for sender in self.layers.side_out:
            sender.finish_step()

    def seed(self, micro_batch: int, index: int) -> None:
        """Prepare the random numbers of one sublayer's forward; evaluation needs none."""

    def see(self, index: int, output: Tensor) -> None:
        """Look at what a sublayer has made of a micro-batch."""

    def target(self, micro_batch: int) -> Any:
        """Hand over a micro-batch's targets: a tensor, or a mapping of several."""
        return self.layers.task.model.targets_of(self._entries.pop(micro_batch))

    def _read(self) -> None:
        """Fetch what the step's samples are given; cut it into own micro-batches' entries."""
        batches, sizes = self.batches, list(self.batches.sizes)
        own = self.layers.turn.own(len(sizes))
        all_ids = batches.ids.split(sizes)
        try:
            whole = batches.rows.fetch(torch.cat([all_ids[i] for i in own]))
        except SampleError as error:
            raise SampleError(f"{self.where}{error}") from error
        if batches.next_ids is not None and len(batches.next_ids):
            batches.rows.read_ahead(batches.next_ids)
        if batches.first is None:  # In a stream all steps have the same entries.
            whole = without_full_masks(whole, self.layers.task.model.optional_masks)

        def cut(batch: Batch) -> dict[int, Batch]:
            parts = {name: entry.split([sizes[i] for i in own]) for name, entry in batch.items()}
            return {i: {name: of[n] for name, of in parts.items()} for n, i in enumerate(own)}

        # In a stream the memory read into may be read into again before a copy is made.
        in_stream = batches.first is not None
        self._parts = cut(self.layers.uploader.send(whole, wait=in_stream))
        # From host memory, as long as they are there.
        self._sent = cut(whole) if self.layers.side_out else {}

    def _entries_of(self, micro_batch: int) -> Batch:
        if micro_batch not in self._entries:
            side_in = self.layers.side_in
            number = self.batches.in_stream(micro_batch)
            entries = {} if side_in is None else side_in.receive(number)
            self._entries[micro_batch] = self.layers.uploader.send(entries)
        return self._entries[micro_batch]


class TrainWork(LayerWork):
    """Scale each micro-batch's loss so that all gradients add up to the mean's.

    Args:
        step: of the run, from 0.
        first_sample: position of this replica's first sample in the global batch.
        divisor: of the losses' sum: the samples of the global batch, over the loss scale.
    """

    def __init__(
        self,
        layers: StageLayers,
        batches: MicroBatches,
        *,
        step: int,
        first_sample: int,
        divisor: float,
        probe: SplitProbe,
    ) -> None:
        super().__init__(layers, batches)
        self._step, self._divisor, self._probe = step, divisor, probe
        self.where = f"step {step}: "
        probe.begin_step()
        sizes = batches.sizes
        self._offsets = [first_sample + sum(sizes[:i]) for i in range(len(sizes))]
        self.losses: list[tuple[Tensor | float, Tensor | float]] = []
        self._num_with_gradient = 0
        self.stats = CacheStats()

    def seed(self, micro_batch: int, index: int) -> None:
        # Dropout depends on the step, the layer and the samples, not on who computes them.
        seed = mix_seed(
            self.layers.task.config.seed, self._step, index, self._offsets[micro_batch]
        )
        seed_torch(seed, self.layers.device)
        model = self.layers.task.model
        # What is not known to draw from them finds other numbers in each micro-batch; the last
        # one's are the loss's, too.
        if index in (self.layers.indices.start, len(model.sublayers) - 1, *model.plainly_random):
            seed_plainly(seed)

    def finish(self, micro_batch: int, outputs: Payload) -> Tensor:
        """Return the micro-batch's part of the step's mean loss, times the loss scale.

        A loss given as (sum, count) is divided by the samples of the global batch for now; the
        gradients are corrected once the counts of all replicas are known.
        """
        output = only_tensor(outputs)
        target = self.target(micro_batch)
        # Before the loss, which may write into them.
        self._probe.watch(output, target)
        loss = self._loss_of(micro_batch, output, target)
        num_samples = len(output)
        self._num_with_gradient += head_of(loss).requires_grad or not output.requires_grad
        if isinstance(loss, tuple):
            total, count = loss
            self.losses.append((_precise(total), _precise(count)))
            return total / self._divisor
        self.losses.append((_precise(loss) * num_samples, num_samples))
        return loss * (num_samples / self._divisor)

    @property
    def loss_sum(self) -> float:
        """Return the sum of the losses so far; 0 without one."""
        return float(sum(total for total, _ in self.losses))

    def sums(self) -> StepSums:
        """Return what the step's losses came to, and what was found."""
        count = float(sum(count for _, count in self.losses))
        return replace(self.findings(), loss=self.loss_sum, count=count)

    def findings(self) -> StepSums:
        """Return what was found of the losses; now and then this computes them once more."""
        split = float(self._probe.finds_difference())
        stats = self.stats = self.batches.rows.take_stats()
        return StepSums(
            split=split,
            trained=self._num_with_gradient,
            hits=stats.hits,
            misses=stats.misses + stats.upgrades,
            upgrades=stats.upgrades,
        )


class EvaluationWork(LayerWork):
    """Add up losses and metrics, and keep the outputs only where asked to.

    Samples without targets have neither loss nor metrics.
    """

    def __init__(
        self, layers: StageLayers, batches: MicroBatches, *, results: Results, probe: SplitProbe
    ) -> None:
        super().__init__(layers, batches)
        self._results = results
        self._probe = probe
        probe.begin_step()

    def finish(self, micro_batch: int, outputs: Payload) -> None:
        output, entries = only_tensor(outputs), self._entries[micro_batch]
        task = self.layers.task
        names = task.model.targets
        targets = {name: entries[name] for name in names if name in entries}
        if self._results.kept is not None:
            self._results.kept.add(output, targets, self._ids_of(micro_batch))
        if len(targets) < len(names):
            del self._entries[micro_batch]
            return
        target, metrics = self.target(micro_batch), task.config.metrics
        if metrics is None:
            metrics = default_metrics(output, target, ignore_index=task.loss_fn.ignore_index)
        for name, metric in metrics.items():
            before = output._version
            self._results.add(name, *_sum_and_count(name, metric(output, target)))
            if output._version != before:
                raise ValueError(
                    f"metric {name!r} writes into the output, which the loss and other metrics "
                    "are still to see: let it work on a copy"
                )
        # Last, as a loss may write into what it is given.
        self._probe.watch(output, target)
        loss = self._loss_of(micro_batch, output, target)
        size = len(output)
        self._results.add("loss", *(loss if isinstance(loss, tuple) else (loss * size, size)))


@final
class LookWork(LayerWork):
    """Keep the Gram matrix of each layer's outputs, by layer, in `grams`."""

    def __init__(self, layers: StageLayers, batches: MicroBatches) -> None:
        super().__init__(layers, batches)
        self.grams: dict[int, Tensor] = {}

    def see(self, index: int, output: Tensor) -> None:
        sublayers = self.layers.task.model.sublayers
        layer = sublayers[index].layer
        # Above it there is the head at least.
        if layer < self.layers.task.model.num_layers and sublayers[index + 1].layer != layer:
            with torch.autocast(output.device.type, enabled=False):
                self.grams[layer] = gram(output)

    def finish(self, micro_batch: int, outputs: Payload) -> None:
        """Need no loss."""


def _sum_and_count(name: str, answer: Any) -> tuple[Any, Any]:
    """Take a metric's answer apart; a TypeError names the metric that gave something else."""
    try:
        total, count = answer
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"metric {name!r} returned a {type(answer).__name__}; return (sum, count) of the batch"
        ) from error
    return total, count


def without_full_masks(batch: Batch, names: Sequence[str]) -> Batch:
    """Return a batch without those masks, in host memory, by which nothing is padding.

    Attention has faster kernels without one. To ask a GPU would stop it.
    """
    full = {name for name in names if name in batch and bool((batch[name] != 0).all())}
    return {name: entry for name, entry in batch.items() if name not in full}


def _precise(value: Tensor | float) -> Tensor | float:
    """Return a number to add up: in a small dtype sums stall or overflow."""
    return value.detach().double() if isinstance(value, Tensor) else float(value)


def only_tensor(payload: Payload) -> Tensor:
    """Return the tensor of a payload that holds one."""
    (tensor,) = payload.tensors
    assert tensor is not None
    return tensor


def default_metrics(output: Tensor, target: Any, *, ignore_index: int) -> Mapping[str, Metric]:
    """Return the accuracy for a classifier's output and targets, nothing for others."""
    if (
        isinstance(target, Tensor)
        and output.ndim == 2
        and target.ndim == 1
        and not target.is_floating_point()
    ):
        return {"accuracy": partial(accuracy, ignore_index=ignore_index)}
    return {}


def accuracy(output: Tensor, target: Tensor, *, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Count right answers, and the targets that are not ignored.

    Args:
        output: (N, classes).
        target: (N,) class indices.
        ignore_index: the class of targets that count neither as right nor as wrong.
    """
    counts = target != ignore_index
    return ((output.argmax(dim=1) == target) & counts).sum(), counts.sum()
