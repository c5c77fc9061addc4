"""Run the model's sublayers on a device to measure them, a span that fits its memory at a time.

    span          sublayers             on the device meanwhile
    0             embedding, block 0    their weights and gradients, their activations
    1             block 1, block 2      the same of these two, and what block 0 handed on
    2             block 3, head         ...

A model that fits is one span: caches are then as cold as in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from autopipe.loss import head_of
from autopipe.profile import ProfiledSublayer, chain_bytes, left_as_found
from pipetransformer.feed import Batch
from pipetransformer.model import LayeredModel, Task, opaque_kept
from pipetransformer.processes import give_back_free_pages

_Result = TypeVar("_Result")

_HIDDEN = "hidden"
"""The entry of a batch that holds what the span below handed on."""


@dataclass(frozen=True)
class Need:
    """State the bytes that measuring a sublayer takes."""

    fixed_bytes: int
    sample_bytes: float

    def at(self, num_samples: int) -> float:
        return self.fixed_bytes + num_samples * self.sample_bytes


def sublayer_needs(task: Task, device: torch.device, batch: Batch) -> list[Need]:
    """Measure what every sublayer takes, one at a time on the device.

    Args:
        batch: one sample, on the device.
    """
    singly = [range(index, index + 1) for index in range(len(task.model.sublayers))]
    rows = run_spans(
        task, device, singly, [batch], lambda sublayers, inputs: chain_bytes(sublayers, inputs[0])
    )
    return [
        # Buffers exist twice, as `left_as_found` keeps a copy. An output exists three times: as
        # itself, as the next sublayer's input, and as a gradient.
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
    """Cut the sublayers into spans that fit; a sublayer above the limit is a span of its own.

    Args:
        num_samples: size of the micro-batch.
        limit_bytes: what a span may take.
        parts: equal parts of the model, at whose ends spans end, too.
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
    """Call an action with every span's sublayers while the device holds them.

    Parameters are trainable as the user left them. Afterwards all is as it was.

    Args:
        spans: ascending sublayers, from the first one. Each takes the output of the one before.
        batches: inputs of the first span, on the device.
        action: takes a span's sublayers and their inputs.
    Returns:
        the action's results, a span each.
    """
    results = []
    inputs = list(batches)
    for span in spans:
        sublayers = [_profile_sublayer(task, index, span[0]) for index in span]
        modules = [sublayer.module for sublayer in sublayers]
        with held_on(task, device, span), left_as_found(modules, device):
            results.append(action(sublayers, inputs))
            if span is not spans[-1]:
                # The inputs travel as an entry of the batch, whose other entries are side inputs.
                inputs = [{**batch, _HIDDEN: forward(sublayers, batch)} for batch in inputs]
        # The process keeps what it frees, but these pieces may be too small for the next span.
        give_back_free_pages()
    return results


def forward(sublayers: Sequence[ProfiledSublayer], batch: Batch) -> Tensor:
    """Return the output of a span's sublayers, without gradients."""
    hidden: Tensor | None = None
    with torch.no_grad():
        for sublayer in sublayers:
            hidden = sublayer.call(hidden, batch)
    assert hidden is not None, "a span has sublayers"
    return hidden


def _profile_sublayer(task: Task, index: int, first: int) -> ProfiledSublayer:
    """Present a sublayer of the span that begins at `first`; the head computes the loss, too."""
    model = task.model

    def call(hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
        if hidden is None and first > 0:
            below = batch[_HIDDEN].detach()
            # A copy, as between sublayers, with a gradient to compute, as between stages.
            hidden = below.requires_grad_(below.is_floating_point()).clone()
        headless = task.leaves_out_logits
        given = batch if hidden is None else hidden
        output = task.call(index, given, sides=batch, headless=headless)
        if index < len(model.sublayers) - 1:
            return output
        return head_of(task.loss(output, model.targets_of(batch), headless=headless))

    sublayer = model.sublayers[index]

    def in_step() -> AbstractContextManager[None]:
        return task.compiled((index,))()  # Not before `held_on` has set which parameters train.

    return ProfiledSublayer(sublayer.name, sublayer.layer, sublayer.module, call, in_step)


@contextmanager
def held_on(task: Task, device: torch.device, span: Sequence[int]) -> Iterator[None]:
    """Hold a span's sublayers on a device; sublayers of other ranks get random weights."""
    model = task.model
    # Parts are run by the model's own forward, which reads what lies beside them, too.
    span = range(len(model.sublayers)) if model.parts else span
    absent = [i for i in span if any(t.is_meta for t in model.tensors(i).values())]
    for index in absent:
        _fill(model, index, device)
    tensors = {name: t for index in span for name, t in model.movable(index).items()}
    # Tensors are swapped in place, so optimizers and hooks keep the objects that they know.
    before = [(t, t.data, t.requires_grad) for t in tensors.values()]
    try:
        for name, tensor in tensors.items():
            tensor.data = tensor.data.to(device)
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(name in task.trainable)
        with opaque_kept(one for index in span for one in model.tensors(index).values()):
            yield
    finally:
        for tensor, data, requires_grad in before:
            tensor.data = data
            tensor.requires_grad_(requires_grad)
        for index in absent:
            model.release(index)


def _fill(model: LayeredModel, index: int, device: torch.device) -> None:
    """Give a released sublayer random weights, which compute at the speed of real ones."""
    model.materialize(index, device)
    # A generator of its own leaves the caller's random numbers as they were.
    generator = torch.Generator(device).manual_seed(index)
    with torch.no_grad():
        for tensor in model.tensors(index).values():
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                tensor.normal_(0.0, 0.02, generator=generator)
            else:
                tensor.fill_(1)
