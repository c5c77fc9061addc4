"""Build prefixes, stores and rows, and say what fetches of them must give."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autocache import ActivationStore
from autocache.layout import RowField, RowLayout
from autocache.prefix_cache import PrefixCache
from autocache.prefix_chunks import SampleRows
from autocache.row_content import RowContent
from autocache.stamp import chain_hash

NUM_SAMPLES, NUM_TOKENS, WIDTH, NUM_LAYERS, CHUNK_SIZE = 24, 9, 16, 4, 4


KEEP = ("mask", "y")


CONTENT = RowContent(KEEP, checked=False)


CPU = torch.device("cpu")


class Prefix(nn.Module):
    """A frozen prefix of transformer blocks that counts the calls it gets."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(NUM_LAYERS)
        )
        self.to(dtype).eval()
        self.calls: list[tuple[int, int]] = []

    def run_layers(self, batch: dict[str, Tensor], first: int, last: int) -> Tensor:
        assert not torch.is_grad_enabled()
        assert {len(entry) for entry in batch.values()} == {CHUNK_SIZE}
        assert ("pixels" in batch, "hidden" in batch) == (first == 0, first > 0)
        self.calls.append((first, last))
        hidden = self.embed(batch["pixels"]) if first == 0 else batch["hidden"]
        for block in self.blocks[first:last]:
            hidden = block(hidden, src_key_padding_mask=batch["mask"])
        return hidden

    def stamps(self, depth: int) -> list[int]:
        stamps: list[int] = []
        for block in self.blocks[:depth]:
            below = stamps[-1] if stamps else 0
            stamps.append(chain_hash(below, block.state_dict().items(), mode="eval"))
        return stamps


class Samples:
    """A dataset held in memory that remembers what was asked of it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)
        pixels = torch.randn(NUM_SAMPLES, NUM_TOKENS, 3, generator=generator).to(dtype)
        lengths = torch.arange(NUM_SAMPLES) % NUM_TOKENS + 1
        self.entries = {
            "pixels": pixels,
            "mask": torch.arange(NUM_TOKENS) >= lengths[:, None],
            "y": torch.arange(NUM_SAMPLES) * 3,
        }
        self.asked: list[int] = []

    def load(self, ids: Tensor) -> dict[str, Tensor]:
        self.asked += ids.tolist()
        return {name: entry[ids] for name, entry in self.entries.items()}


def make_cache(
    prefix: Prefix, stamps: list[int], store: ActivationStore | None, device: torch.device = CPU
) -> PrefixCache:
    return PrefixCache(
        prefix.run_layers,
        chunk_size=CHUNK_SIZE,
        store=store,
        stamps=stamps,
        device=device,
        content=CONTENT,
    )


def compute_uncached(
    prefix: Prefix, ids: Tensor, depth: int, samples: Samples
) -> dict[str, Tensor]:
    return make_cache(prefix, prefix.stamps(depth), None).fetch(ids, samples.load, depth=depth)


def assert_bitwise_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() == {"hidden", *KEEP}
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def random_batches(seed: int, num_batches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 12, (num_batches,), generator=generator).tolist()
    return [torch.randperm(NUM_SAMPLES, generator=generator)[:size] for size in sizes]


def pair(ids: list[int] | Tensor) -> SampleRows:
    tensor = torch.as_tensor(ids, dtype=torch.int64)
    return tensor, tensor


NUM_ROWS = 12


# Lengths that are no multiple of the 8-byte words the check sums, and a scalar.
LAYOUT = RowLayout(
    (
        RowField("hidden", (3, 5), torch.float32),
        RowField("mask", (3,), torch.bool),
        RowField("y", (), torch.int64),
    )
)


def make_rows(ids: Tensor, layout: RowLayout = LAYOUT) -> dict[str, Tensor]:
    """Return rows that are a function of the ids, so that a misplaced row shows."""
    rows = {}
    for field in layout.fields:
        seeds = torch.arange(int(torch.tensor(field.shape).prod()))
        values = (ids[:, None] * 37 + seeds * 11) % 97
        rows[field.name] = values.to(field.dtype).reshape(len(ids), *field.shape)
    return rows


def assert_rows_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, row in wanted.items():
        assert found[name].dtype == row.dtype, name
        assert torch.equal(found[name], row), name
