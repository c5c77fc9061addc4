"""Name the entries of a batch that a model's forward takes, by its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from pipetransformer.model.forward.own_forward import Entries
from pipetransformer.model.modules import unwrapped

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


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Return the keyword by which a forward keeps no keys and values for more tokens, if any."""
    return {"use_cache": False} if "use_cache" in forward_parameters(model) else {}


def split_batch(
    model: nn.Module, batch: Entries, *, needs: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the inputs of a forward, and the labels that it takes, beside the model's weights.

    Args:
        needs: labels without which the forward does not run, so that they are inputs, too.
    """
    names, device = names_of(model), next((p.device for p in model.parameters()), None)
    batch = {name: entry.to(device) for name, entry in batch.items()}
    inputs = {name: batch[name] for name in (*names.inputs, *needs) if name in batch}
    takes = names.targets if names.targets != ("y",) else ()
    return inputs, {name: batch[name] for name in takes if name in batch}
