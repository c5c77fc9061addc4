"""Say what machine this is, and how fast it copies and multiplies."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from typing import Any

import torch

from experiments.gpu_check.device_time import seconds_on
from experiments.gpu_check.findings import Findings, Setting

_PACKAGES = ("torch", "transformers", "timm", "accelerate", "pytest")
_PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312}
"""Dense bf16, as published, by part of a card's name: the first that fits."""
_REPEATS = 7


def run(findings: Findings, setting: Setting) -> None:
    """Note versions and memory, and time copies and a matrix product."""
    device, tiny = setting.device, setting.tiny
    findings.check("versions", _versions)
    findings.check("memory", partial(_memory, device))
    num_bytes, size = (1 << 20, 256) if tiny else (1 << 28, 8192)
    findings.check("copies", partial(_copies, findings, device, num_bytes))
    findings.check("matrix product", partial(_matrix_product, findings, device, size))


def _versions() -> Mapping[str, Any]:
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "cuda": torch.version.cuda, **versions}


def _memory(device: str) -> Mapping[str, Any]:
    shared = shutil.disk_usage("/dev/shm")
    found: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "host_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "dev_shm_gb": shared.total / 1e9,
        "dev_shm_free_gb": shared.free / 1e9,
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {"card": torch.cuda.get_device_name(), "nccl": torch.cuda.nccl.version()}
        found |= {"free_gb": free / 1e9, "total_gb": total / 1e9}
    return found


def _copies(findings: Findings, device: str, num_bytes: int) -> None:
    """Time both directions; of pageable memory the ideal is pinned memory."""
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    kinds = {"pageable": torch.zeros(num_bytes, dtype=torch.uint8)}
    if device == "cuda":
        kinds["pinned"] = kinds["pageable"].pin_memory()
    for name, goes_up in (("host to device", True), ("device to host", False)):
        rates = {}
        for kind, here in kinds.items():
            target, source = (there, here) if goes_up else (here, there)
            copy = partial(target.copy_, source, non_blocking=kind == "pinned")
            rates[f"{kind}_gb_per_s"] = num_bytes / _median_s(device, copy) / 1e9
        share = rates["pageable_gb_per_s"] / max(rates.values())
        findings.note(name, of_ideal=share, **rates)


def _matrix_product(findings: Findings, device: str, size: int) -> None:
    one, other = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    tflops = 2 * size**3 / _median_s(device, partial(torch.mm, one, other)) / 1e12
    card = torch.cuda.get_device_name() if device == "cuda" else ""
    peak = next((peak for name, peak in _PEAK_TFLOPS.items() if name in card), None)
    share = None if peak is None else tflops / peak
    findings.note(f"bf16, {size} x {size}", of_ideal=share, tflops=tflops)


def _median_s(device: str, action: Callable[[], Any]) -> float:
    action()  # The first one touches pages, and chooses kernels.
    return statistics.median(seconds_on(device, action) for _ in range(_REPEATS))
