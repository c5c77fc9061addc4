"""Prove that partitions of one process hand over each tensor once, and stop together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from autopipe.engine.links import Payload
from autopipe.gpipe.module import GPipe
from autopipe.schedule import Op
from autopipe.skip.skip_layers import pop, skippable, stash
from autopipe.threads.thread_link import Crossing, Mailbox, Stopped

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


@skippable(stash=["skip"])
class Stasher(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("skip", x * 2)
        return x


@skippable(pop=["skip"])
class Popper(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        skip = yield pop("skip")
        popped.append(weakref.ref(skip))
        return x + skip


class Later(nn.Module):
    """Note whether the skip popped before is still alive."""

    def forward(self, x: Tensor) -> Tensor:
        alive.append(popped[-1]() is not None)
        return x.sin()


popped: list[weakref.ref[Tensor]] = []
alive: list[bool] = []


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_skip_is_released_when_it_has_been_popped(checkpoint: str) -> None:
    popped.clear()
    alive.clear()
    model = nn.Sequential(Stasher(), nn.Linear(3, 3), Popper(), Later())
    ours = GPipe(model, [1, 1, 2], chunks=2, checkpoint=checkpoint)
    output = ours(torch.rand(4, 3, requires_grad=True))
    assert alive == [False, False]
    output.sum().backward()
    assert not any(alive)
