"""Say which modules are parts, where bottom blocks freeze beside those that a user names.

    frozen blocks    parts, whose answers are rows
    0                encoder
    2                encoder, decoder.block.1

So it goes without other parts, too, where blocks hand on several tensors. A block's row is what it
returned, whatever that is. All that lies below it is frozen with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from autopipe.profile import graph_leaves
from freeze import apply
from freeze.in_place import (
    freeze_modules,
    freeze_parameters,
    frozen_in_place,
    thawed_by,
    tied_above,
)
from pipetransformer.model import Reads, block_lists

UNTIED_LATE = (
    "tied_weights='untie' gives the head a copy of the embedding, but the loop's optimizer was "
    "built before, and would never train it. Untie the model before you build the optimizer: "
    "head = model.get_output_embeddings(); "
    "head.weight = torch.nn.Parameter(head.weight.detach().clone()); "
    "model.config.tie_word_embeddings = False. Then leave tied_weights= out"
)


@final
class FrozenParts:
    """Freeze a model's parts, and bottom blocks beside them.

    Args:
        named: the user's parts, by name.
        tied_weights: what becomes of a weight that frozen and training layers share; see
            `TrainConfig`.
    Attributes:
        weights: of the named parts.
    """

    def __init__(
        self, model: nn.Module, named: Mapping[str, nn.Module], *, tied_weights: str
    ) -> None:
        self._model, self._named, self._tied_weights = model, dict(named), tied_weights
        self._blocks = list[nn.Module]()
        self.weights = {p for part in named.values() for p in part.parameters()}

    @property
    def blocks(self) -> list[nn.Module]:
        """Return the lowest list of blocks outside of the parts, bottom first.

        Raises:
            ValueError: there is none, or the user has frozen it.
        """
        if not self._blocks:
            self._blocks = _lowest_blocks(self._model, self._named)
        return self._blocks

    def at(self, num_frozen: int) -> dict[str, nn.Module]:
        """Return the parts by name, where so many blocks are frozen."""
        if not num_frozen:
            return self._named
        if num_frozen > len(self.blocks):
            raise ValueError(
                f"freeze asks for {num_frozen} blocks, but the model has {len(self.blocks)}"
                f"{' outside of its parts' if self._named else ''}"
            )
        last = self.blocks[num_frozen - 1]
        name = next(name for name, module in self._model.named_modules() if module is last)
        if name in self._named:
            raise ValueError(f"block {name!r} is a part itself: leave it out of parts=")
        return {**self._named, name: last}

    def freeze(self, num_frozen: int, run: Callable[[], Any]) -> None:
        """Have the parts and so many blocks frozen, and the other blocks train.

        Args:
            run: calls the model's forward on a few samples.
        """
        if num_frozen or self._blocks:
            apply(self._model, num_frozen, layers=self.blocks)
        freeze_modules(self._model, self._named.values())
        if num_frozen:
            # Such as a norm below the blocks that is registered behind them.
            learned, above = _learned_by(self._model, self.blocks[num_frozen - 1], run)
            self._refuse_later(num_frozen, learned)
            tied = tied_above(self._model, num_frozen, layers=self.blocks) | learned & above
            if tied and self._tied_weights == "untie":
                raise ValueError(UNTIED_LATE)
            kept = set() if self._tied_weights == "freeze" else tied
            freeze_parameters(self._model, learned - kept)

    def _refuse_later(self, num_frozen: int, learned: set[nn.Parameter]) -> None:
        """Raise a ValueError where other blocks run below the last frozen one."""
        frozen = self.blocks[:num_frozen]
        own = {p for block in frozen for p in block.parameters()}
        for name, blocks in block_lists(self._model, without=self._named.values()):
            later = {p for block in blocks if block not in frozen for p in block.parameters()}
            if len({*map(type, blocks)}) == 1 and learned & later - own:
                raise ValueError(
                    f"blocks of {name!r} run below block {num_frozen - 1} of those that freeze, "
                    "but are registered behind it, and would all freeze with it: register them in "
                    "the order in which they run, or name the modules that are to freeze in parts="
                )

    def thawed_by(self, num_frozen: int) -> dict[str, nn.Parameter]:
        """Return by name the weights that `freeze` would thaw."""
        thawed = thawed_by(self._model, num_frozen, layers=self.blocks)
        return {name: p for name, p in thawed.items() if p not in self.weights}


def _lowest_blocks(model: nn.Module, parts: Mapping[str, nn.Module]) -> list[nn.Module]:
    lists = block_lists(model, without=parts.values())
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of blocks outside of its parts")
    name, blocks = lists[0]
    ours = {*frozen_in_place(model).values()}
    if not any(p.requires_grad or p in ours for block in blocks for p in block.parameters()):
        raise ValueError(
            f"{name!r}, the lowest list of blocks, is frozen already: name the module around it "
            "in parts=, and freeze= counts the blocks above"
        )
    return list(blocks)


def _learned_by(
    model: nn.Module, block: nn.Module, run: Callable[[], Any]
) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Return the parameters that what a block returns would hand a gradient to.

    Returns:
        them, and those that the model's forward reads behind the block.
    """
    answers, read, is_above = list[Any](), set[int](), False

    def note_end(module: nn.Module, _given: Any, answer: Any) -> None:
        nonlocal is_above
        if module is block:
            answers.append(answer)
        is_above = bool(answers) and module is not model

    with ExitStack() as stack:
        stack.callback(register_module_forward_hook(note_end).remove)
        stack.enter_context(Reads(lambda one: read.add(one) if is_above else None))
        stack.enter_context(torch.enable_grad())
        run()
    tensors = [leaf for leaf in tree_leaves(answers) if isinstance(leaf, Tensor)]
    found = {leaf for leaf in graph_leaves(tensors) if isinstance(leaf, nn.Parameter)}
    return found, {one for one in found if id(one) in read}
