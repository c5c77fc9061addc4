"""Prove the same as `pipelines` over NCCL, whose two ranks share the only GPU.

Each rank stands for a node of one slot, so that both take the first GPU. NCCL 2.30 is the first to
allow it. A rehearsal does so over gloo.
"""

from __future__ import annotations

import torch

from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.phases.pipelines import compare

_LEAST = (2, 30)
_ENVIRONMENT = {
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",  # A GPU has one place among those that a switch adds up.
}


def run(findings: Findings, setting: Setting) -> None:
    """Launch two ranks, or say in one line why not."""
    if setting.device == "cuda" and (version := torch.cuda.nccl.version()) < _LEAST:
        why = f"NCCL {version} refuses two ranks on one GPU; {_LEAST} and later allow it"
        findings.note("skipped", why=why)
        return
    compare(findings, setting, setting.device, **_ENVIRONMENT)
