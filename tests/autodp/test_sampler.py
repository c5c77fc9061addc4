"""Prove that an epoch holds every index once, in an order that only seed and epoch decide."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from autodp.sampler import (
    EpochSampler,
    mix_seed,
    places_in_batches,
    shuffled,
    shuffled_in_place,
)
from pipetransformer.stage.batch_cut import BatchCut


def epoch_of(sampler: EpochSampler, epoch: int, sizes: list[int]) -> list[int]:
    """Draw an epoch in batches of the given sizes, over and over."""
    indices: list[int] = []
    while len(indices) < sampler.num_samples:
        for size in sizes:
            indices += sampler.global_batch(epoch, len(indices), size).tolist()
    return indices


@pytest.mark.parametrize("num_samples", [1, 2, 7, 64, 1797])
@pytest.mark.parametrize("sizes", [[1], [3], [64], [5000], [4, 9, 1, 2]])
def test_an_epoch_holds_every_index_once_in_one_order_whatever_the_batches(
    num_samples: int, sizes: list[int]
) -> None:
    sampler = EpochSampler(num_samples, shuffled(num_samples, seed=3))
    indices = epoch_of(sampler, 2, sizes)
    assert sorted(indices) == list(range(num_samples))
    assert indices == epoch_of(sampler, 2, [num_samples])


def test_a_batch_is_a_pure_function_of_seed_epoch_and_position() -> None:
    sampler = EpochSampler(100, shuffled(100, seed=7))
    wanted = [(epoch, position) for epoch in (0, 3, 1, 0) for position in (90, 0, 40)]
    before = torch.random.get_rng_state()
    drawn = [sampler.global_batch(epoch, position, 16) for epoch, position in wanted]
    torch.manual_seed(1234)
    for (epoch, position), batch in zip(wanted, drawn, strict=True):
        assert torch.equal(
            EpochSampler(100, shuffled(100, seed=7)).global_batch(epoch, position, 16), batch
        )
    torch.random.set_rng_state(before)


def test_drawing_a_batch_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    EpochSampler(100, shuffled(100, seed=7)).global_batch(0, 0, 16)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_changing_a_batch_in_place_does_not_change_the_epoch() -> None:
    sampler = EpochSampler(50, shuffled(50, seed=1))
    first = sampler.global_batch(0, 0, 10).tolist()
    sampler.global_batch(0, 0, 10).zero_()
    assert sampler.global_batch(0, 0, 10).tolist() == first


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = {
        tuple(epoch_of(EpochSampler(40, shuffled(40, seed=seed)), epoch, [40]))
        for seed, epoch in product(range(20), range(20))
    }
    assert len(orders) == 400


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "size"),
    [(64, 16, None), (26, 8, None), (5, 8, None), (45, 24, 3), (43, 24, 3), (64, 24, None)],
)
def test_samples_that_keep_their_places_stay_with_their_replicas(
    num_samples: int, batch_size: int, size: int | None
) -> None:
    places = places_in_batches(num_samples, batch_size, unit=size or 1)
    order = shuffled_in_place(places, seed=3)
    assert torch.equal(order(0), shuffled(num_samples, seed=3)(0))
    for replicas in (1, 2, 4, 8):
        cut, replica_of = BatchCut(replicas, 2, size), torch.full((2, num_samples), -1)
        for epoch in (0, 5):
            for batch in order(epoch).split(batch_size):
                parts = batch.split(list(cut.slices(len(batch))))
                for replica, ids in enumerate(parts):
                    replica_of[epoch // 5, ids] = replica
        assert (replica_of >= 0).all()
        assert torch.equal(replica_of[0], replica_of[1])
    assert num_samples <= batch_size or not torch.equal(order(5), order(6))


def test_equal_places_are_shuffled_to_every_batch_alike() -> None:
    order = shuffled_in_place(places_in_batches(30, 10), seed=1)
    # Where a sample of epoch 0's first batch is later: in each of three batches a third.
    first, batches = order(0)[:10], [0, 0, 0]
    for epoch in range(1, 301):
        for n, batch in enumerate(order(epoch).split(10)):
            batches[n] += int(torch.isin(first, batch).sum())
    # 3000 places of samples; a third is 1000, its standard deviation 26.
    assert all(abs(one - 1000) < 6 * 26 for one in batches)


def test_the_last_batch_of_an_epoch_is_short() -> None:
    batch = EpochSampler(10, shuffled(10, seed=1)).global_batch(0, 8, 4)
    assert batch.dtype == torch.int64
    assert len(batch) == 2


@pytest.mark.parametrize("num_samples", [0, -1])
def test_an_empty_data_set_is_refused(num_samples: int) -> None:
    with pytest.raises(ValueError, match="the dataset is empty"):
        EpochSampler(num_samples, shuffled(num_samples, seed=0))


def test_mixed_seeds_do_not_collide_on_a_grid_of_small_inputs() -> None:
    grid: list[tuple[int, ...]] = [(a, b) for a, b in product(range(300), range(300))]
    grid += [(a, b, c) for a, b, c in product(range(40), repeat=3)]
    grid += [(a, b, c, d) for a, b, c, d in product(range(16), repeat=4)]
    grid += [(a,) for a in range(-1000, 1000)]
    assert len({mix_seed(*numbers) for numbers in grid}) == len(grid)


def test_mixed_seeds_are_63_bits_and_use_all_of_them() -> None:
    seeds = [mix_seed(a, b) for a, b in product(range(64), repeat=2)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    for bit in range(63):
        ones = sum(seed >> bit & 1 for seed in seeds)
        # 4096 fair coins fall within six standard deviations (32 each) of the half.
        assert abs(ones - 2048) < 6 * 32


def test_one_changed_input_bit_changes_half_of_the_seed() -> None:
    changed = [
        (mix_seed(5, step) ^ mix_seed(5, step ^ 1 << bit)).bit_count()
        for step in range(64)
        for bit in range(20)
    ]
    assert min(changed) >= 10
    # 1280 means of 63 fair coins: the mean's standard deviation is 4 / sqrt(1280), about 0.11.
    assert abs(sum(changed) / len(changed) - 31.5) < 0.7


def test_the_order_of_the_numbers_matters() -> None:
    assert mix_seed(1, 2) != mix_seed(2, 1)
    assert mix_seed(1) != mix_seed(1, 0) != mix_seed(0, 1)
