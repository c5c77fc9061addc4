"""Prove that one device learns what it should, whatever is cached, resumed or read ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.short_runs import (
    EXACTLY,
    IN_FLOAT64,
    Outcome,
    ShortRun,
    compared,
    compared_losses,
    make_repeatable,
    make_trainer,
    that_reads,
    trained,
    trained_elsewhere,
    trained_plainly,
)

FREEZES, THAWS = (0, 3, 3, 3), (2, 0, 3, 3)
_USUAL = ShortRun(FREEZES)


def run(findings: Findings, setting: Setting) -> None:
    """Compare short runs: exactly in float64 and between ours, alike in bfloat16."""
    make_repeatable()
    device, check = setting.device, findings.check
    for model in ("vit", "bert"):
        exact = ShortRun(FREEZES, model, "float64")
        check(f"{model}: float64 = a plain loop on CPUs", partial(_exact, exact, device))
        rounded = ShortRun(FREEZES, model)
        check(f"{model}: bf16 = plain autocast", partial(_rounded, rounded, device))
    thaws = ShortRun(THAWS, dtype="float64")
    check("freeze, thaw, freeze", partial(_exact, thaws, device))
    check("cached = uncached, bit by bit", partial(_same_bits, device, cache=False))
    check("the same with launches that block", partial(_blocking, device, setting.scratch))
    check("resumed = uninterrupted", partial(_resumed, device, setting.scratch))
    check("the same with reading processes", partial(_same_bits, device, num_workers=2))
    check("verify()", partial(_verified, device))


@lru_cache(maxsize=1)
def _usual(device: str) -> Outcome:
    """Train once what several runs are held against."""
    return that_reads(trained(_USUAL, device))


def _exact(run: ShortRun, device: str) -> Mapping[str, Any]:
    return compared(trained(run, device), trained_plainly(run, "cpu"), IN_FLOAT64)


def _rounded(run: ShortRun, device: str) -> Mapping[str, Any]:
    """Compare losses: ours rounds what goes between sublayers, autocast of a model does not."""
    theirs = trained_plainly(run, device)
    ideal = compared_losses(trained_plainly(run, device, keeps=True), theirs)
    found = compared_losses(trained(run, device), theirs)
    return {**found, "ideal_differs_by": ideal["losses_differ_by"]}


def _same_bits(device: str, **settings: Any) -> Mapping[str, Any]:
    usual = _usual(device)
    found = compared(trained(_USUAL.with_settings(**settings), device), usual, EXACTLY)
    return {**found, "rows_read": usual.rows_read}


def _blocking(device: str, folder: str) -> Mapping[str, Any]:
    (found,) = trained_elsewhere([_USUAL], device, folder, num_slots=1, CUDA_LAUNCH_BLOCKING="1")
    return compared(found, _usual(device), EXACTLY)


def _resumed(device: str, folder: str) -> Mapping[str, Any]:
    saving = {"folder": Path(folder, "run"), "checkpoint_every_steps": 4, "resume": "auto"}
    run, whole = _USUAL.with_settings(**saving), _usual(device)
    trained(run, device, most_steps=9)  # Within the epoch that reads the cache first.
    rest = trained(run, device)
    begun = len(whole.losses) - len(rest.losses)
    if not begun:
        raise ValueError("nothing was resumed: the second run began at step 0")
    found = compared(rest, replace(whole, losses=whole.losses[begun:]), EXACTLY)
    return {**found, "resumed_at_step": begun}


def _verified(device: str) -> Mapping[str, Any]:
    with make_trainer(_USUAL, device) as trainer:
        return vars(trainer.verify())
