"""Time whole epochs of loops that train a case, in turn, their starts included."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from experiments.gpu_check.device_time import synchronize
from experiments.gpu_check.findings import Findings
from experiments.gpu_check.loops import Attached, ByTrainer, Ideal, Loop, Plain
from experiments.gpu_check.workloads import LoopCase


def time_loops(findings: Findings, case: LoopCase, device: str, *, num_warm: int) -> None:
    """Note the times of epochs: unfrozen, the one that fills, and the median of warm ones.

    Raises:
        ValueError: the loops do not learn alike.
    """
    loops: dict[str, Loop] = {"plain": Plain(case, device), "ideal": Ideal(case, device)}
    for place in ("cuda", "cpu") if device == "cuda" else ("cpu",):
        loops[f"attach, rows in {place}"] = Attached(case, device, cache_device=place)
        loops[f"Trainer, rows in {place}"] = ByTrainer(case, device, cache_device=place)
    with ExitStack() as stack:
        for loop in loops.values():
            stack.callback(loop.close)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
        # The first epoch, with nothing frozen, warms up; then one fills.
        for frozen in (0, 0, *[case.num_frozen] * (1 + num_warm)):
            for name, loop in loops.items():
                found[name].append(_epoch_ms(loop, frozen, device))
        _compare_losses(loops)
    for state, epochs in (("unfrozen", [1]), ("filling", [2]), ("warm", range(3, 3 + num_warm))):
        ms = {name: np.median([found[name][n] for n in epochs], axis=0) for name in loops}
        for name in loops:
            if name in ("plain", "ideal"):
                continue
            findings.note(
                f"{case.name}, {state}, {name}",
                of_ideal=float(ms["ideal"][0] / ms[name][0]),
                plain_over_ours=float(ms["plain"][0] / ms[name][0]),
                ours_ms=float(ms[name][0]),
                plain_ms=float(ms["plain"][0]),
                ideal_ms=float(ms["ideal"][0]),
                main_thread_ms={one: float(values[1]) for one, values in ms.items()},
            )


def _compare_losses(loops: Mapping[str, Loop]) -> None:
    """Raise a ValueError where loops that are timed do not learn alike."""
    losses = {name: float(np.mean(loop.outcome().losses)) for name, loop in loops.items()}
    for name, loss in losses.items():
        if not abs(loss - losses["plain"]) <= 0.02 * abs(losses["plain"]):
            raise ValueError(f"{name} has a mean loss of {loss:.5g}; all: {losses}")


def _epoch_ms(loop: Loop, num_frozen: int, device: str) -> tuple[float, float]:
    """Return an epoch's time a step, and the main thread's own, in ms."""
    synchronize(device)
    start, own = time.perf_counter(), time.thread_time()
    loop.epoch(num_frozen)
    own = time.thread_time() - own  # Before the wait, in which this thread may spin.
    synchronize(device)
    steps = loop.case.steps_per_epoch / 1e3
    return (time.perf_counter() - start) / steps, own / steps
