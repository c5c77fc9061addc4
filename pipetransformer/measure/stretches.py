"""Run the model's sublayers on a device to measure them, as many at a time as its memory holds.

    span          sublayers             on the device meanwhile
    0             embedding, block 0    their weights and gradients, their activations
    1             block 1, block 2      the same of these two, and what block 0 handed on
    2             block 3, head         ...

A model that fits is one span: what runs after much else, as in a step, is timed most truly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from autopipe.loss import head_of
from autopipe.profile import ProfiledSublayer, chain_bytes, left_as_found
from pipetransformer.feed import Batch
from pipetransformer.model import LayeredModel, Task

_Result = TypeVar("_Result")

_HIDDEN = "hidden"
"""The entry of a batch that holds what the span below handed on."""


@dataclass(frozen=True)
class Need:
    """State the bytes that measuring a sublayer takes: at any size, and for each sample."""

    fixed_bytes: int
    sample_bytes: float

    def at(self, num_samples: int) -> float:
        """Return the bytes at a micro-batch's size."""
        return self.fixed_bytes + num_samples * self.sample_bytes


def sublayer_needs(task: Task, device: torch.device, batch: Batch) -> list[Need]:
    """Find out what every sublayer takes, one at a time on the device.

    Args:
        task: whose model is measured.
        device: where to run.
        batch: one sample, on the device.
    """
    singly = [range(index, index + 1) for index in range(len(task.model.sublayers))]
    rows = run_spans(
        task, device, singly, [batch], lambda sublayers, inputs: chain_bytes(sublayers, inputs[0])
    )
    return [
        # Buffers are kept aside. An output is there as itself, as the next one's input, and as a
        # gradient.
        Need(
            row["parameter_bytes"]
            + row["gradient_bytes"]
            + 2 * row["buffer_bytes"]
            + row["copy_bytes"],
            row["saved_bytes"] + 3 * row["output_bytes"],
        )
        for (row,) in rows
    ]


def cut_spans(
    needs: Sequence[Need], num_samples: int, limit_bytes: float, *, parts: int = 1
) -> tuple[range, ...]:
    """Cut the sublayers into spans that fit; one that fits nowhere is a span of its own.

    Args:
        needs: of every sublayer.
        num_samples: size of the micro-batch.
        limit_bytes: what a span may take.
        parts: of about equally many sublayers, which no span reaches beyond.
    """
    spans, first, held = [], 0, 0.0
    begins = {len(needs) * part // parts for part in range(1, parts)}
    for index, need in enumerate(needs):
        needed = need.at(num_samples)
        if index > first and (index in begins or held + needed > limit_bytes):
            spans.append(range(first, index))
            first, held = index, 0.0
        held += needed
    return (*spans, range(first, len(needs)))


def run_spans(
    task: Task,
    device: torch.device,
    spans: Sequence[Sequence[int]],
    batches: Sequence[Batch],
    action: Callable[[list[ProfiledSublayer], list[Batch]], _Result],
) -> list[_Result]:
    """Do something with the sublayers of every span, on a device and trainable as the user left
    them; everything is then as it was.

    Args:
        task: whose model is lent.
        device: where.
        spans: ascending sublayers, from the first one, each of which takes what the one before it
            here gives.
        batches: what the first span takes, on the device.
        action: is given a span's sublayers and the batches that they take.
    """
    results = []
    inputs = list(batches)
    for span in spans:
        sublayers = [_profiled(task, index, span[0]) for index in span]
        modules = [sublayer.module for sublayer in sublayers]
        with held_on(task, device, span), left_as_found(modules, device):
            results.append(action(sublayers, inputs))
            if span is not spans[-1]:
                inputs = [{**batch, _HIDDEN: forward(sublayers, batch)} for batch in inputs]
    return results


def forward(sublayers: Sequence[ProfiledSublayer], batch: Batch) -> Tensor:
    """Run a span's sublayers without gradients; return the last one's output."""
    hidden: Tensor | None = None
    with torch.no_grad():
        for sublayer in sublayers:
            hidden = sublayer.call(hidden, batch)
    assert hidden is not None, "a span has sublayers"
    return hidden


def _profiled(task: Task, index: int, first: int) -> ProfiledSublayer:
    """Present a sublayer of the span that begins with the first; the last one's loss counts."""
    model = task.model

    def call(hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
        if hidden is None and first > 0:
            below = batch[_HIDDEN].detach()
            # A copy, as between sublayers, with a gradient to compute, as between stages.
            hidden = below.requires_grad_(below.is_floating_point()).clone()
        output = task.call(index, batch if hidden is None else hidden, sides=batch)
        if index < len(model.sublayers) - 1:
            return output
        return head_of(task.loss_fn(output, model.targets_of(batch)))

    sublayer = model.sublayers[index]
    return ProfiledSublayer(sublayer.name, sublayer.layer, sublayer.module, call)


@contextmanager
def held_on(task: Task, device: torch.device, span: Sequence[int]) -> Iterator[None]:
    """Hold a span's sublayers on a device; those that are elsewhere get random weights."""
    model = task.model
    absent = [i for i in span if any(t.is_meta for t in model.tensors(i).values())]
    for index in absent:
        _fill(model, index, device)
    tensors = {name: t for index in span for name, t in model.tensors(index).items()}
    found = [(t, t.data, t.requires_grad) for t in tensors.values()]
    try:
        for name, tensor in tensors.items():
            tensor.data = tensor.data.to(device)
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(name in task.trainable)
        yield
    finally:
        for tensor, data, requires_grad in found:
            tensor.data = data
            tensor.requires_grad_(requires_grad)
        for index in absent:
            model.release(index)


def _fill(model: LayeredModel, index: int, device: torch.device) -> None:
    """Give a released sublayer weights that compute at the speed of real ones."""
    model.materialize(index, device)
    # A generator of its own leaves the caller's random numbers as they were.
    generator = torch.Generator(device).manual_seed(index)
    with torch.no_grad():
        for tensor in model.tensors(index).values():
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                tensor.normal_(0.0, 0.02, generator=generator)
            else:
                tensor.fill_(1)
