"""Present a model with frozen, named parts, to be trained on one stage.

    parts    the model's own forward up to its last part     layer 0, frozen
    rest     its own forward, whole, with rows for parts     layer 1

Both run the model itself, so nothing of it is copied. What `rest` is given are rows in any case,
read or just computed: a run without a cache takes the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from autopipe.loss import LossFunction
from freeze.in_place import freeze_modules
from pipetransformer.model.forward import (
    Entries,
    Left,
    Read,
    Reads,
    Row,
    are_equal,
    beside_blocks,
    names_of,
    output_of,
    split_batch,
    without_cache,
)
from pipetransformer.model.layered_model import LayeredModel, Sublayer, recorded_model, row_of
from pipetransformer.model.losses import own_loss_of
from pipetransformer.model.modules import computing_in, in_mode, named_tensors, whole_in_mode
from pipetransformer.model.parts.named_parts import named_parts
from pipetransformer.model.parts.part_record import replaced
from pipetransformer.model.parts.parts import PartCall, PartTrial, present_parts


@final
class PartsForward:
    """Run a model's own forward up to its parts, and from their rows.

    Args:
        row: of the parts.
        keywords: what the forward is given beside entries.
        hollow: entries, (N, ...), whose shape is all that the rest uses, such as images'. All
            samples must have it.
    """

    def __init__(
        self, model: nn.Module, row: Row, *, keywords: Mapping[str, Any], hollow: Entries
    ) -> None:
        self._model, self._row, self._keywords = model, row, dict(keywords)
        self._hollow = {name: (one.shape[1:], one.dtype) for name, one in hollow.items()}

    def rows(self, entries: Entries) -> Tensor:
        """Return what parts return for samples: (N, ...)."""
        for name, (shape, _) in self._hollow.items():
            if entries[name].shape[1:] != shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(entries[name].shape)}, but the first samples had "
                    f"{('N', *shape)}: give all samples one shape"
                )
        answers: dict[int, Any] = {}

        def run(index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            answers[index] = forward(*args, **kwargs)
            if len(answers) == len(self._row.blocks):
                raise Left
            return answers[index]

        runs = [partial(run, index, part.forward) for index, part in enumerate(self._row.blocks)]
        with whole_in_mode(self._model, training=False), self._calling(runs), suppress(Left):
            self._model(**entries, **self._keywords)
        assert self._row.packing is not None
        in_order = [answers[index] for index in range(len(self._row.blocks))]
        return self._row.packing.packed(in_order, len(next(iter(entries.values()))))

    def answer(self, rows: Tensor, entries: Entries) -> Any:
        """Return the model's answer where parts return these rows, in the mode that it is in."""

        def hand_on(call: PartCall, *args: Any, **kwargs: Any) -> Any:
            return call.answered(rows, (args, kwargs), needs_gradients=False)

        given = dict(entries)
        for name, (shape, dtype) in self._hollow.items():
            nan = torch.full((), torch.nan, dtype=dtype, device=rows.device)
            given[name] = nan.expand(len(rows), *shape)
        with self._calling([partial(hand_on, call) for call in self._row.calls]):
            return self._model(**given, **self._keywords)

    @contextmanager
    def _calling(self, forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
        """Have parts run other forwards within the block, each once."""
        called = [0] * len(forwards)

        def call(index: int, *args: Any, **kwargs: Any) -> Any:
            called[index] += 1
            if called[index] > 1:
                self._refuse_calls(called)
            return forwards[index](*args, **kwargs)

        calls = [torch.compiler.disable(partial(call, index)) for index in range(len(forwards))]
        with replaced(self._row.blocks, calls):
            yield
        if 0 in called:
            self._refuse_calls(called)

    def _refuse_calls(self, called: list[int]) -> None:
        raise RuntimeError(
            f"the model's forward has called {self._row.name} {called} times, but once before; "
            "parts must be called once in each forward: train without parts= where that changes"
        )


@final
class _Parts(nn.Module):
    """Run the forward up to the last part: entries to rows."""

    def __init__(self, own: PartsForward, main: str, parts: nn.Module) -> None:
        super().__init__()
        self.own, self.main, self.parts = own, main, parts

    def forward(self, first: Tensor, **others: Tensor) -> Tensor:
        return self.own.rows({self.main: first, **others})


@final
class _Rest(nn.Module):
    """Run the forward from rows: these to output.

    Attributes:
        around: modules around parts, and the flags that `train()` gives them.
    """

    def __init__(self, own: PartsForward, rest: nn.Module) -> None:
        super().__init__()
        self.own, self.rest = own, rest
        self.around: Mapping[bool, list[tuple[nn.Module, bool]]] = {}

    def forward(self, rows: Tensor, **entries: Tensor) -> Tensor:
        with in_mode(self.around[self.training]):
            return output_of(self.own.answer(rows, entries))


def adapt_parts(
    model: nn.Module,
    parts: Sequence[str],
    read: Read,
    *,
    loss_fn: LossFunction | None = None,
    computes_in: torch.dtype | None = None,
) -> LayeredModel:
    """Freeze parts of a model, and present it to be trained on one stage, from their rows.

    Args:
        parts: names of modules.
        read: reads two samples.
        loss_fn: the user's own, in whose place no loss of the model is looked for.
        computes_in: the dtype of autocast in the run.
    Raises:
        ForwardFailedError: its forward fails.
        ValueError: it has no such part, or what one returns cannot be kept in rows.
    """
    _, named = named_parts(model, parts)
    if model in named.values():
        raise ValueError("the part '' is the model itself, so that nothing would train")
    device, names = next(model.parameters()).device, names_of(model)
    keywords, (inputs, labels) = without_cache(model), split_batch(model, read(names))
    freeze_modules(model, named.values())

    def run(given: Entries) -> Any:
        with computing_in(computes_in, device):
            return model(**given, **keywords)

    if labels and _reads_labels(model, run, inputs, labels):
        inputs |= labels  # As a decoder makes its inputs of them.
    trial = PartTrial(inputs, [inputs], run, is_counted=False)
    shown = present_parts(model, named, trial, beside=tuple(labels) or names.targets[:1])
    _refuse_counted(shown)
    loss = None
    if labels and loss_fn is None:
        with torch.no_grad(), whole_in_mode(model, training=False):
            loss = own_loss_of(model, labels, run({**inputs, **labels}))
    rest = shown.sublayers[-1]
    hollow = {name: one for name, one in inputs.items() if name not in rest.sides}
    own = PartsForward(model, row_of(shown), keywords=keywords, hollow=hollow)
    with computing_in(computes_in, device):
        read_by_rest = _read_from_rows(own, model, inputs, rest.sides)
    return _layered(shown, own, read_by_rest, loss)


def _reads_labels(
    model: nn.Module, run: Callable[[Entries], Any], inputs: Entries, labels: Entries
) -> bool:
    """Return whether the model's output depends on labels, or there is none without."""
    with torch.no_grad(), whole_in_mode(model, training=False):
        try:
            plain = output_of(run(inputs))
        except Exception:  # Any: it cannot be run without.
            return True
        return not are_equal(output_of(run({**inputs, **labels})), plain)


def _read_from_rows(
    own: PartsForward, model: nn.Module, inputs: Entries, sides: Sequence[str]
) -> frozenset[str]:
    """Name the tensors that a forward from rows reads, in training or in evaluation."""
    read, entries = set[int](), {name: inputs[name] for name in sides}
    device = next(iter(inputs.values())).device
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        rows = own.rows(inputs)
        for training in (False, True):
            with whole_in_mode(model, training=training), Reads(read.add):
                own.answer(rows, entries)
    return frozenset(name for name, one in named_tensors(model).items() if id(one) in read)


def _refuse_counted(shown: LayeredModel) -> None:
    row = row_of(shown)
    assert row.packing is not None
    if row.packing.most_bytes is not None:
        raise ValueError(
            f"{row.name} return other numbers of entries than there are samples, as of several "
            "images each, which a Trainer has no rows for; freeze them in a loop of your own by "
            "attach(model, parts=...)"
        )


def _layered(
    shown: LayeredModel,
    own: PartsForward,
    read_by_rest: frozenset[str],
    loss_fn: LossFunction | None,
) -> LayeredModel:
    """Return what `present_parts` has shown, as sublayers that run by themselves."""
    model, row, (below, above) = shown.model, row_of(shown), shown.sublayers
    rest = beside_blocks(model, row, read_by_rest, row.called_below | row.called_above)
    first, last = _Parts(own, shown.inputs[0], below.module), _Rest(own, rest)
    layered = recorded_model(
        model,
        [Sublayer("parts", 0, first), Sublayer("rest", 1, last, above.sides)],
        row,
        inputs=shown.inputs,
        targets=shown.targets,
        loss_fn=loss_fn,
    )
    inside = {module for sub in layered.sublayers for module in sub.module.modules()}
    last.around = {
        training: [(m, f) for m, f in layered.flags(training=training).items() if m not in inside]
        for training in (True, False)
    }
    return layered


def parts_forward_of(layered: LayeredModel) -> PartsForward:
    """Return what runs the parts of a model, and the rest of it."""
    last = layered.sublayers[-1].module
    assert isinstance(last, _Rest)
    return last.own
