"""Hold what failures in layers do, and how far partitions may run ahead of one another."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.engine.current_micro_batch import is_recomputing
from autopipe.gpipe.module import GPipe
from tests.helpers.pipes import Call, every_mode, linears, on_cpu, ramp
from tests.helpers.pool import another_process

# Only a hang takes this long; it is then an error instead.
HANG_S = 20.0


class LayerError(Exception):
    """Be an error that only a layer of these tests raises."""


class Faulty(torch.autograd.Function):
    """Fail in the backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise LayerError("backward")


def assert_usable(model: GPipe) -> None:
    """Check that a model computes what it did before its failure, gradients included."""
    model.zero_grad()
    for _ in range(2):
        model(ramp(4, 3)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()


@every_mode
@pytest.mark.parametrize("place", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("use_step", [False, True])
def test_a_failure_reaches_the_caller_with_its_traceback_and_leaves_the_model_usable(
    stage: int, place: str, mode: str, use_step: bool
) -> None:
    broken = True

    def layer_that_fails(input: Tensor) -> Tensor:
        if broken and place == "backward":
            return Faulty.apply(input)
        if broken and (place == "forward" or is_recomputing()):
            raise LayerError(place)
        return input

    layers: list[nn.Module] = list(linears(3, 3, 3, 3))
    layers.insert(2 * stage + 1, Call(layer_that_fails))
    balance = [2 + (stage == j) for j in range(3)]
    model = on_cpu(nn.Sequential(*layers), balance, chunks=3, checkpoint=mode)
    before = set(threading.enumerate())

    def use() -> None:
        if use_step:
            model.step(ramp(4, 3), ramp(4, 3), nn.functional.mse_loss)
        else:
            model(ramp(4, 3)).sum().backward()

    if place == "recompute" and mode == "never":
        use()
    else:
        with pytest.raises(LayerError, match=place) as caught:
            use()
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert names[-1] == ("backward" if place == "backward" else "layer_that_fails")
        assert all(p.grad is None for p in model.parameters())
    assert set(threading.enumerate()) == before
    broken = False
    assert_usable(model)


def test_after_a_failure_the_partition_below_ends_its_micro_batch_and_starts_no_other() -> None:
    started: list[int] = []
    ended: list[int] = []
    second, failed = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def count(input: Tensor) -> Tensor:
        started.append(int(input[0]))
        if len(started) == 2:
            second.set()
            assert failed.wait(HANG_S)
            threads[0].join(HANG_S)
        ended.append(int(input[0]))
        return input

    def fail(input: Tensor) -> Tensor:
        assert second.wait(HANG_S)
        threads.append(threading.current_thread())
        failed.set()
        raise LayerError("early")

    layers = [nn.Identity(), nn.Identity(), Call(count), Call(fail)]
    model = on_cpu(nn.Sequential(*layers), [1, 1, 1, 1], chunks=5)
    with pytest.raises(LayerError, match="early"):
        model(torch.arange(5.0))
    assert (started, ended) == ([0, 1], [0, 1])


def racing(first: tuple[int, int], second: tuple[int, int]) -> GPipe:
    """Return a pipeline of which two partitions fail, in a set order in time.

    Args:
        first, second: stage and micro-batch of the failures, in the order of time.
    """
    entered = {first: threading.Event(), second: threading.Event()}
    threads: list[threading.Thread] = []

    def layer(stage: int) -> Callable[[Tensor], Tensor]:
        def run(input: Tensor) -> Tensor:
            place = (stage, int(input[0]))
            if place == first:
                threads.append(threading.current_thread())
            if place not in entered:
                return input
            entered[place].set()
            assert all(event.wait(HANG_S) for event in entered.values())
            if place == second:
                threads[0].join(HANG_S)
            raise LayerError(f"stage {stage}")

        return run

    return on_cpu(nn.Sequential(*(Call(layer(j)) for j in range(3))), [1, 1, 1], chunks=5)


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        ((0, 3), (2, 0), "stage 2"),
        ((2, 0), (0, 3), "stage 2"),
        # At the same clock tick the lower partition comes first.
        ((0, 1), (1, 0), "stage 0"),
        ((1, 0), (0, 1), "stage 0"),
        ((2, 1), (1, 2), "stage 1"),
    ],
)
def test_of_several_failures_the_first_in_the_schedule_is_raised(
    first: tuple[int, int], second: tuple[int, int], winner: str
) -> None:
    with pytest.raises(LayerError, match=winner):
        racing(first, second)(torch.arange(5.0))


@every_mode
def test_an_interrupt_raised_in_a_layer_reaches_the_caller_and_hangs_nothing(mode: str) -> None:
    broken = True

    def interrupt(input: Tensor) -> Tensor:
        if broken:
            raise KeyboardInterrupt("in a layer")
        return input

    for stage in range(3):
        broken = True
        layers: list[nn.Module] = [*linears(3, 3)[:1], *linears(3, 3)[:1]]
        layers.insert(stage, Call(interrupt))
        model = on_cpu(nn.Sequential(*layers), [1, 1, 1], chunks=3, checkpoint=mode)
        with pytest.raises(KeyboardInterrupt, match="in a layer"):
            model(ramp(4, 3))
        broken = False
        assert_usable(model)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Have SIGINT interrupt, also in a job in the background, which starts without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_the_caller_ends_the_pipeline() -> None:
    interrupted = threading.Event()

    def wait(input: Tensor) -> Tensor:
        if not interrupted.is_set():
            interrupted.set()
            os.kill(os.getpid(), signal.SIGINT)
        return input

    model = on_cpu(nn.Sequential(*linears(3, 3), Call(wait)), [1, 1, 1], chunks=3)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt, match="^$"):
        for _ in range(1_000):
            model(ramp(4, 3))
    assert set(threading.enumerate()) == before
    assert_usable(model)


def fail_in_a_layer() -> None:
    def fail(input: Tensor) -> Tensor:
        raise LayerError("layer")

    on_cpu(nn.Sequential(nn.Identity(), Call(fail)), [1, 1], chunks=2)(torch.rand(2))


def test_an_interpreter_exits_after_a_failed_forward() -> None:
    # A process ends as an interpreter does: it waits for the threads that are left.
    process = another_process(fail_in_a_layer)
    process.start()
    process.join(60.0)
    assert process.exitcode == 1


def test_a_fast_partition_is_at_most_one_micro_batch_ahead_of_a_slow_one() -> None:
    timeline: list[tuple[int, int]] = []
    done = {(stage, i): threading.Event() for stage in range(2) for i in range(4)}

    def log(stage: int) -> Callable[[Tensor], Tensor]:
        def run(input: Tensor) -> Tensor:
            i = int(input[0])
            if stage == 1 and i < 3:
                # As slow as the fast partition takes to do all that it may.
                assert done[0, i + 1].wait(HANG_S)
            timeline.append((stage, i))
            done[stage, i].set()
            return input

        return run

    model = on_cpu(nn.Sequential(Call(log(0)), Call(log(1))), [1, 1], chunks=4)
    model(torch.arange(4.0))
    assert timeline == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (0, 3), (1, 2), (1, 3)]


def test_partitions_on_the_cpu_run_forwards_and_backwards_at_the_same_time() -> None:
    meetings = {kind: threading.Barrier(2, timeout=HANG_S) for kind in ("forward", "backward")}

    class Meet(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor, number: int) -> Tensor:
            ctx.number = number
            if number == 1:
                meetings["forward"].wait()
            return input.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            if ctx.number == 1:
                meetings["backward"].wait()
            return gradients[0], None

    class Layer(nn.Module):
        """Meet the other partition at the same clock tick: its micro-batch is one behind."""

        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage, self.count = stage, 0

        def forward(self, input: Tensor) -> Tensor:
            number, self.count = self.count + self.stage, self.count + 1
            return Meet.apply(input, number)

    model = on_cpu(nn.Sequential(Layer(0), Layer(1)), [1, 1], chunks=2, checkpoint="never")
    model(torch.rand(2, requires_grad=True)).sum().backward()
    assert not any(barrier.broken for barrier in meetings.values())
