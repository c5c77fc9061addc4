"""Prove what the end of a step costs where ranks train together: waits for a GPU, and sums.

GPUs are stand-ins (see tests/helpers/stand_in_gpu.py), one in each of two real processes. Sums and
messages of theirs are gloo's, of the memory that stands for theirs, which no host waits for over
NCCL.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autodp.groups
import autodp.rank_sums
from autopipe.engine import Milestone, stream_watchdog
from pipetransformer import Trainer
from pipetransformer.processes import world as world_module
from pipetransformer.stage import step_end
from pipetransformer.stage.device_end import DeviceEnd
from pipetransformer.stage.step_result import LateNumbers
from tests.helpers.exploding import Exploding
from tests.helpers.inspection import stage_of, task_of
from tests.helpers.marks import slow
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import Pool
from tests.helpers.stand_in_gpu import OnGpu, StandInGpu, put_on_gpu, stand_in_gpu


def sent_as_host(name: str) -> Callable[..., Any]:
    """Return torch's function of that name, for tensors on the stand-in GPU, too."""
    real = getattr(dist, name)

    def sent(tensor: Any, *arguments: Any, **options: Any) -> Any:
        return real(getattr(tensor, "host", tensor), *arguments, **options)

    return sent


@contextmanager
def over_nccl() -> Iterator[StandInGpu]:
    """Have this rank see a GPU, and messages of its tensors start without a wait."""
    with stand_in_gpu() as gpu, pytest.MonkeyPatch.context() as patching:
        for module in (autodp.groups, autodp.rank_sums, world_module):
            patching.setattr(module, "link_device", lambda device, group: device)
        # It would outlive the GPU; here a wait is over when it is launched.
        patching.setattr(stream_watchdog, "_look_always", lambda watchdog: None)
        for name in ("all_reduce", "send", "recv", "isend", "irecv"):
            patching.setattr(dist, name, sent_as_host(name))
        yield gpu


def trained(steps: int, gpu: StandInGpu | None = None, **settings: Any) -> dict[str, Any]:
    """Train some steps; return the numbers, weights and moments, and what the last step cost."""
    model, sums = tiny_model(), Counter[str]()
    if gpu is not None:
        put_on_gpu(model)
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        if not isinstance(tensor, OnGpu):
            group = options.get("group")
            sums["world" if group is dist.group.WORLD else "others"] += 1
        return all_reduce(tensor, *arguments, **options)

    settings = {"global_batch_size": 8, "max_grad_norm": 0.5, "device": "cpu", **settings}
    with tiny_trainer(model, tiny_data(), **settings) as trainer:
        results, waits = [], Counter[str]()
        for _ in range(steps):
            sums.clear()
            if gpu is not None:
                gpu.reset()
            with pytest.MonkeyPatch.context() as patching:
                patching.setattr(dist, "all_reduce", counted)
                results.append(trainer.step())
            if gpu is not None:
                waits = gpu.waits.copy()
        numbers = [(one.loss, one.gradient_norm, one.skipped) for one in results]
        weights = state_of(trainer)
    return {
        "numbers": numbers,
        "weights": weights,
        "sums": sums["world"],
        "waits": dict(waits),
        "gloo": sums.total(),
    }


def state_of(trainer: Trainer) -> list[Any]:
    """Return all weights that this rank trains, and their moments."""
    part = stage_of(trainer).trained
    own = list(part.parameters.values())
    assert part.optimizer is not None
    moments = [one for p in own for one in part.optimizer.state[p].values()]
    tensors = [one.detach() for one in (*own, *moments)]
    return [getattr(one, "host", one).numpy().copy() for one in tensors]


def on_gpus(steps: int, settings: dict[str, Any], *, host_ends: bool = False) -> dict[str, Any]:
    with over_nccl() as gpu, pytest.MonkeyPatch.context() as patching:
        if host_ends:
            patching.setattr(DeviceEnd, "fits", lambda part: False)
        return trained(steps, gpu, device="cuda-shared", **settings)


def on_gpus_by_host(steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    return on_gpus(steps, settings, host_ends=True)


def on_cpus(settings: dict[str, Any]) -> dict[str, Any]:
    return trained(2, **settings)


@pytest.mark.parametrize("length", [1, 2])
def test_a_step_sums_once_over_all_ranks(two_ranks: Pool, length: int) -> None:
    # There was a sum for the loss and what ranks found, and another one for the norm.
    for found in two_ranks.run(on_cpus, {"pipeline_length": length}):
        assert found["sums"] == 1


def test_the_end_of_a_step_on_replicas_waits_for_the_gpu_once(two_ranks: Pool) -> None:
    # There were three waits: for the backward, the loss and the norm.
    settings = {"pipeline_length": 1}
    ours = two_ranks.run(on_gpus_by_host, 2, settings)
    others = two_ranks.run(on_cpus, settings)
    for one, other in zip(ours, others, strict=True):
        assert list(one["waits"].values()) == [1] and "tolist" in str(one["waits"])
        for mine, theirs in zip(one["numbers"], other["numbers"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9)
        for mine, theirs in zip(one["weights"], other["weights"], strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(theirs))


@pytest.mark.parametrize("length", [1, slow(2)])
def test_gpus_of_several_ranks_decide_as_the_hosts_do_and_wait_for_nothing(
    two_ranks: Pool, length: int
) -> None:
    settings = {"pipeline_length": length, "micro_batches": 2}
    ours = two_ranks.run(on_gpus, 3, settings)
    for one, other in zip(ours, two_ranks.run(on_gpus_by_host, 3, settings), strict=True):
        assert one["numbers"] == other["numbers"]
        assert one["waits"] == {} and one["gloo"] == 0
        assert other["waits"] and other["gloo"] == 1
        for mine, theirs in zip(one["weights"], other["weights"], strict=True):
            assert np.array_equal(mine, theirs)


def whole_run(length: int, by_host: bool) -> dict[str, Any]:
    """Train epochs with freezes, the cache, a bad sample and a short last batch."""
    with over_nccl(), pytest.MonkeyPatch.context() as patching:
        if by_host:
            patching.setattr(DeviceEnd, "fits", lambda part: False)
        model, data = tiny_model(), tiny_data(num_samples=25)  # A replica has none of the last.
        put_on_gpu(model)
        data.tensors[0][5] = math.nan
        settings = {"global_batch_size": 8, "pipeline_length": length, "device": "cuda-shared"}
        with tiny_trainer(
            model,
            data,
            freeze=lambda context: min(2, context.epoch),
            on_nonfinite="skip",
            epochs=4,
            **settings,
        ) as trainer:
            results = []
            while not trainer.is_over:
                results.append(trainer.step())
                if trainer.world.rank == 1 and len(results) == 10:
                    trainer.stop()
            names = ("loss", "gradient_norm", "skipped", "cache_hits", "cache_misses")
            numbers = [[getattr(one, name) for name in names] for one in results]
            return {"numbers": numbers, "weights": state_of(trainer)}


@pytest.mark.parametrize("length", [slow(1), slow(2)])
def test_a_run_whose_steps_end_on_gpus_is_the_same_and_stops_a_step_later(
    two_ranks: Pool, length: int
) -> None:
    ours = two_ranks.run(whole_run, length, False)
    others = two_ranks.run(whole_run, length, True)
    assert [len(one["numbers"]) for one in others] == [11, 11]
    assert [len(one["numbers"]) for one in ours] == [12, 12]
    for one, other in zip(ours, others, strict=True):
        assert sum(skipped for _, _, skipped, *_ in one["numbers"]) == 3
        assert str(one["numbers"][:11]) == str(other["numbers"])  # One loss is NaN.


def explode(trainer: Trainer, patching: pytest.MonkeyPatch) -> None:
    head = task_of(trainer).model.sublayers[-1].module
    forward = head.forward
    patching.setattr(head, "forward", lambda *given: Exploding.apply(forward(*given)))


def grow_late(trainer: Trainer, patching: pytest.MonkeyPatch) -> None:
    """Report a parameter once more, as a further backward would."""
    reducer = stage_of(trainer).trained.reducer
    assert reducer is not None
    finish = reducer.finish

    def finish_later() -> None:
        reducer._ready(next(reversed(stage_of(trainer).trained.parameters.values())))
        finish()

    patching.setattr(reducer, "finish", finish_later)


def edit(trainer: Trainer, patching: pytest.MonkeyPatch) -> None:
    next(iter(stage_of(trainer).trained.parameters.values())).requires_grad_(False)


def lose_sum(trainer: Trainer, patching: pytest.MonkeyPatch) -> None:
    """Leave this rank's numbers as they are, as an abort might."""
    all_reduce = dist.all_reduce

    def reduced(tensor: Any, *arguments: Any, **options: Any) -> Any:
        before = tensor.host.clone() if isinstance(tensor, OnGpu) and len(tensor) == 13 else None
        work = all_reduce(tensor, *arguments, **options)
        if before is not None:
            work.wait()
            tensor.host.copy_(before)
        return work

    patching.setattr(dist, "all_reduce", reduced)


def abort(trainer: Trainer, patching: pytest.MonkeyPatch) -> None:
    """Have the watchdog abort all waits while the host waits for a step's numbers."""
    watchdog, wait = stage_of(trainer)._wiring._watchdog, LateNumbers.wait
    assert watchdog is not None

    def aborted(numbers: LateNumbers) -> list[float]:
        watchdog.look()
        return wait(numbers)

    patching.setattr(watchdog, "_abort", lambda: None)
    patching.setattr(watchdog, "_clock", lambda: math.inf)
    patching.setattr(Milestone, "is_reached", lambda mark: False)
    patching.setattr(LateNumbers, "wait", aborted)


FAULTS = {
    "infinite": explode, "early": grow_late, "edit": edit, "lost": lose_sum, "aborted": abort
}  # fmt: skip


def after_fault(fault: str, length: int) -> dict[str, Any]:
    """Let a third step have a fault; return what this rank raises, and in which step."""
    with over_nccl(), pytest.MonkeyPatch.context() as patching:
        model = tiny_model()
        put_on_gpu(model)
        trainer = tiny_trainer(
            model,
            tiny_data(num_samples=80),
            global_batch_size=8,
            pipeline_length=length,
            device="cuda-shared",
        )
        with pytest.raises(Exception) as caught, trainer:
            for _ in range(2):
                trainer.step()
            before = state_of(trainer)
            if trainer.world.rank == 1 or fault in ("lost", "aborted"):
                FAULTS[fault](trainer, patching)
            trainer.step()  # Nobody has heard of it.
            assert trainer.global_step == 3
            trainer.step()
        return {
            "error": f"{type(caught.value).__name__}: {caught.value}",
            "step": trainer.global_step,
            "same": list(map(np.array_equal, before, state_of(trainer))),
        }


@pytest.mark.parametrize(
    ("fault", "length", "texts"),
    [
        slow("infinite", 1, ["NonFiniteError: step 2: .*gradient of sublayer '5', on one of"] * 2),
        slow("infinite", 2, ["NonFiniteError: step 2: .*gradient of sublayer '5' on rank 1"] * 2),
        slow("early", 1, ["ValueError: step 2: a gradient grew .*use_reentrant=False"] * 2),
        slow("edit", 1, ["ValueError: another rank", "ValueError: requires_grad of parameter"]),
        slow("lost", 1, ["PeerError: step 2: some rank's part of the loss never came"] * 2),
        slow("aborted", 1, ["PeerError: rank . waited for rank . .*links have been aborted"] * 2),
    ],
)
def test_what_one_rank_finds_ends_all_a_step_later_with_the_weights_of_before(
    two_ranks: Pool, fault: str, length: int, texts: list[str]
) -> None:
    for text, found in zip(texts, two_ranks.run(after_fault, fault, length), strict=True):
        assert re.match(text, found["error"]), found["error"]
        assert found["step"] == (2 if fault == "aborted" else 3)
        assert fault == "aborted" or all(found["same"])


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
