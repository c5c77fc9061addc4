"""Hold steps that are captured as CUDA graphs against launched ones, and time both.

right    short runs of the Trainer, with dropout and without: losses and weights are alike
fast     whole epochs in turn, in bfloat16, rows on the device
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.loop_times import time_loops
from experiments.gpu_check.loops import ByTrainer
from experiments.gpu_check.phases.loops import bert_base, minilm, vit_b
from experiments.gpu_check.short_runs import ShortRun, compared, compared_losses, trained
from experiments.gpu_check.workloads import LoopCase

_FREEZES = (0, 0, 2, 2)
_BY_RATES = (1e-8, 1e-6)
"""Rates in float32, which graphs read, differ from Python's by 6e-8 of themselves."""


def run(findings: Findings, setting: Setting) -> None:
    """Compare short runs, then time three models."""
    device, check = setting.device, findings.check
    for model in ("vit", "bert"):
        for dropout in (0.0, 0.1):
            run = ShortRun(_FREEZES, model, "float64", dropout)
            check(f"{model}: float64, dropout {dropout}", partial(_exact, run, device))
            rounded = ShortRun(_FREEZES, model, dropout=dropout)
            check(f"{model}: bf16, dropout {dropout}", partial(_rounded, rounded, device))
    for build in (bert_base, vit_b, minilm):
        check(build.__name__, partial(_timed, findings, build, setting))


def _exact(run: ShortRun, device: str) -> dict[str, Any]:
    with capturing(device):
        ours = trained(run.with_settings(cuda_graph=True), device)
    return compared(ours, trained(run, device), _BY_RATES)


def _rounded(run: ShortRun, device: str) -> dict[str, Any]:
    with capturing(device):
        ours = trained(run.with_settings(cuda_graph=True), device)
    return compared_losses(ours, trained(run, device))


def _timed(findings: Findings, build: Callable[[Setting], LoopCase], setting: Setting) -> None:
    case, device = build(setting), setting.device
    with capturing(device):
        ours = {
            "Trainer, launched": ByTrainer(case, device, cache_device=device),
            "Trainer, captured": ByTrainer(case, device, cache_device=device, cuda_graph=True),
        }
        time_loops(findings, case, device, ours, num_warm=2 if setting.tiny else 4)


@contextmanager
def capturing(device: str) -> Iterator[None]:
    """Raise a ValueError where a run on a GPU says that it does not capture steps."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pipetransformer.stage.step_graphs")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if told and device == "cuda":
        raise ValueError(told[0])
