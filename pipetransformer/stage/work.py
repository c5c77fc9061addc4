"""Compute one stage's part of a micro-batch: to train, to evaluate, to look at its layers."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autocache import HIDDEN, CacheStats
from autodp import mix_seed
from autopipe.engine import ForwardPass, Payload, StageWork, running
from autopipe.loss import BatchMean, LossValue, SplitProbe, head_of, precise, sum_and_count
from freeze.signals import gram
from pipetransformer.config import Metric
from pipetransformer.feed import Batch, Rows, seed_plainly, seed_torch
from pipetransformer.stage.bad_samples import name_sample
from pipetransformer.stage.predictions import KeptOutputs
from pipetransformer.stage.step_result import StepSums
from pipetransformer.stage.wiring import StageWiring


@dataclass(frozen=True)
class MicroBatches:
    """Name a replica's samples of a step, and how they are cut and fetched.

    Args:
        ids: (n,) int64 dataset indices, in order.
        sizes: samples of every micro-batch.
        rows: gives stage 0 their entries; asked once a step.
        first: number, in a stream of steps, of the first micro-batch; None for a step by itself.
    """

    ids: Tensor
    sizes: Sequence[int]
    rows: Rows
    first: int | None = None

    def in_stream(self, micro_batch: int) -> int:
        """Return a micro-batch's number in the stream."""
        return (self.first or 0) + micro_batch


@dataclass(frozen=True)
class Results:
    """Collect what this rank makes of a data set.

    Args:
        totals: [sum, count] of the loss and of each metric; tensors stay on their device.
        kept: its outputs and targets; None where only totals are asked for.
        has_metrics: whether metrics are asked for, beside the loss.
    """

    totals: dict[str, list[Tensor | float]] = field(default_factory=dict)
    kept: KeptOutputs | None = None
    has_metrics: bool = True

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        before = self.totals.get(name, [0.0, 0.0])
        self.totals[name] = [
            one + precise(more) for one, more in zip(before, (total, count), strict=True)
        ]

    def read(self) -> dict[str, list[float]]:
        """Return the totals as numbers; waits for the device."""
        return {name: [float(one) for one in pair] for name, pair in self.totals.items()}


class LayerWork(StageWork):
    """Run a stage's sublayers on micro-batches, with the entries each of them takes.

    Args:
        reads_logits: whether anything but the loss reads the model's output.
    Attributes:
        where: which step this is: the beginning of errors' texts.
        own: the micro-batches that this worker takes.
        parts: of those, the entries that this rank has read, on its device.
        spent_s: seconds, by what they were spent on; "data" is samples and side inputs.
    """

    where = ""

    def __init__(
        self, wiring: StageWiring, batches: MicroBatches, *, reads_logits: bool = False
    ) -> None:
        self._wiring = wiring
        self._headless = wiring.is_last and not reads_logits and wiring.task.leaves_out_logits
        self.batches = batches
        self.own = wiring.turn.own(len(batches.sizes))
        self.parts: dict[int, Batch] = {}
        self._sent: dict[int, Batch] = {}
        self._entries: dict[int, Batch] = {}
        self.spent_s = {"compute": 0.0, "bubble": 0.0, "all_reduce": 0.0, "data": 0.0}

    def take(self, whole: Batch) -> None:
        """Take the entries of all own micro-batches' samples; on stage 0."""
        in_stream = self.batches.first is not None
        if not in_stream:  # In a stream all steps must have the same entries.
            whole = without_full_masks(whole, self._wiring.task.model.optional_masks)
        sizes = [self.batches.sizes[i] for i in self.own]

        def cut(batch: Batch) -> dict[int, Batch]:
            parts = {name: entry.split(sizes) for name, entry in batch.items()}
            return {i: {name: of[n] for name, of in parts.items()} for n, i in enumerate(self.own)}

        # A stream's next fetch may reuse the host memory before this copy has been made.
        self.parts = cut(self._wiring.uploader.send(whole, wait=in_stream))
        # Side inputs travel through host memory: sent from here, they wait for no GPU.
        self._sent = cut(whole) if self._wiring.side_out else {}

    def first_input(self, micro_batch: int) -> Payload:
        start = time.perf_counter()
        for sender in self._wiring.side_out:
            sender.send(self.batches.in_stream(micro_batch), self._sent[micro_batch])
        batch = self.parts[micro_batch]
        # A layer may write into its input. Autograd counts writes for all slices of a tensor
        # together, and a stream fetches further steps into the same memory.
        if len(self.parts) > 1 or self.batches.first is not None:
            batch = {name: part.clone() for name, part in batch.items()}
        self._entries[micro_batch] = batch
        self.spent_s["data"] += time.perf_counter() - start
        # The first sublayer takes the entries themselves.
        return Payload((batch[HIDDEN],) if HIDDEN in batch else ())

    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        task, indices = self._wiring.task, self._wiring.indices
        entries = self._entries_of(micro_batch)
        value: Tensor | Mapping[str, Tensor] = (
            entries if indices.start == 0 else only_tensor(inputs)
        )
        try:
            with task.computing(self._wiring.device):
                for index in indices:
                    value = self.run_layer(micro_batch, index, value, entries)
                    self.see(index, value)
        except Exception as error:
            # Only stage 0 has the samples themselves, to try them one by one.
            if indices.start:
                raise
            run, ids = partial(task.model.run, last=indices.stop), self._ids_of(micro_batch)
            raise name_sample(error, f"{self.where}the model", run, entries, ids) from error
        assert isinstance(value, Tensor)
        size = self.batches.sizes[micro_batch]
        if value.ndim == 0 or len(value) != size:
            raise ValueError(
                f"the stage's output has shape {tuple(value.shape)} for {size} samples; every "
                "layer must keep the sample as its first dimension"
            )
        if self._wiring.is_last:
            return Payload((value if self._headless else task.in_float32(value),))
        del self._entries[micro_batch]
        return Payload((value,))

    def run_layer(
        self, micro_batch: int, index: int, value: Tensor | Mapping[str, Tensor], entries: Batch
    ) -> Tensor:
        """Run one sublayer."""
        return self._wiring.task.model.call(index, value, sides=entries, headless=self._headless)

    def _loss_of(self, micro_batch: int, output: Tensor, target: Any) -> LossValue:
        task, plan = self._wiring.task, self._wiring.plan
        loss_fn = partial(
            task.loss,
            headless=self._headless,
            keeps_many=plan.schedule == "gpipe" and len(self.own) > 1,
        )
        try:
            return loss_fn(output, target)
        except Exception as error:
            ids, given = self._ids_of(micro_batch), {"output": output.detach(), "target": target}
            what = f"{self.where}the loss {task.loss_fn.name!r}"

            def compute(part: dict[str, Any]) -> Any:
                return loss_fn(part["output"], part["target"])

            raise name_sample(error, what, compute, given, ids) from error

    def _ids_of(self, micro_batch: int) -> Tensor:
        return self.batches.ids.split(list(self.batches.sizes))[micro_batch]

    def finish_step(self) -> None:
        """Wait until the side inputs have left."""
        for sender in self._wiring.side_out:
            sender.finish_step()

    def see(self, index: int, output: Tensor) -> None:
        """Look at a sublayer's output."""

    def target(self, micro_batch: int) -> Any:
        """Return a micro-batch's targets, once: a tensor, or a mapping of several."""
        return self._wiring.task.model.targets_of(self._entries.pop(micro_batch))

    def _entries_of(self, micro_batch: int) -> Batch:
        if micro_batch not in self._entries:
            side_in = self._wiring.side_in
            number = self.batches.in_stream(micro_batch)
            entries = {} if side_in is None else side_in.receive(number)
            self._entries[micro_batch] = self._wiring.uploader.send(entries)
        return self._entries[micro_batch]


class Seeding(Protocol):
    """Seed the generators for a sublayer of a micro-batch; `plainly` Python's and numpy's, too."""

    def __call__(self, micro_batch: int, index: int, seed: int, *, plainly: bool) -> None: ...


class TrainWork(LayerWork):
    """Scale each micro-batch's loss so that all gradients add up to the mean's.

    Args:
        first_sample: position of this replica's first sample in the global batch.
        loss: joins the micro-batches' losses.
    Attributes:
        seeding: what seeds a sublayer.
        values: the step's numbers, (n,) on its device, once a graph has run all of it.
    """

    def __init__(
        self,
        wiring: StageWiring,
        batches: MicroBatches,
        *,
        step: int,
        first_sample: int,
        loss: BatchMean,
        probe: SplitProbe,
    ) -> None:
        super().__init__(wiring, batches)
        self.step, self.loss, self._probe = step, loss, probe
        self.where = f"step {step}: "
        sizes = batches.sizes
        # Positions in the global batch, which are the same however it is cut.
        self._offsets = [first_sample + sum(sizes[:i]) for i in range(len(sizes))]
        self._num_with_gradient = 0
        self.stats = CacheStats()
        self.seeding: Seeding = self._seed_now
        self.values: Tensor | None = None

    def alike(self, parts: dict[int, Batch], seeding: Seeding) -> TrainWork:
        """Return work that has not begun, as this one, on other entries of the same shapes."""
        assert not self._entries, "it has begun"
        other = copy.copy(self)
        other.parts, other.seeding, other._entries = parts, seeding, {}
        other.loss, other.spent_s = copy.deepcopy(self.loss), dict(self.spent_s)
        return other

    def seed_layer(self, micro_batch: int, index: int) -> None:
        """Seed the generators for a sublayer."""
        # Dropout depends on the step, the layer and the samples, not on the rank that computes.
        seed = mix_seed(
            self._wiring.task.config.seed, self.step, index, self._offsets[micro_batch]
        )
        model = self._wiring.task.model
        # Seeding Python and numpy is slow, so it is left to the sublayers that a probe has seen
        # draw from them, to the first one, in case it missed some, and to the last, for the loss.
        plain = (self._wiring.indices.start, len(model.sublayers) - 1, *model.plainly_random)
        self.seeding(micro_batch, index, seed, plainly=index in plain)

    def _seed_now(self, micro_batch: int, index: int, seed: int, *, plainly: bool) -> None:
        seed_torch(seed, self._wiring.device)
        if plainly:
            seed_plainly(seed)

    def run_layer(
        self, micro_batch: int, index: int, value: Tensor | Mapping[str, Tensor], entries: Batch
    ) -> Tensor:
        call = super().run_layer
        if index not in self._wiring.repeated:
            self.seed_layer(micro_batch, index)
            return call(micro_batch, index, value, entries)

        # The seed is part of what is repeated, so the state of generators need not be kept.
        def run(value: Tensor | Mapping[str, Tensor]) -> Tensor:
            self.seed_layer(micro_batch, index)
            return call(micro_batch, index, value, entries)

        version = value._version if isinstance(value, Tensor) else 0
        output: Tensor = checkpoint(
            run,
            value,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(_forward_passes, micro_batch, len(self.batches.sizes)),
        )
        if isinstance(value, Tensor) and value._version != version:
            name = self._wiring.task.model.sublayers[index].name
            raise ValueError(
                f"sublayer {name!r} writes into its input, from which it must run again; let it "
                "work out of place, or set activation_checkpointing=False"
            )
        return output

    def finish(self, micro_batch: int, outputs: Payload) -> Tensor:
        """Return what to back-propagate of the micro-batch's loss; see `BatchMean`."""
        output = only_tensor(outputs)
        target = self.target(micro_batch)
        # Before the loss, which may write into them.
        self._probe.watch(output, target)
        loss = self._loss_of(micro_batch, output, target)
        # Where the output needs no gradient, nothing below trains, and the loss need not have one.
        self._num_with_gradient += head_of(loss).requires_grad or not output.requires_grad
        return self.loss.add(loss, len(output))

    def sums(self, **others: float) -> StepSums:
        """Return what the step's losses came to, and what was found; see `StepSums`."""
        total, count = map(float, self.loss.sums())
        return self.findings(loss=total, count=count, **others)

    def findings(self, **others: float) -> StepSums:
        """Return what was found besides the losses; probes may compute losses once more."""
        split = float(self._probe.finds_difference())
        stats = self.stats = self.batches.rows.take_stats()
        return StepSums(
            split=split,
            trained=self._num_with_gradient,
            hits=stats.hits,
            misses=stats.misses + stats.upgrades,
            upgrades=stats.upgrades,
            ahead=stats.ahead,
            **others,
        )


class EvaluationWork(LayerWork):
    """Add up losses and metrics, of samples that have targets; keep outputs where asked to."""

    def __init__(
        self, wiring: StageWiring, batches: MicroBatches, *, results: Results, probe: SplitProbe
    ) -> None:
        metrics = wiring.task.config.metrics if results.has_metrics else {}
        reads = results.kept is not None or bool(metrics)
        super().__init__(wiring, batches, reads_logits=reads)
        self._results, self._metrics = results, metrics
        self._probe = probe

    def finish(self, micro_batch: int, outputs: Payload) -> None:
        output, entries = only_tensor(outputs), self._entries[micro_batch]
        task = self._wiring.task
        names = task.model.targets
        targets = {name: entries[name] for name in names if name in entries}
        if self._results.kept is not None:
            self._results.kept.add(output, targets, self._ids_of(micro_batch))
        if len(targets) < len(names):
            del self._entries[micro_batch]
            return
        target = self.target(micro_batch)
        metrics = self._metrics
        if metrics is None:  # These read no logits of words, which have three dimensions.
            metrics = default_metrics(output, target, ignore_index=task.loss_fn.ignore_index)
        for name, metric in metrics.items():
            before = output._version  # Autograd counts writes in place.
            self._results.add(name, *_sum_and_count(name, metric(output, target)))
            if output._version != before:
                raise ValueError(
                    f"metric {name!r} writes into the output, which the loss and other metrics "
                    "are still to see: let it work on a copy"
                )
        # Last, as a loss may write into what it is given.
        self._probe.watch(output, target)
        loss = self._loss_of(micro_batch, output, target)
        self._results.add("loss", *sum_and_count(loss, len(output)))


@final
class LookWork(LayerWork):
    """Keep the Gram matrix of each layer's outputs: `grams`, (n, n) each, by layer."""

    def __init__(self, wiring: StageWiring, batches: MicroBatches) -> None:
        super().__init__(wiring, batches)
        self.grams: dict[int, Tensor] = {}

    def see(self, index: int, output: Tensor) -> None:
        sublayers = self._wiring.task.model.sublayers
        layer = sublayers[index].layer
        # The head is above, so index + 1 exists.
        if layer < self._wiring.task.model.num_layers and sublayers[index + 1].layer != layer:
            with torch.autocast(output.device.type, enabled=False):
                self.grams[layer] = gram(output)

    def finish(self, micro_batch: int, outputs: Payload) -> None:
        """Need no loss."""


def _sum_and_count(name: str, answer: Any) -> tuple[Any, Any]:
    try:
        total, count = answer
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"metric {name!r} returned a {type(answer).__name__}; return (sum, count) of the batch"
        ) from error
    return total, count


def without_full_masks(batch: Batch, names: Sequence[str]) -> Batch:
    """Return a batch, in host memory, without the masks that are 1 everywhere.

    Attention has faster kernels without a mask. A GPU would have to be waited for.
    """
    full = {name for name in names if name in batch and bool((batch[name] != 0).all())}
    return {name: entry for name, entry in batch.items() if name not in full}


def _forward_passes(
    micro_batch: int, num_micro_batches: int
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts that tell layers whether their forward will be repeated, or is repeated."""
    passed = ForwardPass(micro_batch, num_micro_batches)
    return running(replace(passed, checkpointing=True)), running(replace(passed, recomputing=True))


def only_tensor(payload: Payload) -> Tensor:
    (tensor,) = payload.tensors
    assert tensor is not None
    return tensor


def default_metrics(output: Tensor, target: Any, *, ignore_index: int) -> Mapping[str, Metric]:
    """Return the accuracy for a classifier's output and targets, nothing for others."""
    if (
        isinstance(target, Tensor)
        and output.ndim == 2
        and output.shape[1] > 1  # One output is a regression's, also of whole numbers.
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
