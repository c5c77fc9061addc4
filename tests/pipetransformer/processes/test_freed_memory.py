"""What a process frees stays with it, unless its environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from pipetransformer.processes import give_back_freed_memory, keep_freed_memory

def faults_of_a_tensor():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = faults_of_a_tensor()
kept = keep_freed_memory()
faults_of_a_tensor()
# One may find what was allocated meanwhile in its way.
again = min(faults_of_a_tensor() for _ in range(4))
give_back_freed_memory()
print(kept, again < usual // 100, faults_of_a_tensor() > usual // 2)
"""
"""Counts the pages of a tensor of 64 MB that the kernel has to map."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")


def told_by_a_process(**variables: str) -> list[str]:
    """Run it in a process whose environment has these variables of an allocator and no others."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    told = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env={**plain, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return told.stdout.split()


def test_a_large_tensor_takes_the_memory_of_the_one_before_until_it_is_given_back() -> None:
    assert told_by_a_process() == ["True", "True", "True"]


def test_an_environment_that_sets_the_allocator_up_stays_in_force() -> None:
    kept, keeps, _ = told_by_a_process(MALLOC_MMAP_THRESHOLD_="1048576")
    assert (kept, keeps) == ("False", "False")
