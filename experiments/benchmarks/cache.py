"""Measure the activation cache against the machine's memory, and against what it spares.

    read_vs_memcpy        a memory copy and a pass of the same check, over reading a batch of rows
    write_vs_memcpy       likewise, over writing one
    hit_step_overhead     a training step that reads its activations, over one that is given them
    upgrade_vs_recompute  all frozen layers, over reading a row and running only the newly frozen
    digest_vs_memcpy      a copy of a batch of images, over digesting them
    digest_vs_blake2b     blake2b of them, over digesting them
    fill_share            what storing new images' rows adds, over 6 blocks of ViT-S for them

Rows are ViT-B's (197 x 768 float32) in batches of 64, in memory that was touched before. Images
are 64 of 3 x 224 x 224 float32; their rows are ViT-S's (197 x 384), in memory that was not.
Results are verified before their speed. Run it as `python -m experiments.benchmarks.cache`; the
last line printed is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from autocache import (
    DIGEST,
    HIDDEN,
    PrefixCache,
    RowContent,
    RowField,
    RowLayout,
    RowStore,
    chain_hash,
)
from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.rounds import (
    Ratio,
    bootstrap,
    num_cores,
    paired_ratio,
    seconds_of,
)

TOKENS, WIDTH, BATCH, NUM_ROWS = 197, 768, 64, 512
IMAGE, SMALL_WIDTH = (3, 224, 224), 384
NUM_FROZEN, NUM_NEW = 6, 2
BARS = Bars(
    least={"read_vs_memcpy": 0.8, "write_vs_memcpy": 0.8},
    most={"hit_step_overhead": 1.05, "fill_share": 0.1},
)


def compare_with_memcpy(num_pairs: int) -> dict[str, Ratio]:
    """Time reading and writing batches of rows, each beside a copy and a check of as many."""
    layout = RowLayout((RowField(HIDDEN, (TOKENS, WIDTH), torch.float32),))
    rows = torch.randn(NUM_ROWS, TOKENS, WIDTH)
    target, words = torch.empty_like(rows[:BATCH]), TOKENS * WIDTH // 2
    factors = np.arange(1, 2 * words, 2)
    batches = _batches()
    with RowStore.in_memory(layout, NUM_ROWS) as store:
        for ids in torch.arange(NUM_ROWS).split(BATCH):
            store.write(ids, 1, {HIDDEN: rows[ids]})
        into = store.buffers(BATCH)
        read = store.read(ids := next(batches), [1], into=into)
        assert read.depth.all() and torch.equal(read.rows[HIDDEN], rows[ids])

        def copy() -> None:
            start = int(next(batches)[0]) % (NUM_ROWS - BATCH)
            target.copy_(rows[start : start + BATCH])
            np.matmul(target.view(torch.int64).view(BATCH, words).numpy(), factors)

        def write() -> None:
            start = int((ids := next(batches))[0]) % (NUM_ROWS - BATCH)
            store.write(ids, 1, {HIDDEN: rows[start : start + BATCH]})

        return {
            "read_vs_memcpy": _over(
                lambda: store.read(next(batches), [1], into=into), copy, num_pairs
            ),
            "write_vs_memcpy": _over(write, copy, num_pairs),
        }


def compare_digests(num_pairs: int) -> dict[str, Ratio]:
    """Time digests of a batch of images, beside a copy of it and blake2b."""
    images = torch.randn(BATCH, *IMAGE)
    target, content = torch.empty_like(images), RowContent(())

    def digest() -> None:
        content.digests({"x": images})

    def blake() -> None:
        for row in images.view(BATCH, -1).numpy():
            hashlib.blake2b(row.data, digest_size=8).digest()

    return {
        "digest_vs_memcpy": _over(digest, lambda: target.copy_(images), num_pairs),
        "digest_vs_blake2b": _over(digest, blake, num_pairs),
    }


def compare_fill(num_pairs: int) -> dict[str, Ratio]:
    """Time what a store adds to a fetch of new images, in shares of the frozen layers' time."""
    hidden, ids = torch.randn(BATCH, TOKENS, SMALL_WIDTH), torch.arange(BATCH)
    layers = nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                SMALL_WIDTH, 6, 4 * SMALL_WIDTH, batch_first=True, norm_first=True
            )
            for _ in range(NUM_FROZEN)
        )
    ).eval()
    batch, content = {"x": torch.randn(BATCH, *IMAGE)}, RowContent(())
    layout = content.layout({"x": batch["x"][:1]}, hidden[:1])

    def fetch(store: RowStore | None) -> float:
        cache = PrefixCache(
            lambda chunk, first, last: hidden[: len(chunk["x"])],
            chunk_size=32,
            store=store,
            stamps=[1],
            device=torch.device("cpu"),
            content=content,
        )
        return seconds_of(lambda: cache.fetch(ids, lambda _: batch, depth=1))

    def run() -> None:
        with torch.no_grad():
            for part in hidden.split(32):
                layers(part)

    added = []
    for _ in range(num_pairs):
        # A new one each time, whose memory nobody has touched.
        with RowStore.in_memory(layout, BATCH) as store:
            added.append(fetch(store) - fetch(None))
            assert store.find(ids, [1]).all()
    frozen_s = statistics.median(seconds_of(run) for _ in range(3))
    return {"fill_share": bootstrap(np.array(added) / frozen_s)}


class _HalfFrozen:
    """Hold a small Transformer whose lower half is frozen, and its samples."""

    def __init__(self, *, tokens: int = 64, width: int = 256) -> None:
        torch.manual_seed(0)
        layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
            for _ in range(2 * NUM_FROZEN)
        )
        self._frozen, self._active = layers[:NUM_FROZEN].eval(), layers[NUM_FROZEN:]
        self.samples = torch.randn(NUM_ROWS, tokens, width)
        self.stamps = [0]
        for layer in self._frozen:
            self.stamps.append(chain_hash(self.stamps[-1], layer.named_parameters(), mode="eval"))
        del self.stamps[0]

    def load(self, ids: Tensor) -> dict[str, Tensor]:
        return {"x": self.samples[ids]}

    def run_layers(self, batch: dict[str, Tensor], first: int, last: int) -> Tensor:
        hidden = batch[HIDDEN] if first else batch["x"]
        for layer in self._frozen[first:last]:
            hidden = layer(hidden)
        return hidden

    def run_new(self, hidden: Tensor) -> None:
        """Run the newly frozen layers."""
        with torch.no_grad():
            for part in hidden.split(32):
                self.run_layers({HIDDEN: part}, NUM_FROZEN - NUM_NEW, NUM_FROZEN)

    def step(self, hidden: Tensor) -> None:
        """Train the active half on its input."""
        for layer in self._active:
            hidden = layer(hidden)
        hidden.square().mean().backward()
        for parameter in self._active.parameters():
            parameter.grad = None


def compare_steps(num_pairs: int) -> dict[str, Ratio]:
    """Time steps over the active half of a small Transformer, and fetches of the frozen half.

    As in training, some rows are held against the samples that they were made from.
    """
    half, content, batches = _HalfFrozen(), RowContent(()), _batches()
    layout = content.layout(half.load(torch.tensor([0])), half.samples[:1])
    digests = content.digests(half.load(torch.arange(NUM_ROWS)))
    with RowStore.in_memory(layout, NUM_ROWS) as store:
        cached, computed = (
            PrefixCache(
                half.run_layers,
                chunk_size=32,
                store=one,
                stamps=half.stamps,
                device=torch.device("cpu"),
                content=content,
            )
            for one in (store, None)
        )
        fetch, compute = (
            partial(cache.fetch, load=half.load, depth=NUM_FROZEN) for cache in (cached, computed)
        )
        for ids in torch.arange(NUM_ROWS).split(BATCH):
            fetch(ids)
        given = compute(ids := next(batches))[HIDDEN]
        assert torch.equal(fetch(ids)[HIDDEN], given)

        def upgrade() -> None:
            hidden = fetch(ids := next(batches))[HIDDEN]  # Of as many bytes as a shallower row.
            half.run_new(hidden)
            rows = {HIDDEN: hidden, DIGEST: digests[ids]}
            store.write(ids, half.stamps[NUM_FROZEN - 1], rows)

        hits, _ = paired_ratio(
            lambda: half.step(fetch(next(batches))[HIDDEN]),
            lambda: half.step(given),
            num_pairs=num_pairs,
        )
        spared = _over(upgrade, lambda: compute(next(batches)), num_pairs)
        return {"hit_step_overhead": hits, "upgrade_vs_recompute": spared}


def _batches() -> Iterator[Tensor]:
    """Yield the samples of one step after the other, in random order."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randperm(NUM_ROWS, generator=generator)[:BATCH]


def _over(ours: Callable[[], object], theirs: Callable[[], object], num_pairs: int) -> Ratio:
    """Return their time over ours."""
    ratio, _ = paired_ratio(theirs, ours, num_pairs=num_pairs)
    return ratio


def main() -> int:
    """Measure; fail where a figure misses what it must be."""
    parser = argparse.ArgumentParser(description="Measure the activation cache.")
    parser.add_argument("--pairs", type=int, default=48, help="interleaved pairs of each ratio")
    num_pairs = parser.parse_args().pairs
    torch.set_num_threads(num_cores())
    few = max(8, num_pairs // 3)
    found = {
        **compare_with_memcpy(num_pairs),
        **compare_steps(few),
        **compare_digests(few),
        **compare_fill(few),
    }
    for name, ratio in found.items():
        print(f"{name:22} {ratio.median:6.3f}   95 % interval {ratio.low:.3f} to {ratio.high:.3f}")
    medians = {name: ratio.median for name, ratio in found.items()}
    intervals = {name: [ratio.low, ratio.high] for name, ratio in found.items()}
    return conclude({**medians, "intervals": intervals, "pairs": num_pairs}, BARS)


if __name__ == "__main__":
    sys.exit(main())
