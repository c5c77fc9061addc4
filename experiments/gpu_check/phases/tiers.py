"""Train with rows on the device and in the host's memory at once, beside all in one and none.

Half of the rows find room on the device, which is told to have no more: the others go to the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

from autocache import TieredStore
from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.loop_times import epoch_ms
from experiments.gpu_check.loops import ByTrainer
from experiments.gpu_check.short_runs import EXACTLY, compared, make_repeatable
from experiments.gpu_check.workloads import LoopCase, fine_tuned_vit

_STORES = "pipetransformer.feed.node_store"


def run(findings: Findings, setting: Setting) -> None:
    """Compare all weights with those without rows, and note each way's time of a warm step."""
    make_repeatable()
    case, device = fine_tuned_vit(setting), setting.device
    findings.check(case.name, partial(_compared, findings, case, device, 1 if setting.tiny else 3))


def _compared(findings: Findings, case: LoopCase, device: str, num_warm: int) -> None:
    with ExitStack() as stack:
        loops = {"none": ByTrainer(case, device, cache=False)}
        stack.callback(loops["none"].close)
        for name in ("cuda", "cpu") if device == "cuda" else ("cpu",):
            loops[name] = ByTrainer(case, device, cache_device=name)
            stack.callback(loops[name].close)
        found = {name: _warm_ms(loop, device, num_warm) for name, loop in loops.items()}
        with _half_of(loops["cpu"].trainer.report.cache_bytes):
            loops["mixed"] = ByTrainer(case, device, cache_device="auto")
            stack.callback(loops["mixed"].close)
            found["mixed"] = _warm_ms(loops["mixed"], device, num_warm)
        wanted = loops.pop("none").outcome()
        for name, loop in loops.items():
            figures = compared(loop.outcome(), wanted, EXACTLY)
            if loop.rows_read < num_warm * len(case.rows):
                raise ValueError(
                    f"{name}: {loop.rows_read} rows were read, not all in warm epochs"
                )
            findings.note(f"rows: {name}", **figures, **_times(found, name))


def _times(found: Mapping[str, float], name: str) -> Mapping[str, Any]:
    return {"step_ms": found[name], "none_over_ours": found["none"] / found[name]}


def _warm_ms(loop: ByTrainer, device: str, num_warm: int) -> float:
    """Train an epoch unfrozen, one that fills, and warm ones; return the time of their steps."""
    times = []
    for frozen in (0, *[loop.case.num_frozen] * (1 + num_warm)):
        times.append(epoch_ms(loop, frozen, device)[0])
    return median(times[2:])


@contextmanager
def _half_of(num_bytes: int) -> Iterator[None]:
    """Let a device have room for half of so many bytes.

    Raises:
        RuntimeError: rows were not mixed all the same.
    """
    with (
        mock.patch(f"{_STORES}.room_on_device", lambda device: num_bytes // 2),
        mock.patch(f"{_STORES}.TieredStore", wraps=TieredStore) as made,
    ):
        yield
    if not made.called:
        raise RuntimeError(f"all rows lay in one place, though {num_bytes // 2} bytes were free")
