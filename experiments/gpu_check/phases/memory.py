"""Train where little memory is free: the plan must fit, and its modelled peak must hold.

First with room, to learn what the plan models and what the allocator's peak is; then again where
a share of that is left, on a GPU by a block of memory that is taken away.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.loops import make_trainer
from experiments.gpu_check.workloads import LoopCase, Rows, fine_tuned_vit
from freeze import NeverFreeze

_SHARE, _STEPS = 0.6, 3


def run(findings: Findings, setting: Setting) -> None:
    """Train with room and without, on a batch whose activations are most of what is held."""
    small, batch = fine_tuned_vit(setting), 64 if setting.tiny else 256
    rows = Rows(small.rows.columns, _STEPS * batch)
    case = replace(small, rows=rows, batch_size=batch)
    modelled: list[int] = []
    for name, share in (("with room", None), (f"{_SHARE:.0%} of that", _SHARE)):
        action = partial(_trained, case, setting.device, share, modelled)
        findings.check(f"{case.name}, {batch} images, {name}", action)


def _trained(
    case: LoopCase, device: str, share: float | None, modelled: list[int]
) -> Mapping[str, Any]:
    """Train some steps.

    Args:
        share: of the first run's modelled peak is left; None leaves all.
        modelled: peaks in bytes, of each run so far.
    Raises:
        RuntimeError: the plan, or training itself, needs more than there is.
    """
    limit = None if share is None else int(share * modelled[0])
    if device == "cuda":
        # The Trainer finds out by itself what is free.
        taken, settings = _taken(limit), {}
        held = torch.cuda.memory_allocated()
    else:
        taken, settings, held = None, {"memory_limit_bytes": limit}, 0
    with make_trainer(case, device, freeze=NeverFreeze(), epochs=1, **settings) as trainer:
        trainer.begin()
        for _ in range(_STEPS):
            trainer.step()
        assert trainer.decision is not None
        plan = trainer.decision.plan
        modelled.append(max(plan.peak_bytes))
        figures = {"micro_batches": plan.num_micro_batches, "modelled_mb": modelled[-1] / 1e6}
        if device == "cuda":
            torch.cuda.synchronize()
            figures["allocated_mb"] = (torch.cuda.max_memory_allocated() - held) / 1e6
            figures["reserved_mb"] = (torch.cuda.max_memory_reserved() - held) / 1e6
    del taken
    if limit is None:
        return figures
    if modelled[-1] > limit:
        raise RuntimeError(f"the plan models more than the {limit / 1e6:.0f} MB left: {figures}")
    return {**figures, "limit_mb": limit / 1e6}


def _taken(limit: int | None) -> torch.Tensor:
    """Take memory of the GPU until so much is free; none for None."""
    gc.collect()  # What an earlier run held may wait in a cycle.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, _ = torch.cuda.mem_get_info()
    size = 0 if limit is None else max(0, free - limit)
    return torch.empty(size, dtype=torch.uint8, device="cuda")
