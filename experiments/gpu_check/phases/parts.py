"""Hold `attach(parts=...)` against plain loops, and time it beside a cache by hand.

right    small models in float64: losses and weights are those of a plain loop, and by hand, too
fast     whole epochs in turn, in bfloat16: filling, then warm, rows on the device and on the host
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.loop_times import compare_losses, epoch_ms, note_times
from experiments.gpu_check.loops import Outcome
from experiments.gpu_check.short_runs import IN_FLOAT64, compared
from experiments.part_cases import LARGE, TINY, PartCase, part_cases
from experiments.part_loops import ByHand, Ours, PartLoop, Plain


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
    ours = Ours(case, device, cache_device=place, **settings)
    plain = _trained(Plain(case, device))
    compared(_trained(ByHand(case, device)), plain, IN_FLOAT64)
    found = compared(_trained(ours), plain, IN_FLOAT64)
    if ours.num_read != len(case.rows):
        raise ValueError(f"{ours.num_read} rows were read, not {len(case.rows)}")
    return {**found, "rows_read": ours.num_read}


def _released(case: PartCase, device: str, folder: str) -> dict[str, Any]:
    """Compare likewise; the steps with all rows must find the part's memory given back."""
    had_memory: list[bool] = []

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        # The first weight stays: code asks it for the device.
        left = [*model.get_submodule(case.part).parameters()][1:]
        had_memory.append(any(one.device.type == "cuda" for one in left))
        return case.loss_of(model, batch)

    noting = replace(case, loss_of=loss_of)
    found = _exact(noting, device, device, release=True, cache_folder=folder)
    ours = had_memory[-found["steps"] :]  # Plain and by hand have trained before.
    if device == "cuda" and any(ours[-found["steps"] // 3 :]):
        raise ValueError(f"the part was on the GPU in steps from rows: {ours}")
    return found


def _trained(loop: PartLoop) -> Outcome:
    """Train three epochs, and close."""
    try:
        for _ in range(3):
            loop.epoch()
        weights = {name: tensor.cpu() for name, tensor in loop.model.state_dict().items()}
        return Outcome([float(loss) for loss in loop.losses], weights)
    finally:
        loop.close()


def _timed(findings: Findings, case: PartCase, setting: Setting, places: tuple[str, ...]) -> None:
    """Time whole epochs, their starts included, in turn; a first round of loops warms up."""
    device, num_warm = setting.device, 2 if setting.tiny else 4
    dtype: torch.dtype | None = torch.bfloat16
    if case.name == "smolvlm":
        # transformers writes images among float32 embeddings, where autocast makes them bfloat16.
        case, dtype = case.in_dtype(torch.bfloat16), None
    for is_warm_up in (True, False):
        loops: dict[str, PartLoop] = {
            name: loop(case, device, dtype)
            for name, loop in (("plain", Plain), ("by hand", ByHand))
        }
        for place in places:
            loops[f"ours, rows in {place}"] = Ours(case, device, dtype, cache_device=place)
        with ExitStack() as stack:
            for loop in loops.values():
                stack.callback(loop.close)
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
            for _ in range(1 if is_warm_up else 1 + num_warm):
                for name, loop in loops.items():
                    found[name].append(epoch_ms(loop.epoch, device))
            means = {n: float(torch.stack(one.losses).mean()) for n, one in loops.items()}
            compare_losses(means)
    states = {"filling": slice(0, 1), "warm": slice(1, None)}
    note_times(findings, case.name, found, states, ideal="by hand")
