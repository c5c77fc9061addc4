"""Measure what a training step with GPipe takes of the memory, for the memory tables."""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from autopipe.balance import balance_by_size
from experiments.benchmarks.gpipe.runs import (
    Experiment,
    ModelFamily,
    Options,
    Row,
    WarmExperiment,
    count_parameters,
    described,
    each_runnable,
    print_header,
    print_rows,
)

MIB, GIB = 2**20, 2**30


def by_size(
    num: int, model: nn.Sequential, images: Tensor, chunks: int, device: torch.device
) -> list[int]:
    """Balance by the bytes of each layer; on the CPU, as no single device may hold the model."""
    return balance_by_size(num, model, images, chunks=chunks)


def activation_bytes(training: WarmExperiment) -> list[int]:
    """Return how much memory a step takes at its peak beyond what lies there between steps.

    Parameters, gradients and momentum lie there between steps, so what is left is activations and
    what kernels need. On CUDA it is what the allocator gave out, for each device; on the CPU it is
    the growth of the process's resident memory, for all partitions together.
    """
    if training.devices[0].type == "cpu":
        return_freed_memory_at_once()
        training.step()
        before = reset_peak_resident()
        training.step()
        return [resident_bytes("VmHWM") - before]
    training.step()
    devices = sorted(set(training.devices), key=str)
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    before_each = [torch.cuda.memory_allocated(device) for device in devices]
    training.step()
    peaks = [torch.cuda.max_memory_allocated(device) for device in devices]
    return [peak - before for peak, before in zip(peaks, before_each, strict=True)]


def return_freed_memory_at_once() -> None:
    """Make the C library map each block from 64 KiB on its own, so that freeing it returns it.

    Raises:
        RuntimeError: the system is not Linux with glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        raise RuntimeError(
            "memory on the CPU is measurable on Linux with glibc; use --devices cuda"
        )
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 2**16)


def reset_peak_resident() -> int:
    """Begin a new peak of resident memory and return where it begins."""
    # Freed memory that the heap keeps would hide as much growth.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def resident_bytes(field_name: str) -> int:
    """Read this process's resident memory: VmRSS now, VmHWM its peak."""
    found = re.search(rf"{field_name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def memory_row(
    workload: ModelFamily, experiment: Experiment, *, options: Options, momentum: float
) -> Row:
    """Measure one experiment's peak; the model's memory is computed, at the published size too."""
    training = WarmExperiment(workload, experiment, options, balance=by_size, momentum=momentum)
    peaks = activation_bytes(training)
    model_bytes = _bytes_each(momentum) * training.num_parameters
    published = _bytes_each(momentum) * count_parameters(workload.on_meta(experiment.size))
    return {
        "model MiB": model_bytes / MIB,
        "activations MiB": sum(peaks) / MIB,
        "total MiB": (model_bytes + sum(peaks)) / MIB,
        "activations MiB, largest device": max(peaks) / MIB if options.device == "cuda" else None,
        "published model GiB": published / GIB,
    }


def _bytes_each(momentum: float) -> int:
    """Return what a parameter takes: itself, its gradient and its momentum."""
    return 12 if momentum else 8


def run_memory(
    name: str,
    workload: ModelFamily,
    experiments: Sequence[Experiment],
    options: Options,
    *,
    momentum: float,
) -> None:
    """Measure peaks and print them beside the model's memory, here and at the published size.

    Args:
        momentum: 0 for 8 bytes a parameter (itself and its gradient), else 12.
    """
    bytes_each = _bytes_each(momentum)
    print_header(options)
    print(
        f"  model: {bytes_each} bytes a parameter; activations: the second step's peak beyond it"
    )
    measure = partial(memory_row, workload, options=options, momentum=momentum)
    rows = [
        described(workload, experiment, options) | row | dict(experiment.published)
        for experiment, row in each_runnable(workload, experiments, options, measure)
    ]
    print_rows(name, rows, options)
