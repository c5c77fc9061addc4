"""Profile three warm steps of ours, the ideal and the plain loop: launches, waits, copies.

What the host's functions take is in the log, by cProfile: of steps that fill, and of warm ones.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from experiments.gpu_check.device_time import synchronize
from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.loops import ByTrainer, Ideal, Plain
from experiments.gpu_check.phases.loops import vit_case

TRACE = "warm_steps.json.gz"
_STEPS, _MOST_FUNCTIONS = 3, 30
_RANGE = "profiled steps"


def run(findings: Findings, setting: Setting) -> None:
    """Profile the ViT's steps in an epoch whose rows have all been read before."""
    findings.check("warm steps of the ViT", lambda: _profile_all(findings, setting))


def _profile_all(findings: Findings, setting: Setting) -> None:
    """Profile warm epochs of a few steps."""
    case, device = vit_case(setting, _STEPS), setting.device
    ideal_ms = None
    for who, kind in (("plain", Plain), ("ideal", Ideal), ("ours", ByTrainer)):
        with kind(case, device) as loop:
            loop.epoch(0)
            epoch = partial(loop.epoch, case.num_frozen)
            _print_host_profile(f"{who}, steps that fill", epoch)
            epoch()
            _print_host_profile(f"{who}, warm steps", epoch)
            trace = Path(setting.out, TRACE) if who == "ours" else None
            found = _profiled(epoch, device, trace)
            share = ideal_ms and ideal_ms / found["step_ms"]
            findings.note(who, of_ideal=share, **found, rows_read=loop.rows_read)
        ideal_ms = found["step_ms"] if who == "ideal" else None


def _print_host_profile(what: str, action: Callable[[], object]) -> None:
    """Print, into the log, the functions in which the host is longest."""
    found = cProfile.Profile()
    found.runcall(action)
    print(f"==== host, {_STEPS} {what}")
    for order in ("tottime", "cumtime"):
        pstats.Stats(found).sort_stats(order).print_stats(_MOST_FUNCTIONS)


def _profiled(epoch: Callable[[], object], device: str, trace: Path | None) -> dict[str, Any]:
    """Profile an epoch; return its figures, of one step each."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    synchronize(device)
    with profile(activities=activities) as found:
        with record_function(_RANGE):
            epoch()
        synchronize(device)
    if trace is not None:
        found.export_chrome_trace(str(trace))
    return summed_up(found.events(), num_steps=_STEPS)


def summed_up(events: Iterable[Any], *, num_steps: int) -> dict[str, Any]:
    """Count what a profile's events hold, for one step each.

    What the host does after the range of the steps, such as waiting for their end, is not theirs;
    what the device does then is.
    """
    events = list(events)
    on_host = [one for one in events if one.device_type == DeviceType.CPU]
    on_device = [
        one for one in events if one.device_type == DeviceType.CUDA and not one.is_user_annotation
    ]
    steps = next(one for one in on_host if one.name == _RANGE).time_range
    calls = [one for one in on_host if steps.start <= one.time_range.start < steps.end]
    busy = _union_us([(one.time_range.start, one.time_range.end) for one in on_device])
    ends = [one.time_range.end for one in on_device]
    whole = max([steps.end, *ends]) - steps.start

    def num(holds: Callable[[str], bool], within: Sequence[Any] = calls) -> float:
        return sum(holds(one.name) for one in within) / num_steps

    def ms(begins: str) -> float:
        spent = sum(one.cpu_time_total for one in calls if one.name.startswith(begins))
        return spent / num_steps / 1e3

    return {
        "step_ms": whole / num_steps / 1e3,
        "host_ms": (steps.end - steps.start) / num_steps / 1e3,
        "launches": num(lambda name: "LaunchKernel" in name),
        "operations": num(lambda name: name.startswith("aten::")),
        "synchronisations": num(lambda name: "Synchronize" in name or name == "cudaMemcpy"),
        "pinned_copies": num(lambda name: "Memcpy" in name and "Pinned" in name, on_device),
        "pageable_copies": num(lambda name: "Memcpy" in name and "Pageable" in name, on_device),
        "device_busy": busy / whole,
        "host_backward_ms": ms("autograd::engine::evaluate_function"),
        "host_optimizer_ms": ms("Optimizer.step"),
    }


def _union_us(spans: Sequence[tuple[float, float]]) -> float:
    """Return how long at least one of the spans lasts."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
