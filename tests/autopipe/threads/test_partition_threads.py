"""Prove that partitions' threads work as the caller would, and that failures leave nothing."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.gpipe.module import GPipe
from autopipe.threads.thread_pipeline import run_together


class Note(nn.Module):
    """Note what a layer sees of the settings that torch keeps for each thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(
            {
                "grad": torch.is_grad_enabled(),
                "inference": torch.is_inference_mode_enabled(),
                "autocast": torch.is_autocast_enabled("cpu"),
                "autocast_dtype": torch.get_autocast_dtype("cpu"),
                "threads": torch.get_num_threads(),
                "default_device": torch.zeros(()).device.type,
            }
        )
        return x * 1


def seen_by(*, chunks: int, num_threads: int = 1) -> list[dict[str, Any]]:
    """Run two partitions; return what both saw."""
    notes = [Note(), Note()]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        GPipe(nn.Sequential(*notes), [1, 1], chunks=chunks)(torch.ones(4, 2))
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    return [seen for note in notes for seen in note.seen]


def test_grad_mode_inference_mode_and_autocast_reach_every_partition() -> None:
    assert not any(seen["autocast"] or seen["inference"] for seen in seen_by(chunks=2))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        for seen in seen_by(chunks=2):
            assert not seen["grad"] and seen["autocast"]
            assert seen["autocast_dtype"] is torch.float16
    with torch.inference_mode():
        assert all(seen["inference"] for seen in seen_by(chunks=2))


def test_the_default_device_reaches_every_partition() -> None:
    with torch.device("meta"):
        notes = [Note(), Note()]
        GPipe(nn.Sequential(*notes), [1, 1], chunks=2)(torch.ones(4, 2, device="cpu"))
    assert {seen["default_device"] for note in notes for seen in note.seen} == {"meta"}


@pytest.mark.parametrize(("chunks", "num_threads", "expected"), [(1, 2, 2), (4, 2, 1), (4, 1, 1)])
def test_partitions_that_work_at_once_share_the_callers_threads(
    chunks: int, num_threads: int, expected: int
) -> None:
    assert {seen["threads"] for seen in seen_by(chunks=chunks, num_threads=num_threads)} == {
        expected
    }


def test_a_job_that_fails_before_it_has_begun_stops_the_others() -> None:
    stopped = threading.Event()

    def fails() -> None:
        raise ArithmeticError("deliberate")

    with pytest.raises(ArithmeticError, match="deliberate"):
        run_together(
            [fails, lambda: assert_set(stopped)],
            num_threads=1,
            stop=stopped.set,
            order=lambda _: 0,
        )


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)


def test_a_failed_step_keeps_no_tensor_alive_once_its_error_is_gone() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x * 2
            seen.append(weakref.ref(hidden))
            raise ArithmeticError("deliberate")

    ours = GPipe(nn.Sequential(nn.Linear(2, 2), Fails()), [1, 1], chunks=2)
    with pytest.raises(ArithmeticError, match="deliberate"):
        ours(torch.ones(4, 2))
    assert seen and all(reference() is None for reference in seen)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15),
    reason="torch 2.11's compiler crashes in a thread whose input is no leaf",
)
def test_compiled_layers_run_compiled_in_every_partition() -> None:
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        def run(*inputs: Tensor) -> Any:
            calls.append(1)
            return graph(*inputs)

        return run

    class Custom(nn.Linear):
        pass

    layers = [torch.compile(Custom(3, 3), backend=backend) for _ in range(2)]
    GPipe(nn.Sequential(*layers), [1, 1], chunks=2)(torch.ones(4, 3))
    assert len(calls) == 4
