"""Present any model that has a row of blocks: its own forward, cut between them.

    embedding   the forward up to the first block      layer 0
    blocks.0    the first block                        layer 0
    blocks.1    ...                                    layer 1
    head        the forward behind the last block      layer n

Nothing is known of the model but how it ran on a few samples (`recording`). So the Trainer
compares its sublayers with its own forward before the first step, and refuses it where they
differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopipe.loss import LossFunction
from pipetransformer.model.layered_model import LayeredModel, Sublayer, named_tensors
from pipetransformer.model.losses import own_loss
from pipetransformer.model.own_forward import OwnForward
from pipetransformer.model.recording import Row, find_row
from pipetransformer.model.transformer import qualified_name, refuse_replaced

Entries: TypeAlias = Mapping[str, Tensor]
Read: TypeAlias = Callable[["EntryNames"], Entries]
"""Reads a few samples of a data set: the entries named, (N, ...) each."""

TARGETS = ("labels", "start_positions", "end_positions")


@dataclass(frozen=True)
class EntryNames:
    """Name the entries of a batch that a model's forward takes, and those of its loss.

    Args:
        inputs: the main one first; where the signature is all that is known, optional ones too.
    """

    inputs: tuple[str, ...]
    targets: tuple[str, ...]


def names_of(model: nn.Module) -> EntryNames:
    """Read the names from the signature of a model's forward."""
    takes = forward_parameters(model)
    main = getattr(unwrapped(model), "main_input_name", None)
    rest = tuple(name for name in takes if name not in TARGETS)
    inputs = (main, *(n for n in rest if n != main)) if main in rest else rest
    return EntryNames(inputs, tuple(name for name in TARGETS if name in takes) or ("y",))


def forward_parameters(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a forward's parameters."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def unwrapped(model: Any) -> Any:
    """Return the model that a `peft` model calls in its forward."""
    is_peft = any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)
    return model.get_base_model() if is_peft else model


def present(model: nn.Module, batch: Entries, loss_fn: LossFunction | None = None) -> LayeredModel:
    """Present a model by what it does with a few samples.

    Args:
        batch: two samples or more; (N, ...) each, in host memory.
        loss_fn: the user's own; else the model's is looked for.
    Raises:
        ValueError: its forward fails, or has no row of blocks.
    """
    names = names_of(model)
    inputs = tuple(name for name in names.inputs if name in batch)
    keywords = {"use_cache": False} if "use_cache" in forward_parameters(model) else {}
    given = {name: batch[name] for name in inputs}
    row = find_row(model, lambda: model(**given, **keywords))
    _refuse_random_depth(model)
    refuse_replaced(*(m for m in model.modules() if _holds_block(m, row)))
    blind = _read_for_shape(model, row, given, keywords)
    own = OwnForward(model, row, inputs=inputs, keywords=keywords, example=blind)
    sublayers = _sublayers(model, own)
    targets = tuple(name for name in names.targets if name in batch) or names.targets[:1]
    held = {id(t) for sub in sublayers for t in named_tensors(sub.module).values()}
    return LayeredModel(
        model,
        sublayers,
        inputs=inputs,
        targets=targets,
        loss_fn=None if loss_fn is not None else _own_loss(model, targets, given, batch, keywords),
        unused=[name for name, t in named_tensors(model).items() if id(t) not in held],
        is_recorded=True,
    )


def _own_loss(
    model: nn.Module,
    targets: tuple[str, ...],
    given: Entries,
    batch: Entries,
    keywords: Mapping[str, Any],
) -> LossFunction | None:
    """Return the loss that the model itself computes; None where it computes none."""
    if qualified_name(type(model)).startswith("timm."):
        return F.cross_entropy
    labels = {name: batch[name] for name in targets if name in batch}
    if not labels or targets == ("y",):
        return None
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            answer = model.eval()(**given, **labels, **keywords)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if getattr(answer, "loss", None) is None:
        return None
    target = next(iter(labels.values())) if len(targets) == 1 else labels
    return own_loss(model, unwrapped(model).config, answer, output_of(answer), target)


def _sublayers(model: nn.Module, own: OwnForward) -> list[Sublayer]:
    row, parts = own.row, _Parts(model, own.row)
    sides = tuple(name for name in own.inputs if name not in own.shapes)
    below = parts.of(row.below, row.called_below)
    above = parts.of(row.above, row.called_above)
    learned = parts.of(row.learned, frozenset()) if row.learned else None
    blocks = [
        Sublayer(f"blocks.{i}", i, _Block(own, i, block, learned), sides)
        for i, block in enumerate(row.blocks)
    ]
    return [
        Sublayer("embedding", 0, _Below(own, below)),
        *blocks,
        Sublayer("head", len(blocks), _Above(own, above), sides),
    ]


class _Parts:
    """Collect the modules and tensors outside of blocks that serve one sublayer."""

    def __init__(self, model: nn.Module, row: Row) -> None:
        self._model, self._row = model, row
        self._name_of = {id(t): n for n, t in named_tensors(model).items()}

    def of(self, names: frozenset[str], called: frozenset[nn.Module]) -> nn.Module:
        """Return a module that holds the tensors of these names, and the modules called."""
        holder = nn.Module()
        self._hold(holder, self._model, "", names, called)
        return holder

    def _hold(
        self,
        holder: nn.Module,
        module: nn.Module,
        prefix: str,
        names: frozenset[str],
        called: frozenset[nn.Module],
    ) -> None:
        """Register the largest modules that serve this sublayer alone, and loose tensors."""
        own = {self._name_of[id(t)] for t in named_tensors(module).values()}
        if not _holds_block(module, self._row) and own <= names and (own or module in called):
            holder.add_module(prefix, module)
            return
        for name, tensor in module._parameters.items():
            if tensor is not None and self._name_of[id(tensor)] in names:
                holder.register_parameter(f"{prefix}{name}", tensor)
        for name, buffer in module._buffers.items():
            if buffer is not None and self._name_of[id(buffer)] in names:
                holder.register_buffer(f"{prefix}{name}", buffer)
        for name, child in module._modules.items():
            if child is not None and child not in self._row.blocks:
                self._hold(holder, child, f"{prefix}{name}__", names, called)


def _holds_block(module: nn.Module, row: Row) -> bool:
    return any(part is row.blocks[0] for part in module.modules()) and module not in row.blocks


@final
class _Below(nn.Module):
    """Run the forward up to the first block: entries to its hidden state."""

    def __init__(self, own: OwnForward, parts: nn.Module) -> None:
        super().__init__()
        self.own, self.parts = own, parts

    def forward(self, first: Tensor, **others: Tensor) -> Tensor:
        entries = {self.own.inputs[0]: first, **others}
        return self.own.below(entries, training=self.training)


@final
class _Block(nn.Module):
    """Run a block with what the forward gives it: hidden state to hidden state."""

    def __init__(
        self, own: OwnForward, index: int, block: nn.Module, learned: nn.Module | None
    ) -> None:
        super().__init__()
        self.own, self.index, self.block, self.learned = own, index, block, learned

    def forward(self, hidden: Tensor, **entries: Tensor) -> Tensor:
        return self.own.block(self.index, hidden, entries, training=self.training)


@final
class _Above(nn.Module):
    """Run the forward behind the last block: hidden state to output."""

    def __init__(self, own: OwnForward, parts: nn.Module) -> None:
        super().__init__()
        self.own, self.parts = own, parts

    def forward(self, hidden: Tensor, **entries: Tensor) -> Tensor:
        return output_of(self.own.above(hidden, entries, training=self.training))


def output_of(answer: Any) -> Tensor:
    """Return the tensor that a loss takes: a model's answer itself, or its logits."""
    if isinstance(answer, Tensor):
        return answer
    logits = getattr(answer, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    ends = [getattr(answer, name, None) for name in ("start_logits", "end_logits")]
    if all(isinstance(one, Tensor) for one in ends):
        return torch.stack([one for one in ends if isinstance(one, Tensor)], dim=-1)
    raise TypeError(
        f"the model's own forward returned a {type(answer).__name__}, in which no output is known"
    )


def _refuse_random_depth(model: nn.Module) -> None:
    """Raise a ValueError where blocks are left out at random: all are run here."""
    for module in model.modules():
        for name in ("layerdrop", "layer_drop"):
            chance = vars(module).get(name)
            if isinstance(chance, float) and chance > 0:
                raise ValueError(
                    f"{name} of a {type(module).__name__} is {chance}: blocks would be left out "
                    "at random, but here each runs; set it to 0 in the configuration"
                )


def _read_for_shape(
    model: nn.Module, row: Row, given: Entries, keywords: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the floating inputs of which blocks and head use the shape alone."""
    own = OwnForward(model, row, inputs=tuple(given), keywords=keywords, example={})
    return {
        name: entry
        for name, entry in given.items()
        if entry.is_floating_point() and entry.ndim > 2 and _is_blind(own, given, name)
    }


def _is_blind(own: OwnForward, given: Entries, name: str) -> bool:
    """Tell whether what blocks are given, and the answer above them, do without an entry."""
    zeros = {**given, name: torch.zeros((), dtype=given[name].dtype).expand(given[name].shape)}
    with torch.no_grad():
        hidden = own.below(given, training=False)
        return all(
            _are_equal(*pair)
            for pair in zip(*(_seen(own, hidden, one) for one in (given, zeros)), strict=True)
        )


def _seen(own: OwnForward, hidden: Tensor, entries: Entries) -> list[Any]:
    """Return all that blocks and head make of a batch's entries, as leaves."""
    own.forget()
    blocks = range(len(own.row.blocks))
    arguments = [own.arguments(i, hidden, entries, training=False) for i in blocks]
    return [*tree_leaves(arguments), output_of(own.above(hidden, entries, training=False))]


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other)
