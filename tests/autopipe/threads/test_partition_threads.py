"""Prove that partitions' threads work as the caller would, and that failures leave nothing."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.engine.links import Payload
from autopipe.gpipe.module import GPipe
from autopipe.schedule import Op
from autopipe.threads.thread_link import Crossing, Mailbox, Stopped
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


CPU = torch.device("cpu")


def in_thread(action: Callable[[], object]) -> Callable[[], object]:
    """Start an action in a thread; return what waits for its result or failure."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(action())
        except Stopped as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> object:
        thread.join(10)
        return results[0]

    return result


def test_a_mailbox_gives_each_micro_batch_to_whoever_asks_for_it() -> None:
    mailbox = Mailbox()
    waiting = in_thread(lambda: mailbox.take(1))
    mailbox.put(0, "zero")
    mailbox.put(1, "one")
    assert waiting() == "one"
    assert mailbox.take(0) == "zero"


def test_a_mailbox_that_is_full_is_awaited_until_it_is_emptied() -> None:
    mailbox = Mailbox()
    mailbox.put(0, "zero")
    waiting = in_thread(mailbox.await_empty)
    assert mailbox.take(0) == "zero"
    assert waiting() is None


def test_stopping_ends_present_and_future_waits_and_gives_nothing_more_out() -> None:
    mailbox = Mailbox()
    waiting = in_thread(lambda: mailbox.take(1))
    mailbox.put(0, "zero")
    mailbox.stop()
    assert isinstance(waiting(), Stopped)
    with pytest.raises(Stopped, match="^$"):
        mailbox.take(0)


def test_room_is_given_after_a_failure_too_but_not_where_something_still_waits() -> None:
    mailbox = Mailbox()
    mailbox.stop()
    mailbox.await_empty()
    mailbox.put(0, "zero")
    with pytest.raises(Stopped, match="^$"):
        mailbox.await_empty()


def test_on_one_device_a_tensor_is_handed_over_as_it_is() -> None:
    crossing = Crossing(Op.SEND_ACTIVATION, CPU, CPU)
    hidden = torch.rand(2, 3, requires_grad=True) * 2
    crossing.send(0, Payload((hidden, None), is_bare=False))
    received = crossing.receive(0)
    leaf, nothing = received.tensors
    assert nothing is None and not received.is_bare and leaf is not None
    assert leaf.data_ptr() == hidden.data_ptr() and leaf.is_leaf and leaf.requires_grad
