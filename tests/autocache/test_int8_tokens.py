"""Claims about rows of int8 with a scale a token: how near they are, and that all see the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autocache import ActivationStore, DeviceStore
from autocache.int8_tokens import pack, takes_tokens, unpack
from autocache.prefix_cache import PrefixCache
from autocache.row_content import HIDDEN, Positions, RowContent
from autocache.store import RowStore
from tests.helpers.cached import (
    CHUNK_SIZE,
    CPU,
    KEEP,
    NUM_LAYERS,
    NUM_SAMPLES,
    NUM_TOKENS,
    WIDTH,
    Prefix,
    Samples,
    assert_bitwise_equal,
    compute_uncached,
    random_batches,
)

ODD_WIDTH = 13
"""A row of it is no whole words."""


def hidden_states(width: int = ODD_WIDTH) -> Tensor:
    """Return (6, 5, width) hidden states whose tokens are of very unequal size."""
    torch.manual_seed(0)
    return torch.randn(6, 5, width) * torch.logspace(-6, 6, 30).view(6, 5, 1)


def test_each_value_is_within_half_a_step_of_its_own_token() -> None:
    hidden = hidden_states()
    steps = hidden.abs().amax(dim=-1, keepdim=True) / 127
    assert bool(((unpack(pack(hidden)) - hidden).abs() <= 0.5001 * steps).all())


def test_whole_steps_zeros_and_the_largest_values_are_kept_as_they_are() -> None:
    hidden = torch.tensor([[[127.0, -3.0, 0.0], [0.0, 0.0, 0.0], [-254.0, 2.0, 4.0]]])
    assert torch.equal(unpack(pack(hidden)), hidden)


def test_a_token_that_is_not_finite_stays_so_and_leaves_others_alone() -> None:
    hidden = hidden_states()
    expected = unpack(pack(hidden))
    for value in (torch.nan, torch.inf):
        spoilt = hidden.clone()
        spoilt[2, 1, 3] = value
        found = unpack(pack(spoilt))
        assert bool(found[2, 1].isnan().all())
        found[2, 1] = expected[2, 1]
        assert torch.equal(found, expected)


def test_a_row_takes_a_byte_a_value_and_eight_bytes_a_token() -> None:
    rows = pack(hidden_states())
    assert (rows.dtype, tuple(rows.shape)) == (torch.int8, (6, 5, ODD_WIDTH + 8))


@pytest.mark.parametrize(
    "hidden",
    [torch.zeros(4, 8), torch.zeros(4), torch.zeros(4, 8, 3, dtype=torch.int64)],
    ids=["a vector a sample", "a number a sample", "whole numbers"],
)
def test_what_has_no_tokens_is_refused_for_rows_and_is_not_rounded(hidden: Tensor) -> None:
    content = RowContent((), dtype=torch.int8, checked=False)
    assert not takes_tokens(hidden)
    assert content.encode(hidden) is hidden
    assert torch.equal(content.decode(hidden, hidden.dtype), hidden)
    with pytest.raises(ValueError, match="int8 has one scale for each token"):
        content.layout({}, hidden[:1])


def test_whole_numbers_of_int8_are_not_taken_for_rows() -> None:
    tokens = torch.arange(24, dtype=torch.int8).view(1, 2, 12)
    content = RowContent((), dtype=torch.int8, checked=False)
    assert torch.equal(content.decode(content.encode(tokens), tokens.dtype), tokens)


def rounded(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return entries whose hidden states are those of rows."""
    hidden = entries[HIDDEN]
    return {**entries, HIDDEN: unpack(pack(hidden)).to(hidden.dtype)}


def cache_of(
    prefix: Any, samples: Samples, content: RowContent, *, on_device: bool = False
) -> PrefixCache:
    one = {name: entry[:1] for name, entry in samples.entries.items()}
    dtype = content.computed_dtype or torch.float32
    layout = content.layout(one, torch.empty(1, NUM_TOKENS, WIDTH, dtype=dtype))
    num_rows = NUM_SAMPLES - 5
    store: ActivationStore = RowStore.in_memory(layout, num_rows)
    if on_device:
        store = DeviceStore(layout, num_rows, device=CPU)
    return PrefixCache(
        prefix.run_layers,
        chunk_size=CHUNK_SIZE,
        store=store,
        stamps=Prefix.stamps(prefix, NUM_LAYERS),
        device=CPU,
        content=content,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("on_device", [False, True])
def test_hits_and_misses_are_rounded_once_and_alike_bit_by_bit(
    dtype: torch.dtype, on_device: bool
) -> None:
    prefix, samples = Prefix(0, dtype), Samples(dtype)
    content = RowContent(KEEP, dtype=torch.int8, computed_dtype=dtype)
    cache = cache_of(prefix, samples, content, on_device=on_device)
    for step, ids in enumerate(random_batches(0, 24)):
        # Each depth is come to in turn, and gone back to: deeper rows are made from no row.
        depth = (2, 4, 3)[step * 3 // 24]
        found = cache.fetch(ids, samples.load, depth=depth)
        assert_bitwise_equal(found, rounded(compute_uncached(prefix, ids, depth, samples)))
    stats = cache.take_stats()
    assert stats.hits > 0 and stats.misses > 0 and stats.upgrades == 0
    cache.close()


class Padded(Prefix):
    """Take a mask whose zeros are padding."""

    def run_layers(self, batch: dict[str, Tensor], first: int, last: int) -> Tensor:
        return super().run_layers({**batch, "mask": ~batch["mask"]}, first, last)


def test_samples_of_unequal_lengths_hit_as_they_miss_and_padding_reads_as_zeros() -> None:
    prefix, samples = Padded(), Samples()
    samples.entries["mask"] = ~samples.entries["mask"]
    content = RowContent(
        KEEP,
        dtype=torch.int8,
        computed_dtype=torch.float32,
        padding_mask="mask",
        positions=Positions("mask", (HIDDEN, "pixels", "mask"), most=NUM_TOKENS),
    )
    cache = cache_of(prefix, samples, content)
    ids = torch.arange(6)
    missed = {name: t.clone() for name, t in cache.fetch(ids, samples.load, depth=2).items()}
    hit = cache.fetch(ids, samples.load, depth=2)
    assert cache.take_stats().hits == len(ids)
    own = missed["mask"][:, :6]  # The longest has six tokens.
    assert torch.equal(hit["mask"], own)
    assert torch.equal(hit[HIDDEN][own], missed[HIDDEN][:, :6][own])
    assert not bool(hit[HIDDEN][~own].any())
    cache.close()
