"""Find out what the parts of a model's forward depend on, by running them with other values.

an image    below the blocks only? then it need not travel with its hidden state
padding     hidden states of it: does the answer change with them? if not, no row holds them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipetransformer.model.forward.own_forward import CutForward, Entries, output_of

PADDING_MASK = "attention_mask"
"""The entry, (N, S), that is 1 on tokens and 0 on padding."""

_ROUNDING = 1e-5


Read: TypeAlias = Callable[[Any], Tensor]
"""Takes the outputs out of a model's answer."""


def run_through(own: CutForward, given: Entries, read: Read) -> Tensor:
    """Return the answer of all parts, one after the other, in eval mode."""
    own.forget()
    hidden = own.below(given, training=False)
    for index in range(len(own.row.blocks)):
        hidden = own.block(index, hidden, given, training=False)
    return read(own.above(hidden, given, training=False))


def joined_outputs(answer: Any, kept: Tensor | None = None) -> Tensor:
    """Return all floating tensors of an answer as one, (N,) float64, whatever they are.

    Args:
        kept: (B, S) bool, tokens that count; None counts all.
    """
    leaves = tree_leaves(dict(vars(answer)) if hasattr(answer, "__dict__") else answer)
    found = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
    if kept is not None:
        found = [t[kept] if t.shape[:2] == kept.shape else t for t in found]
    return torch.cat([t.detach().double().flatten() for t in found])


def read_for_shape(own: CutForward, given: Entries, read: Read) -> dict[str, Tensor]:
    """Return the floating inputs whose shape is all that blocks and head use."""
    return {
        name: entry
        for name, entry in given.items()
        if entry.is_floating_point() and entry.ndim > 2 and _is_blind(own, given, name, read)
    }


def _is_blind(own: CutForward, given: Entries, name: str, read: Read) -> bool:
    """Return whether what blocks are given, and the answer above them, do without an entry."""
    zero = torch.zeros((), dtype=given[name].dtype, device=given[name].device)
    zeros = {**given, name: zero.expand(given[name].shape)}
    with torch.no_grad():
        hidden = own.below(given, training=False)
        seen = [_seen(own, hidden, one, read) for one in (given, zeros)]
    return all(are_equal(*pair) for pair in zip(*seen, strict=True))


def _seen(own: CutForward, hidden: Tensor, entries: Entries, read: Read) -> list[Any]:
    """Return all that blocks and head make of a batch's entries, as leaves."""
    own.forget()
    seen = []
    for index in range(len(own.row.blocks)):
        seen += tree_leaves(own.arguments(index, hidden, entries, training=False))
        hidden = own.block(index, hidden, entries, training=False)
    return [*seen, read(own.above(hidden, entries, training=False))]


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two leaves of answers are equal tensors, or of one type."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other)


def half_padded(mask: Tensor | None) -> Tensor | None:
    """Return a mask of texts whose first one's second half is padding; None without texts."""
    if mask is None or mask.ndim != 2 or mask.shape[1] < 2:
        return None
    half = mask.clone()
    half[0, mask.shape[1] // 2 :] = 0
    return half


def padding_mask(own: CutForward, given: Entries, config: Any) -> str | None:
    """Return the mask's name if no token's answer depends on hidden states behind a text's end.

    The second half of a sample is made padding, and its hidden states zeros before each block.
    """
    mask, ids = given.get(PADDING_MASK), given.get("input_ids")
    # A plan needs shapes alone, and values that would show it are not there.
    if mask is None or ids is None or mask.shape != ids.shape or ids.is_meta:
        return None
    if (half := half_padded(torch.ones_like(mask))) is None:
        return None
    kept, pad_id = half.bool(), getattr(config, "pad_token_id", None)
    padded = {
        **given,
        PADDING_MASK: half,
        "input_ids": ids if pad_id is None else ids.where(kept, pad_id),
    }
    try:
        with torch.no_grad():
            hidden = own.below(padded, training=False)
            if hidden.shape[:2] != ids.shape:
                return None
            full, emptied = (_answer(own, hidden, padded, kept, empties=e) for e in (False, True))
    except Exception:  # Any: it does not take such a text. BART, for one, counts its ends.
        return None
    close = (full - emptied).abs().max() <= _ROUNDING * full.abs().max()
    return PADDING_MASK if bool(close) else None


def _answer(
    own: CutForward, hidden: Tensor, entries: Entries, kept: Tensor, *, empties: bool
) -> Tensor:
    """Return the answer, of tokens alone where each has its own."""
    where = kept.view(*kept.shape, *[1] * (hidden.ndim - 2))
    own.forget()
    for index in range(len(own.row.blocks)):
        if empties:
            hidden = hidden.where(where, 0)
        hidden = own.block(index, hidden, entries, training=False)
    if empties:
        hidden = hidden.where(where, 0)
    whole = own.above(hidden, entries, training=False)
    try:
        answer = output_of(whole).float()
    except TypeError:  # It is not known what they are.
        return joined_outputs(whole, kept)
    return answer[kept] if answer.shape[:2] == kept.shape else answer
