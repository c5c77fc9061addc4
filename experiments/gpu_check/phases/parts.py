"""Hold `attach(parts=...)` against plain loops, and time it beside a cache by hand.

right    small models in float64: losses and weights are those of a plain loop, and by hand, too
fast     whole epochs in turn, in bfloat16: filling, then warm, rows on the device and on the host
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.loop_times import epochs_in_turn, note_times
from experiments.gpu_check.loops import Loop
from experiments.gpu_check.part_cases import LARGE, TINY, PartCase, part_cases
from experiments.gpu_check.part_loops import ByHand, Ours, Plain
from experiments.gpu_check.short_runs import IN_FLOAT64, compared

_EPOCHS = (1, 1, 1)
"""In all of them the part is frozen."""


def run(findings: Findings, setting: Setting) -> None:
    """Compare all models, then time them."""
    device = setting.device
    places = ("cuda", "cpu") if device == "cuda" else ("cpu",)
    for tiny in part_cases(TINY):
        case = tiny.in_dtype(torch.float64)
        for place in places:
            exact = partial(_exact, case, device, place)
            findings.check(f"parts: {case.name}, float64, rows in {place}", exact)
        released = partial(_released, case, device, setting.scratch)
        findings.check(f"parts: {case.name}, float64, released", released)
    for case in part_cases(TINY if setting.tiny else LARGE):
        findings.check(case.name, partial(_timed, findings, case, setting, places))


def _exact(case: PartCase, device: str, place: str, **settings: Any) -> dict[str, Any]:
    plain = Plain(case, device).trained(_EPOCHS)
    compared(ByHand(case, device).trained(_EPOCHS), plain, IN_FLOAT64)
    ours = Ours(case, device, cache_device=place, **settings).trained(_EPOCHS)
    found = compared(ours, plain, IN_FLOAT64)
    if ours.rows_read != len(case.rows):
        raise ValueError(f"{ours.rows_read} rows were read, not {len(case.rows)}")
    return {**found, "rows_read": ours.rows_read}


def _released(case: PartCase, device: str, folder: str) -> dict[str, Any]:
    """Compare likewise; the steps with all rows must find the part's memory given back."""
    had_memory: list[bool] = []

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        # The first weight stays: code asks it for the device.
        left = [*model.get_submodule(case.blocks).parameters()][1:]
        had_memory.append(any(one.device.type == "cuda" for one in left))
        return case.loss_of(model, batch)

    noting = replace(case, loss_of=loss_of)
    found = _exact(noting, device, device, release=True, cache_folder=folder)
    ours = had_memory[-found["steps"] :]  # Plain and by hand have trained before.
    if device == "cuda" and any(ours[-found["steps"] // 3 :]):
        raise ValueError(f"the part was on the GPU in steps from rows: {ours}")
    return found


def _timed(findings: Findings, case: PartCase, setting: Setting, places: tuple[str, ...]) -> None:
    """Time whole epochs, their starts included, in turn; a first round of loops warms up."""
    device, num_warm = setting.device, 2 if setting.tiny else 4
    # transformers writes images among float32 embeddings, where autocast makes them bfloat16.
    case = (
        case.in_dtype(torch.bfloat16)
        if case.name == "smolvlm"
        else replace(case, autocast_to=torch.bfloat16)
    )
    for is_warm_up in (True, False):
        loops: dict[str, Loop] = {"plain": Plain(case, device), "by hand": ByHand(case, device)}
        for place in places:
            loops[f"ours, rows in {place}"] = Ours(case, device, cache_device=place)
        found = epochs_in_turn(loops, (1,) * (1 if is_warm_up else 1 + num_warm), device)
    states = {"filling": slice(0, 1), "warm": slice(1, None)}
    note_times(findings, case.name, found, states, ideal="by hand")
