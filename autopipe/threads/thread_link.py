"""Carry micro-batches between partitions that are threads of one process.

On one device a tensor is handed over as it is. Between devices it is copied on streams of its own,
one per device and micro-batch. So a copy waits only for the tensor's computation. Only the
computation that takes the tensor waits for the copy.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopipe.engine import Link, Payload, total_bytes
from autopipe.schedule import Instruction, Op
from autopipe.trace import Recorder


class Stopped(Exception):
    """Tell a partition's thread that another thread has failed."""


class Mailbox:
    """Hand things from one thread to another, each under its micro-batch."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: dict[int, Any] = {}
        self._stopped = False

    def put(self, micro_batch: int, item: Any) -> None:
        with self._changed:
            self._items[micro_batch] = item
            self._changed.notify_all()

    def take(self, micro_batch: int) -> Any:
        """Wait for a micro-batch's item, without a limit; raise `Stopped` after a failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or micro_batch in self._items)
            if self._stopped:
                raise Stopped
            item = self._items.pop(micro_batch)
            self._changed.notify_all()
        return item

    def await_empty(self) -> None:
        """Wait until everything has been taken; raise `Stopped` if it will not be."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._items)
            # An empty box passes even when stopped: what the schedule runs beside a failure does
            # not depend on which thread is faster.
            if self._items:
                raise Stopped

    def stop(self) -> None:
        """Make every wait, present and future, end in `Stopped`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


@cache
def copy_stream(device: torch.device, micro_batch: int) -> torch.cuda.Stream:
    """Return the device's stream that copies this micro-batch."""
    # Cached, because memory is pooled by stream, and fresh streams would fragment it.
    return torch.cuda.Stream(device)


class Crossing:
    """Carry tensors one way between two partitions: a number of skips, or the hidden state.

    `recorders` are the sender's and the receiver's; None without a trace.
    """

    def __init__(
        self,
        op: Op,
        source: torch.device,
        target: torch.device,
        *,
        num_skips: int | None = None,
        recorders: tuple[Recorder | None, Recorder | None] = (None, None),
    ) -> None:
        self.op, self.num_skips = op, num_skips
        self.mailbox = Mailbox()
        self._source, self._target = source, target
        self._copies = source != target
        self._recorders = recorders

    def send(self, micro_batch: int, payload: Payload) -> None:
        from_cuda = self._copies and self._source.type == "cuda"
        to_cuda = self._copies and self._target.type == "cuda"
        devices = [self._source] * from_cuda + [self._target] * to_cuda
        streams = [copy_stream(device, micro_batch) for device in devices]
        with ExitStack() as stack:
            if from_cuda:
                # Wait for the computation that makes the tensors, not for the target's.
                streams[0].wait_stream(torch.cuda.current_stream(self._source))
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(self._noted(micro_batch, payload))
            sent = tuple(t if t is None else _to(self._target, t) for t in payload.tensors)
            if from_cuda:
                # Else the source's memory could be reused before the copy has read it.
                _own(payload, streams[0])
            arrived = streams[-1].record_event() if to_cuda else None
        self.mailbox.put(micro_batch, (Payload(sent, payload.is_bare), arrived))

    def receive(self, micro_batch: int) -> Payload:
        payload, arrived = self.mailbox.take(micro_batch)
        if arrived is not None:
            stream = torch.cuda.current_stream(self._target)
            stream.wait_event(arrived)
            _own(payload, stream)
        return payload

    def _noted(self, micro_batch: int, payload: Payload) -> AbstractContextManager[None]:
        sender, receiver = self._recorders
        if sender is None or receiver is None:
            return nullcontext()
        num_bytes = total_bytes(payload.tensors)
        # A copy between two GPUs runs on the source's stream.
        device = self._source if self._source.type == "cuda" else self._target
        return sender.transfer(
            Instruction(self.op, micro_batch),
            peer=receiver.stage,
            payload_bytes=num_bytes,
            copied_bytes=num_bytes * self._copies,
            device=device if self._copies else None,
        )


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    # A copy to the CPU blocks: no event would tell its reader that it is complete.
    copy = tensor.detach().to(device, non_blocking=device.type == "cuda")
    return copy.requires_grad_(tensor.requires_grad)


def _own(payload: Payload, stream: torch.cuda.Stream) -> None:
    """Keep the tensors' memory until the stream has finished its present work."""
    for tensor in payload.tensors:
        if tensor is not None:
            tensor.record_stream(stream)


class ThreadLink(Link):
    """Send to and receive from the partitions on one side."""

    def __init__(self) -> None:
        self._incoming: list[Crossing] = []
        self._outgoing: list[Crossing] = []

    def add(self, *, incoming: Crossing, outgoing: Crossing) -> None:
        """Add a way: first the neighbour's, then those of skips in the payload's order."""
        self._incoming.append(incoming)
        self._outgoing.append(outgoing)

    def reserve(self, micro_batch: int) -> None:
        # One micro-batch may wait for the partition above; more would only cost memory.
        self._outgoing[0].mailbox.await_empty()

    def receive(self, micro_batch: int) -> Payload:
        payloads = [crossing.receive(micro_batch) for crossing in self._incoming]
        tensors = tuple(tensor for payload in payloads for tensor in payload.tensors)
        return Payload(tensors, payloads[0].is_bare)

    def send(self, micro_batch: int, payload: Payload) -> None:
        # Skips first, because the receiver of the hidden state looks for them next.
        end = len(payload.tensors)
        for crossing in reversed(self._outgoing):
            start = 0 if crossing.num_skips is None else end - crossing.num_skips
            crossing.send(micro_batch, Payload(payload.tensors[start:end], payload.is_bare))
            end = start
