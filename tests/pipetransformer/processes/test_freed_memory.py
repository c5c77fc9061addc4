"""What a process frees stays with it, unless its environment says otherwise."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest
import torch

from pipetransformer.processes import give_back_freed_memory, keep_freed_memory
from tests.helpers.pool import another_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")


def faults_of_a_tensor() -> int:
    """Count the pages of a tensor of 64 MB that the kernel has to map."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def tell(told: Path) -> None:
    """Write whether freed memory is said to be kept, is kept, and is given back."""
    usual = faults_of_a_tensor()
    kept = keep_freed_memory()
    faults_of_a_tensor()
    # One may find what was allocated meanwhile in its way.
    again = min(faults_of_a_tensor() for _ in range(4))
    give_back_freed_memory()
    told.write_text(f"{kept} {again < usual // 100} {faults_of_a_tensor() > usual // 2}")


def told_by_a_process(patch: pytest.MonkeyPatch, folder: Path, **variables: str) -> list[str]:
    """Ask a process whose environment has these variables of an allocator and no others."""
    for name in os.environ:
        if name.startswith(("MALLOC_", "GLIBC_")):
            patch.delenv(name)
    for name, value in variables.items():
        patch.setenv(name, value)
    process = another_process(tell, folder / "told")
    process.start()
    process.join()
    return (folder / "told").read_text().split()


def test_a_large_tensor_takes_the_memory_of_the_one_before_until_it_is_given_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert told_by_a_process(monkeypatch, tmp_path) == ["True", "True", "True"]


def test_an_environment_that_sets_the_allocator_up_stays_in_force(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept, keeps, _ = told_by_a_process(monkeypatch, tmp_path, MALLOC_MMAP_THRESHOLD_="1048576")
    assert (kept, keeps) == ("False", "False")
