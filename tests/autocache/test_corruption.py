"""Prove that no damage to a store's file is ever taken for a row."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from autocache.layout import RowField, RowLayout
from autocache.store import RowStore
from tests.helpers.marks import slow

NUM_ROWS, STAMP, OTHER_STAMP = 9, 3, 7
FIXED = RowLayout((RowField("hidden", (6, 5), torch.float32), RowField("y", (), torch.int64)))
VARYING = RowLayout(
    (RowField("hidden", (8, 4), torch.float16, varies=True), RowField("mask", (8,), torch.bool))
)
Damage = Callable[[np.random.Generator, np.ndarray], None]


def flip_a_bit(rng: np.random.Generator, file: np.ndarray) -> None:
    file[rng.integers(len(file))] ^= np.uint8(1 << rng.integers(8))


def overwrite(rng: np.random.Generator, file: np.ndarray) -> None:
    start, num = rng.integers(len(file)), rng.integers(1, 200)
    file[start : start + num] = rng.integers(256, size=len(file[start : start + num]))


def clear(rng: np.random.Generator, file: np.ndarray) -> None:
    start = rng.integers(len(file))
    file[start : start + rng.integers(1, 2000)] = rng.choice([0, 255])


def swap_words(rng: np.random.Generator, file: np.ndarray) -> None:
    words = file.view(np.uint64)
    one, other = rng.integers(len(words), size=2)
    words[[one, other]] = words[[other, one]]


def copy_elsewhere(rng: np.random.Generator, file: np.ndarray) -> None:
    num = int(rng.choice([8, 24, 64, 128, 192, 1000]))
    step = int(rng.choice([1, 8, 64]))
    source, target = rng.integers((len(file) - num) // step, size=2) * step
    file[target : target + num] = file[source : source + num].copy()


DAMAGES: tuple[Damage, ...] = (flip_a_bit, overwrite, clear, swap_words, copy_elsewhere)


@pytest.mark.parametrize("num_damages", [500, slow(5_000)])
@pytest.mark.parametrize("layout", [FIXED, VARYING], ids=["fixed", "varying"])
def test_of_random_corruptions_each_is_detected_or_harmless(
    layout: RowLayout, num_damages: int, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(NUM_ROWS)
    rows = {
        field.name: (torch.randn(NUM_ROWS, *field.shape, generator=generator) * 9).to(field.dtype)
        for field in layout.fields
    }
    lengths = ids.clamp(max=8) if layout is VARYING else None
    if lengths is not None:
        rows["hidden"].masked_fill_((torch.arange(8) >= lengths[:, None])[..., None], 0.0)
    rng, num_missed = np.random.default_rng(0), 0
    with RowStore.create(tmp_path / "rows", layout, NUM_ROWS) as store:
        store.write(ids, STAMP, rows, lengths)
        store.write(ids[:2], OTHER_STAMP, {k: v[:2] for k, v in rows.items()}, lengths)
        with open(store.path, "rb+") as opened:
            file = np.frombuffer(mmap.mmap(opened.fileno(), store.num_bytes), np.uint8)
        pristine = file.copy()
        for n in range(num_damages):
            for _ in range(rng.integers(1, 3)):
                DAMAGES[n % len(DAMAGES)](rng, file)
            read = store.read(ids, [STAMP])
            given = read.depth > 0
            assert not given[:2].any() and not (read.depth > 1).any()
            for name, expected in rows.items():
                assert torch.equal(
                    read.rows[name][given].view(torch.uint8), expected[given].view(torch.uint8)
                ), (n, name)
            num_missed += int((~given[2:]).any())
            file[:] = pristine
        assert store.read(ids, [STAMP]).depth.tolist() == [0, 0] + [1] * (NUM_ROWS - 2)
        del file
    assert num_missed > num_damages // 5
