"""Time whole epochs of loops that train a case, in turn, their starts included."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from experiments.gpu_check.device_time import synchronize
from experiments.gpu_check.findings import Findings
from experiments.gpu_check.loops import Attached, ByTrainer, Ideal, Loop, Plain
from experiments.gpu_check.workloads import LoopCase


def with_rows(case: LoopCase, device: str) -> dict[str, Loop]:
    """Return our loops, with rows wherever they may lie."""
    loops: dict[str, Loop] = {}
    for place in ("cuda", "cpu") if device == "cuda" else ("cpu",):
        loops[f"attach, rows in {place}"] = Attached(case, device, cache_device=place)
        loops[f"Trainer, rows in {place}"] = ByTrainer(case, device, cache_device=place)
    return loops


def time_loops(
    findings: Findings, case: LoopCase, device: str, ours: Mapping[str, Loop], *, num_warm: int
) -> None:
    """Note the times of epochs: unfrozen, the one that fills, and the median of warm ones.

    Raises:
        ValueError: the loops do not learn alike.
    """
    loops = {"plain": Plain(case, device), "ideal": Ideal(case, device), **ours}
    # The first epoch, with nothing frozen, warms up; then one fills.
    found = epochs_in_turn(loops, (0, 0, *[case.num_frozen] * (1 + num_warm)), device)
    states = {"unfrozen": slice(1, 2), "filling": slice(2, 3), "warm": slice(3, None)}
    note_times(findings, case.name, found, states, ideal="ideal")


def epochs_in_turn(
    loops: Mapping[str, Loop], frozen: Sequence[int], device: str
) -> dict[str, list[tuple[float, float]]]:
    """Train an epoch of each loop in turn, and close them; return the times of `epoch_ms`.

    Args:
        frozen: how much is frozen, by epoch.
    Raises:
        ValueError: the loops do not learn alike.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    with ExitStack() as stack:
        for loop in loops.values():
            stack.callback(loop.close)
        for num_frozen in frozen:
            for name, loop in loops.items():
                found[name].append(epoch_ms(loop, num_frozen, device))
        means = {name: float(np.mean(loop.outcome().losses)) for name, loop in loops.items()}
    for name, loss in means.items():
        if not abs(loss - means["plain"]) <= 0.02 * abs(means["plain"]):
            raise ValueError(f"{name} has a mean loss of {loss:.5g}; all: {means}")
    return found


def note_times(
    findings: Findings,
    case: str,
    found: Mapping[str, Sequence[tuple[float, float]]],
    states: Mapping[str, slice],
    *,
    ideal: str,
) -> None:
    """Note each state of each of our loops, by the medians of its epochs.

    Args:
        found: of each loop, an epoch's time a step and the main thread's own, in ms.
        ideal: the loop that ours are held against, beside "plain".
    """
    for state, epochs in states.items():
        ms = {name: np.median(times[epochs], axis=0) for name, times in found.items()}
        for name in [one for one in found if one not in ("plain", ideal)]:
            findings.note(
                f"{case}, {state}, {name}",
                of_ideal=float(ms[ideal][0] / ms[name][0]),
                plain_over_ours=float(ms["plain"][0] / ms[name][0]),
                main_thread_ms={one: float(values[1]) for one, values in ms.items()},
                **{
                    f"{key}_ms": float(ms[one][0])
                    for key, one in (
                        ("ours", name),
                        ("plain", "plain"),
                        (ideal.replace(" ", "_"), ideal),
                    )
                },
            )


def epoch_ms(loop: Loop, num_frozen: int, device: str) -> tuple[float, float]:
    """Train an epoch; return its time a step, and the main thread's own, in ms."""
    num = loop.case.steps_per_epoch
    synchronize(device)
    start, own = time.perf_counter(), time.thread_time()
    loop.epoch(num_frozen)
    own = time.thread_time() - own  # Before the wait, in which this thread may spin.
    synchronize(device)
    return 1e3 * (time.perf_counter() - start) / num, 1e3 * own / num
