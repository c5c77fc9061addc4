"""Hold in a row what a model gathers of its blocks' routers, beside the hidden state.

    row    (S, D) hidden state | (S, E) logits of block 0's router | block 1's | ...

A mixture of experts adds a loss of all routers' logits. Those of frozen blocks are the same at
every step. transformers gathers logits by hooks on the routers: where blocks do not run, these
hooks are given what rows hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pipetransformer.model.forward.dependence import half_padded, joined_outputs
from pipetransformer.model.forward.recording import Row
from pipetransformer.model.modules import unwrapped, whole_in_mode

ROUTERS = "output_router_logits"
"""The setting, and the argument, by which a model gathers its routers' logits."""

_HOOK = "output_capturing_hook"


@dataclass
class Router:
    """Say how the router of a block answers.

    Args:
        block: its number.
        answer: the shape of what it returns; leaf number `place` of `num_leaves` are the logits.
        num_experts: of each token.
        is_flat: whether logits are (B * S, E), not (B, S, E).
    Attributes:
        dtype: of the logits, where rows were made.
    """

    block: int
    module: nn.Module
    answer: TreeSpec
    place: int
    num_leaves: int
    num_experts: int
    is_flat: bool
    dtype: torch.dtype = torch.float32

    def tell(self, logits: Tensor) -> None:
        """Have the model gather logits, (B, S, E), as if the router had run."""
        leaves: list[Any] = [None] * self.num_leaves
        leaves[self.place] = logits.flatten(0, 1) if self.is_flat else logits
        answer = tree_unflatten(leaves, self.answer)
        for hook in _gathering(self.module):
            hook(self.module, (), answer)


@final
@dataclass
class RouterRows:
    """Put the logits of frozen blocks' routers into rows, and hand them to the model again.

    Attributes:
        dtype: of the hidden state, where rows were made.
    """

    routers: tuple[Router, ...]
    dtype: torch.dtype = torch.float32

    def of(self, depth: int) -> list[Router]:
        """Return the routers of the blocks below a depth."""
        return [one for one in self.routers if one.block < depth]

    @contextmanager
    def gathered(self, depth: int) -> Iterator[list[Tensor]]:
        """Yield a list that will hold the logits of these routers, in the blocks' order."""
        found: list[Tensor] = []

        def note(router: Router, _module: nn.Module, _args: object, answer: Any) -> None:
            logits = tree_flatten(answer)[0][router.place]
            router.dtype = logits.dtype
            found.append(logits)

        with ExitStack() as stack:
            for one in self.of(depth):
                hook = torch.compiler.disable(partial(note, one))
                stack.callback(one.module.register_forward_hook(hook).remove)
            yield found

    def joined(self, hidden: Tensor, logits: Sequence[Tensor]) -> Tensor:
        """Return rows, (B, S, W), of the hidden state and of all logits below it."""
        self.dtype = hidden.dtype
        return torch.cat([hidden, *(one.reshape(*hidden.shape[:2], -1) for one in logits)], dim=-1)

    def hidden(self, rows: Tensor, depth: int) -> Tensor:
        """Return the hidden state, (B, S, D), of rows of this depth."""
        width = rows.shape[-1] - sum(one.num_experts for one in self.of(depth))
        return rows[..., :width].to(self.dtype).contiguous()

    def tell(self, rows: Tensor, block: int, depth: int) -> None:
        """Have the model gather what rows of this depth hold of one block's router."""
        end = rows.shape[-1]
        for one in reversed(self.of(depth)):
            if one.block == block:
                own = rows[..., end - one.num_experts : end]
                one.tell(own.to(one.dtype).contiguous())
            end -= one.num_experts


def gathers(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Return whether a model gathers its routers' logits, by its settings or what it is given."""
    return bool(given.get(ROUTERS) or getattr(_config(model), ROUTERS, False))


@contextmanager
def gathering_nothing(model: nn.Module) -> Iterator[None]:
    """Have a model gather no routers' logits within the block."""
    config = _config(model)
    had = getattr(config, ROUTERS, None)
    try:
        if had:
            setattr(config, ROUTERS, False)
        yield
    finally:
        if had:
            setattr(config, ROUTERS, had)


def router_rows(
    model: nn.Module, row: Row, run: Callable[..., Any], entries: Mapping[str, Tensor]
) -> RouterRows:
    """Find the routers whose logits a model gathers, by one forward of a few samples.

    Args:
        run: calls the forward with entries.
    Raises:
        ValueError: another module's logits are gathered, or their loss reads those of padding.
    """
    called: list[tuple[int, nn.Module, Any]] = []

    def note(block: int, module: nn.Module, _args: object, answer: Any) -> None:
        called.append((block, module, answer))

    with ExitStack() as stack, torch.no_grad(), whole_in_mode(model, training=False):
        for index, block in enumerate(row.blocks):
            for module in block.modules():
                hook = torch.compiler.disable(partial(note, index))
                stack.callback(module.register_forward_hook(hook).remove)
        gathered = getattr(run(**entries), "router_logits", None) or ()
        routers = [_router_of(one, called) for one in gathered]
    found = [one for one in routers if one is not None]
    answers = {module: answer for _, module, answer in called}
    hidden = row.calls[0].hidden_out(answers[row.blocks[0]])
    # One for each token of a text, (B, S).
    is_by_token = row.samples_at == 0 and hidden.ndim == 3
    is_by_token &= all(one.numel() == hidden[..., 0].numel() * one.shape[-1] for one in gathered)
    if not found or len(found) < len(gathered) or not is_by_token:
        raise ValueError(f"{_refusal(model)}. Which modules these come from is not known")
    rows = RouterRows(tuple(found))
    if _reads_padding(model, rows, run, entries):
        raise ValueError(f"{_refusal(model)}, also for padding, which rows do not hold")
    return rows


def _refusal(model: nn.Module) -> str:
    return (
        f"this {type(model).__name__} adds its routers' loss ({ROUTERS}), which reads logits of "
        f"blocks that do not run where rows are read. Set model.config.{ROUTERS} = False, which "
        "trains without that loss, or freeze without rows by freeze.apply, which keeps it"
    )


def _router_of(logits: Tensor, called: Sequence[tuple[int, nn.Module, Any]]) -> Router | None:
    """Return the router that has returned these logits."""
    for block, module, answer in called:
        leaves, spec = tree_flatten(answer)
        place = next((i for i, leaf in enumerate(leaves) if leaf is logits), None)
        if place is not None and [*_gathering(module)]:
            is_flat = logits.ndim == 2
            return Router(block, module, spec, place, len(leaves), logits.shape[-1], is_flat)
    return None


def _reads_padding(
    model: nn.Module, rows: RouterRows, run: Callable[..., Any], entries: Mapping[str, Tensor]
) -> bool:
    """Return whether a model's answer changes with the logits of padding."""
    name = "attention_mask"
    half = half_padded(entries.get(name))
    if half is None:
        return False
    kept = half.bool()

    def empty(router: Router, _module: nn.Module, _args: object, answer: Any) -> Any:
        leaves, spec = tree_flatten(answer)
        own = leaves[router.place].view(*kept.shape, -1)
        leaves[router.place] = own.where(kept[..., None], 0).view(leaves[router.place].shape)
        return tree_unflatten(leaves, spec)

    def answered() -> Tensor:
        answer = run(**{**entries, name: half})
        others = {key: one for key, one in answer.items() if key != "router_logits"}
        return joined_outputs(others, kept)

    with ExitStack() as stack, torch.no_grad(), whole_in_mode(model, training=False):
        whole = answered()
        for one in rows.routers:
            hook = one.module.register_forward_hook(partial(empty, one), prepend=True)
            stack.callback(hook.remove)
        return not torch.allclose(answered(), whole, rtol=1e-5, atol=1e-6)


def _gathering(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the hooks by which transformers gathers what a module returns."""
    for hook in module._forward_hooks.values():
        if getattr(hook, "__name__", "") == _HOOK:
            yield hook


def _config(model: nn.Module) -> Any:
    return getattr(unwrapped(model), "config", None)
