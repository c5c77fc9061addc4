"""Prove that two stages on one device learn what a single process does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.phases.equality import FREEZES
from experiments.gpu_check.short_runs import (
    IN_FLOAT64,
    Outcome,
    ShortRun,
    compared,
    compared_losses,
    make_repeatable,
    that_reads,
    trained,
    trained_elsewhere,
    two_until_frozen,
)

_EXACT = ShortRun((0, 2), dtype="float64", settings={"pipeline_length": 2})
# Dropout's masks belong to micro-batches.
_SETTINGS = {"micro_batch_size": 4, "plan": two_until_frozen}
_ROUNDED = ShortRun(FREEZES, "bert", dropout=0.1, settings=_SETTINGS)


def run(findings: Findings, setting: Setting) -> None:
    """Launch two processes on the device once, and hold both outcomes against one process's."""
    compare(findings, setting, "cuda-shared" if setting.device == "cuda" else "cpu")


def compare(findings: Findings, setting: Setting, device: str, **environment: str) -> None:
    """Note whether two processes, with these variables in their environment, learn alike."""
    make_repeatable()
    in_two = cache(partial(_in_two, setting, device, environment))
    findings.check("K = 2, float64, = K = 1", partial(_exact, setting, in_two))
    findings.check("K = 2 -> 1, bf16, dropout, cache, = K = 1", partial(_rounded, setting, in_two))


def _in_two(
    setting: Setting, device: str, environment: Mapping[str, str]
) -> tuple[Outcome, Outcome]:
    runs = [_EXACT, _ROUNDED]
    exact, rounded = trained_elsewhere(runs, device, setting.scratch, num_slots=2, **environment)
    for outcome, wanted in ((exact, (2,)), (rounded, (2, 1))):
        if outcome.lengths != wanted:
            raise ValueError(f"pipelines had {outcome.lengths} stages; {wanted} were asked for")
    return exact, rounded


def _exact(setting: Setting, in_two: Callable[[], tuple[Outcome, Outcome]]) -> Mapping[str, Any]:
    single = trained(_EXACT.with_settings(pipeline_length=1), setting.device)
    return compared(in_two()[0], single, IN_FLOAT64)


def _rounded(setting: Setting, in_two: Callable[[], tuple[Outcome, Outcome]]) -> Mapping[str, Any]:
    """Compare losses: replicas add gradients up in another order, in bfloat16's rounding."""
    found = that_reads(in_two()[1])
    single = trained(_ROUNDED.with_settings(plan="fastest"), setting.device)
    return {**compared_losses(found, single), "rows_read": found.rows_read}
