"""Prove that one half of a batch travels while the other half is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor

from autopipe.engine import Payload, Peer, ProcessLinkAbove, ProcessLinkBelow, Sender, StageRun
from autopipe.schedule import Op, one_f_one_b
from autopipe.trace import Recorder, Span
from tests.helpers.pool import Pool
from tests.helpers.stages import StackWork, connect, layers_of, place, stage_model

SIZES = (3, 3)


class Departure:
    """Wait as `dist.Work` does."""

    def __init__(self, leaving: Future[None]) -> None:
        self._leaving = leaving

    def wait(self, timeout: timedelta) -> None:
        try:
            self._leaving.result(timeout.total_seconds())
        except LateError as error:
            raise RuntimeError("the gate was closed") from error


@dataclass(frozen=True)
class GatedPeer(Peer):
    """Keep what is sent until a gate opens."""

    gate: threading.Event = field(default_factory=threading.Event)
    line: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))

    def start(self, transfer: Callable[..., Any], message: Tensor) -> Any:
        return Departure(self.line.submit(self._leave, partial(super().start, transfer), message))

    def _leave(self, send: Callable[[Tensor], Any], message: Tensor) -> None:
        if message.is_floating_point():  # Headers are none.
            self.gate.wait()
        send(message).wait()


class OpeningWork(StackWork):
    """Open the gate within the second half's forward."""

    gate: threading.Event

    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        if micro_batch == 1:
            self.gate.set()
        return super().forward(micro_batch, inputs)


def train_in_halves() -> list[Span]:
    """Run a step in which the first half leaves a stage only while that computes the second."""
    stage, length, group = place()
    assert group is not None
    # The tags with which `connect` tells activations and gradients apart.
    peer, links = GatedPeer(1 - stage, group, stage, "first half", 20.0), connect(group)
    if isinstance(links.above, ProcessLinkAbove):
        links.above.activations = Sender(peer)
    if isinstance(links.below, ProcessLinkBelow):
        links.below.gradients = Sender(peer)
    work = OpeningWork(layers_of(stage_model(), stage, length), SIZES)
    work.gate, recorder = peer.gate, Recorder(stage)
    StageRun(one_f_one_b(length, 2)[stage], work, links, SIZES, recorder=recorder).run()
    peer.line.shutdown()
    return recorder.spans


def test_a_half_s_messages_travel_while_its_sender_computes_the_other_half(
    two_ranks: Pool,
) -> None:
    first, second = (
        {(span.op, span.micro_batch): span for span in spans if span.peer is None}
        for spans in two_ranks.run(train_in_halves)
    )
    # Both stages' second forwards begin before their first messages arrive. Were sends to block,
    # no second forward would begin.
    arrival = second[Op.RECV_ACTIVATION, 0]
    assert first[Op.SEND_ACTIVATION, 0].end_s <= first[Op.FORWARD, 1].start_s < arrival.end_s
    arrival = first[Op.RECV_GRADIENT, 0]
    assert second[Op.SEND_GRADIENT, 0].end_s <= second[Op.FORWARD, 1].start_s < arrival.end_s
