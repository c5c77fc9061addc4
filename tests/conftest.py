"""Share pools of processes over the whole test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool, suit_tests

# Tiny models pay a hundred times their cost to wake threads; and equality bit by bit holds for a
# fixed number of them.
torch.set_num_threads(1)
suit_tests()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Pool]:
    """Offer a world of two processes."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Pool]:
    """Offer a world of four processes."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[Pool]:
    """Offer a world of eight processes."""
    pool = Pool(8)
    yield pool
    pool.close()
