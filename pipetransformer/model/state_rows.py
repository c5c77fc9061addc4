"""Present a row of blocks between which several tensors go, for loops alone.

    encoders    modules below, whose answers blocks take        layer 0
    blocks.0    hidden state, position bias, ...                layer 0
    blocks.1    ...                                             layer 1
    head                                                        layer n

A loop runs the model's own forward, so its sublayers only say what freezes with what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipetransformer.model.layered_model import Sublayer
from pipetransformer.model.own_forward import Entries
from pipetransformer.model.part_record import replaced, served
from pipetransformer.model.parts import is_unread
from pipetransformer.model.recording import Row, whole_in_mode


def state_sublayers(
    row: Row, sides: tuple[str, ...], hold: Callable[[frozenset[str]], nn.Module]
) -> list[Sublayer]:
    """Return sublayers that hold what freezes together.

    Args:
        hold: returns a module that has the tensors, outside of blocks, of these names.
    """
    sublayers = [Sublayer("embedding", 0, hold(row.below))]
    for index, block in enumerate(row.blocks):
        holder = nn.ModuleList([block, *([hold(row.learned)] if row.learned else [])])
        sublayers.append(Sublayer(f"blocks.{index}", index, holder, sides))
    return [*sublayers, Sublayer("head", len(row.blocks), hold(row.above), sides)]


def read_above(
    model: nn.Module, row: Row, entries: Entries, run: Callable[[Entries], Any]
) -> tuple[str, ...]:
    """Name the entries that are read where encoders and the first block need not run."""
    modules, answers = (*row.encoders.values(), row.blocks[0]), dict[int, Any]()
    forwards = [module.forward for module in modules]

    def noting(index: int) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            answers[index] = forwards[index](*args, **kwargs)
            return tree_map_only(Tensor, Tensor.clone, answers[index])

        return note

    def from_rows(given: Entries) -> list[Any]:
        torch.manual_seed(0)
        with served(modules, lambda i: tree_map_only(Tensor, Tensor.clone, answers[i])):
            return tree_leaves(run(given))

    with torch.no_grad(), whole_in_mode(model, training=False):
        with replaced(modules, [noting(index) for index in range(len(modules))]):
            run(entries)
        return tuple(n for n in entries if not is_unread(model, entries, n, from_rows))
