"""Prove what the end of a step costs where ranks train together: waits for a GPU, and sums.

GPUs are stand-ins (see tests/helpers/stand_in_gpu.py), one in each of two real processes. Sums on
them are gloo's, of the memory that stands for theirs, which no host waits for over NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autodp.groups
import autodp.rank_sums
import autodp.redistribute
from pipetransformer.processes import world as world_module
from pipetransformer.stage import step_end
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import Pool
from tests.helpers.stand_in_gpu import OnGpu, StandInGpu, put_on_gpu, stand_in_gpu


@contextmanager
def over_nccl() -> Iterator[StandInGpu]:
    """Have this rank see a GPU, and sums of its tensors start without a wait."""
    all_reduce = dist.all_reduce

    def reduced(tensor: Any, *arguments: Any, **options: Any) -> Any:
        return all_reduce(getattr(tensor, "host", tensor), *arguments, **options)

    with stand_in_gpu() as gpu, pytest.MonkeyPatch.context() as patching:
        for module in (autodp.groups, autodp.rank_sums, autodp.redistribute, world_module):
            patching.setattr(module, "link_device", lambda device, group: device)
        patching.setattr(dist, "all_reduce", reduced)
        yield gpu


def trained(steps: int, gpu: StandInGpu | None = None, **settings: Any) -> dict[str, Any]:
    """Train some steps; return the numbers, the weights, and what the last step cost."""
    model, sums = tiny_model(), Counter[str]()
    if gpu is not None:
        put_on_gpu(model)
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        group = options.get("group")
        if not isinstance(tensor, OnGpu) and group is dist.group.WORLD:
            sums["world"] += 1
        return all_reduce(tensor, *arguments, **options)

    settings = {"global_batch_size": 8, "max_grad_norm": 0.5, "device": "cpu", **settings}
    with tiny_trainer(model, tiny_data(), **settings) as trainer:
        numbers = []
        for _ in range(steps):
            sums.clear()
            if gpu is not None:
                gpu.reset()
            with pytest.MonkeyPatch.context() as patching:
                patching.setattr(dist, "all_reduce", counted)
                result = trainer.step()
            numbers.append((result.loss, result.gradient_norm, result.skipped))
        own = [p.detach() for p in model.parameters() if not p.is_meta]
        weights = [getattr(weight, "host", weight).numpy() for weight in own]
    waits = Counter[str]() if gpu is None else gpu.waits
    return {"numbers": numbers, "weights": weights, "sums": sums["world"], "waits": dict(waits)}


def on_gpus() -> dict[str, Any]:
    with over_nccl() as gpu:
        return trained(2, gpu, device="cuda-shared", pipeline_length=1)


def on_cpus(settings: dict[str, Any]) -> dict[str, Any]:
    return trained(2, **settings)


@pytest.mark.parametrize("length", [1, 2])
def test_a_step_sums_once_over_all_ranks(two_ranks: Pool, length: int) -> None:
    # There was a sum for the loss and what ranks found, and another one for the norm.
    for found in two_ranks.run(on_cpus, {"pipeline_length": length}):
        assert found["sums"] == 1


def test_the_end_of_a_step_on_replicas_waits_for_the_gpu_once(two_ranks: Pool) -> None:
    # There were three waits: for the backward, the loss and the norm.
    ours = two_ranks.run(on_gpus)
    others = two_ranks.run(on_cpus, {"pipeline_length": 1})
    for one, other in zip(ours, others, strict=True):
        assert list(one["waits"].values()) == [1] and "tolist" in str(one["waits"])
        for mine, theirs in zip(one["numbers"], other["numbers"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9)
        for mine, theirs in zip(one["weights"], other["weights"], strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(theirs))


class TimedEvent:
    """Stand for an event; the second came 0.2 s after the first."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        """Have nothing to mark."""

    def elapsed_time(self, end: TimedEvent) -> float:
        return 200.0


def test_one_wait_for_a_gpu_is_told_apart_by_what_it_was_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [10.0]
    monkeypatch.setattr(step_end.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    for device, computed_s, summed_s in (("cuda", 0.8, 0.7), ("cpu", 0.0, 0.75)):
        clock = step_end._Clock(torch.device(device))
        now_s[0] += 0.25  # Launched, or on a CPU summed.
        clock.stop()
        now_s[0] += 0.75  # The norm, and the wait for the GPU.
        clock.start()
        now_s[0] += 0.5  # The other ranks.
        clock.stop()
        assert clock.computed_s == pytest.approx(computed_s)
        assert clock.summed_s == pytest.approx(summed_s)
