"""Prove that sums in shared memory and by messages are right, and nobody goes on too early."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autodp.rank_sums import MessageSums, SharedSums, Sums, reserved_bytes, share_memory, sums_of
from tests.helpers.gradients import WORLD, world
from tests.helpers.pool import Pool

SIZES = ((1000, torch.float32), (1, torch.float64), (3, torch.bfloat16), (0, torch.float32))
NUM_BYTES = sum(reserved_bytes(size, dtype) for size, dtype in SIZES)
CPU = torch.device("cpu")


def shared(group: dist.ProcessGroup) -> Sums:
    sums = sums_of(group, CPU, NUM_BYTES)
    assert isinstance(sums, SharedSums)
    return sums


def by_messages(group: dist.ProcessGroup) -> Sums:
    return MessageSums(group, CPU)


def values(step: int, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-9, 10, (size,), generator=generator).to(dtype)


def wrong_sums(make: Callable[[dist.ProcessGroup], Sums], steps: int) -> list[str]:
    """Sum vectors in many steps, at a pace drawn for each rank, and spoil the sums at once."""
    rank, size, pace = dist.get_rank(), dist.get_world_size(), random.Random(dist.get_rank())
    sums = make(world())
    vectors = [sums.empty(*shape) for shape in SIZES]
    wrong = []
    for step in range(steps):
        for vector in vectors:
            time.sleep(pace.random() * 2e-4)
            vector.copy_(values(step, rank, len(vector), vector.dtype))
            sums.begin(vector)
        time.sleep(pace.random() * 2e-4)
        sums.complete()
        for number, vector in enumerate(vectors):
            one = [values(step, other, len(vector), vector.dtype) for other in range(size)]
            if not torch.equal(vector, sum(one[1:], one[0])):
                wrong.append(f"step {step}, vector {number}")
            vector.fill_(1e6)
    return wrong


@pytest.mark.parametrize("make", [shared, by_messages])
def test_vectors_become_their_sums_whatever_the_ranks_pace(
    four_ranks: Pool, make: Callable[[dist.ProcessGroup], Sums]
) -> None:
    assert four_ranks.run(wrong_sums, make, 60) == [[]] * WORLD


def random_sum() -> list[float]:
    sums = shared(world())
    vector = sums.empty(1000, torch.float32)
    vector.copy_(torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank())))
    sums.begin(vector)
    sums.complete()
    return [float(one) for one in vector]


def test_sums_of_any_numbers_have_the_same_bits_on_all_ranks_and_again(four_ranks: Pool) -> None:
    first, *others = four_ranks.run(random_sum)
    assert others == [first] * (WORLD - 1)
    assert four_ranks.run(random_sum)[0] == first


def shared_by_all_but(rank: int) -> bool:
    """Return whether memory is shared where a rank cannot make any."""

    def create(*arguments: object, made: Callable[..., int] = os.memfd_create) -> int:
        if dist.get_rank() == rank:
            raise OSError("none here")
        return made(*arguments)

    with mock.patch("os.memfd_create", create):
        return share_memory(world(), 64) is not None


def test_where_one_rank_has_no_memory_to_share_all_send_messages(two_ranks: Pool) -> None:
    assert two_ranks.run(shared_by_all_but, 1) == [False, False]
    assert two_ranks.run(shared_by_all_but, 7) == [True, True]


def shared_with_a_stranger() -> bool:
    """Return whether memory is shared where a rank's path leads to other memory than it offers."""

    def spoilt(descriptor: int, data: bytes, offset: int) -> int:
        return len(data)

    with mock.patch("os.pwrite", spoilt if dist.get_rank() == 0 else os.pwrite):
        return share_memory(world(), 64) is not None


def test_memory_that_is_not_what_was_offered_is_not_used(two_ranks: Pool) -> None:
    assert two_ranks.run(shared_with_a_stranger) == [False, False]


def descriptors_left() -> int:
    """Return how many more descriptors are open after memory was shared and let go of."""
    before = len(os.listdir("/proc/self/fd"))
    pieces = share_memory(world(), 4096)
    assert pieces is not None and [len(one) for one in pieces] == [4096] * 2
    del pieces
    return len(os.listdir("/proc/self/fd")) - before


def test_shared_memory_leaves_no_descriptor(two_ranks: Pool) -> None:
    assert two_ranks.run(descriptors_left) == [0, 0]
