"""Join samples along their tokens, as collators do that pad nothing, and part them again.

    samples        as the feed takes them, (N, S)        a loop's batch, (1, T)
    a a | b b b    a a .     tokens 1 1 0                a a b b b
                   b b b            1 1 1                positions 0 1 0 1 2

Rows are stored by sample. Frozen blocks run on joined samples, as the loop runs them: where
`position_ids` begin anew, attention does, too. A packed sample, of several texts, is one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipetransformer.feed import spread

TOKENS = "sample_mask"
"""The entry, (N, S), that is 1 on a sample's tokens, and 0 behind them."""

POSITIONS = "position_ids"

DERIVED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that follow from positions: attention's and convolutions' kernels take them."""

_SIZES = (2, 4)
_NUM_COMPARED = 5


@final
class JoinedTexts:
    """Join entries of samples, (N, S, ...), to those of a batch, (1, T, ...)."""

    def opened(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return entries joined, without `TOKENS`; as they are where that is not among them."""
        if TOKENS not in entries:
            return dict(entries)
        lengths = entries[TOKENS].sum(1).tolist()
        return {
            name: torch.cat([row[:num] for row, num in zip(one, lengths, strict=True)])[None]
            for name, one in entries.items()
            if name != TOKENS
        }

    def parted(self, joined: Tensor, tokens: Tensor) -> Tensor:
        """Return (N, S, ...) of (1, T, ...); zeros behind samples' ends."""
        rows = joined.new_zeros((*tokens.shape, *joined.shape[2:]))
        # Not row by row: autograd lets nobody write into one of several views.
        rows[tokens.to(joined.device) > 0] = joined[0]
        return rows


def padded(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return entries of samples, (1, S) each, as (N, S), with `TOKENS`.

    Raises:
        ValueError: a sample's entries have unequal lengths.
    """
    if any(len({one.shape for one in sample.values()}) > 1 for sample in samples):
        raise ValueError(
            "the loader's collate_fn joins samples along their tokens, but gives one of them "
            f"alone {[tuple(one.shape) for one in samples[0].values()]}, and not as many of each"
        )
    lengths = [next(iter(sample.values()))[0] for sample in samples]
    entries = {
        name: pad_sequence([sample[name][0] for sample in samples], batch_first=True)
        for name in samples[0]
    }
    tokens = pad_sequence([torch.ones_like(one) for one in lengths], batch_first=True)
    return {**entries, TOKENS: tokens}


def joined_names(collate: Any, leaves_of: Any, dataset: Any) -> tuple[str, ...]:
    """Name the entries of a loader's batches that are its samples', joined along their tokens.

    Args:
        collate: makes a batch of samples.
        leaves_of: returns all that a batch has, by name.
    """
    chosen = spread(len(dataset), _NUM_COMPARED)
    groups = [[dataset[0]] * size for size in _SIZES]
    groups += [[dataset[one], dataset[two]] for one, two in zip(chosen, chosen[1:], strict=False)]
    names: list[str] | None = None
    for items in groups:
        try:
            batch, alone = leaves_of(collate(items)), [leaves_of(collate([one])) for one in items]
        except Exception:  # Any: a function may take even numbers of samples alone.
            return ()
        names = [
            name
            for name in (batch if names is None else names)
            if _is_joined(batch.get(name), [one.get(name) for one in alone])
        ]
    return tuple(names or ())


def _is_joined(batch: Any, alone: Sequence[Any]) -> bool:
    if not all(isinstance(one, Tensor) and one.shape[:1] == (1,) for one in (batch, *alone)):
        return False
    return batch.ndim == 2 and torch.equal(batch, torch.cat([*alone], dim=1))


def refuse_unlike(joined: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
    """Raise a ValueError where a loader's batch has something else than its samples, joined."""
    odd = [
        name for name, one in batch.items() if not torch.equal(one, joined[name].to(one.device))
    ]
    if odd:
        raise ValueError(
            f"the loader's collate_fn joined samples along their tokens first, but a later batch "
            f"has other {odd} than its samples alone: pad nothing (pad_to_multiple_of), and join "
            "samples in the order in which they are drawn"
        )
