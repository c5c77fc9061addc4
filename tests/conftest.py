"""Share pools of processes over the whole test session, and hide GPUs from it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.pool import Pool, suit_tests

# Tiny models pay a hundred times their cost to wake threads; and equality bit by bit holds for a
# fixed number of them.
torch.set_num_threads(1)
suit_tests()


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, which a Trainer takes where it finds some, from all tests but those of them."""
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of long tests, so that no worker waits for another's last file."""
    items.sort(key=lambda item: "invariants" not in item.path.parts)


def pytest_collection_finish() -> None:
    """Leave imported modules and collected tests out of all later searches for garbage.

    They are millions of objects that stay. To look at each again took a quarter of all time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without a test of GPUs aside where no other is asked for.

    A machine with a GPU need not have what those import.
    """
    is_asked_for = config.option.markexpr != "cuda" or collection_path.suffix != ".py"
    return None if is_asked_for or "mark.cuda" in collection_path.read_text() else True


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and `make test-cuda`")


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
