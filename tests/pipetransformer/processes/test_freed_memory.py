"""What a process frees stays with it while a run needs it, unless its environment says no."""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipetransformer import Callback, Trainer
from pipetransformer.processes import FreedMemory
from tests.helpers.models import tiny_trainer
from tests.helpers.pool import another_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")

SIZES = (40 << 20 << power for power in itertools.count())
"""Of tensors each of which is larger than all that were freed before it, in bytes."""
_MAPPED = 2
"""In the word before a block glibc says whether it has mapped it on its own."""


def is_kept() -> bool:
    """Return whether a large tensor lies on the heap, which keeps what is freed there."""
    tensor = torch.empty(next(SIZES), dtype=torch.uint8)
    return not ctypes.c_size_t.from_address(tensor.data_ptr() - 8).value & _MAPPED


def count_pages() -> list[bool]:
    """Say whether freed memory is kept, and is given back: the kernel maps no page, or many."""

    def pages_of_a_tensor() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(16 << 20)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    usual, memory = pages_of_a_tensor(), FreedMemory()
    memory.keep()
    pages_of_a_tensor()
    # One may find what was allocated meanwhile in its way.
    again = min(pages_of_a_tensor() for _ in range(4))
    memory.give_back()
    return [again < usual // 100, pages_of_a_tensor() > usual // 2]


def keep_twice() -> list[bool]:
    one, other = FreedMemory(), FreedMemory()
    told = [is_kept(), one.keep(), is_kept(), other.keep(), one.keep()]
    one.give_back()
    told.append(is_kept())
    other.give_back()
    return [*told, is_kept()]


def lose() -> list[bool]:
    memory = FreedMemory()
    told = [memory.keep(), is_kept()]
    del memory
    return [*told, is_kept()]


class Asking(Callback):
    """Ask at the end of each step."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def on_step_end(self, trainer: Trainer, result: object) -> None:
        self.told.append(is_kept())


def fit() -> list[bool]:
    """Ask behind a constructor, in a run, behind it, and behind one that ends early."""
    asking = Asking()
    trainer = tiny_trainer(callbacks=[asking], epochs=1)
    told = [is_kept()]
    trainer.fit()
    told += [*asking.told, is_kept()]
    with tiny_trainer(epochs=2) as another:
        told.append(is_kept())
        another.step()
        told.append(is_kept())
        trainer.close()
        told.append(is_kept())
    return [*told, is_kept()]


def refuse() -> list[bool]:
    """Ask behind a run that is refused as it begins."""
    with pytest.raises(ValueError, match="no parameter"):
        frozen = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).double()
        tiny_trainer(frozen.requires_grad_(False)).begin()
    return [is_kept()]


def tell(ask: Callable[[], list[bool]], told: Path) -> None:
    told.write_text(" ".join(map(str, ask())))


def told_by_a_process(
    patch: pytest.MonkeyPatch, folder: Path, ask: Callable[[], list[bool]], **variables: str
) -> list[bool]:
    """Ask a process whose environment has these variables of an allocator and no others."""
    for name in os.environ:
        if name.startswith(("MALLOC_", "GLIBC_")):
            patch.delenv(name)
    for name, value in variables.items():
        patch.setenv(name, value)
    process = another_process(tell, ask, folder / "told")
    process.start()
    process.join()
    return [word == "True" for word in (folder / "told").read_text().split()]


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (count_pages, [True, True]),
        (keep_twice, [False, True, True, True, True, True, False]),
        (lose, [True, True, False]),
        # A constructor had set it for the whole process, and nobody ever put it back.
        (fit, [False, True, False, False, True, True, False]),
        (refuse, [False]),
    ],
)
def test_a_large_tensor_takes_the_memory_of_the_one_before_until_nobody_keeps_it(
    ask: Callable[[], list[bool]],
    expected: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert told_by_a_process(monkeypatch, tmp_path, ask) == expected


def test_an_environment_that_sets_the_allocator_up_stays_in_force(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = told_by_a_process(monkeypatch, tmp_path, lose, MALLOC_MMAP_THRESHOLD_="1048576")
    assert told == [False, False, False]
