"""Carry micro-batches between partitions of one process, each of which has its own thread.

On one device a tensor is handed over as it is. Between devices it is copied on streams that do
nothing else, one a device and micro-batch, so that copies wait for no computation but the one that
makes the tensor, and no computation waits for a copy but the one that takes it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopipe.engine import Gradients, Link, LinkAbove, LinkBelow, Payload, total_bytes
from autopipe.schedule import Instruction, Op, StageProgram
from autopipe.trace import Recorder


class Stopped(Exception):
    """Tell a partition's thread that another one has failed."""


class Mailbox:
    """Hand things from one thread to another, each under its micro-batch."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: dict[int, Any] = {}
        self._stopped = False

    def put(self, micro_batch: int, item: Any) -> None:
        """Leave something for the other thread."""
        with self._changed:
            self._items[micro_batch] = item
            self._changed.notify_all()

    def take(self, micro_batch: int) -> Any:
        """Wait for something; once a thread has failed, nothing more is given out.

        The wait has no time limit, as a layer may take as long as it likes; a failure ends it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or micro_batch in self._items)
            if self._stopped:
                raise Stopped
            item = self._items.pop(micro_batch)
            self._changed.notify_all()
        return item

    def await_empty(self) -> None:
        """Wait until everything has been taken.

        It ends well even if whoever took it has failed since: what the schedule has at the same
        time as the failure runs, whichever thread is faster.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._items)
            if self._items:
                raise Stopped

    def stop(self) -> None:
        """Make every wait, present and future, end in `Stopped`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


@cache
def copy_stream(device: torch.device, micro_batch: int) -> torch.cuda.Stream:
    """Return the stream of a device that copies this micro-batch; fresh ones fragment memory."""
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class _Copy:
    """Hold tensors under way to a device, and the event after which they are there."""

    tensors: tuple[Tensor | None, ...]
    arrived: torch.cuda.Event | None = None


class Crossing:
    """Connect two partitions: activations one way, their gradients the other.

    Args:
        source, target: devices of the partition that sends activations and of the one that takes
            them.
        recorders: theirs; None where nobody traces.
    """

    def __init__(
        self,
        source: torch.device,
        target: torch.device,
        *,
        recorders: tuple[Recorder | None, Recorder | None] = (None, None),
    ) -> None:
        self.activations = Mailbox()
        self.gradients = Mailbox()
        self._source, self._target = source, target
        self._recorders = recorders

    def stop(self) -> None:
        """End all waits."""
        self.activations.stop()
        self.gradients.stop()

    def send(self, micro_batch: int, payload: Payload) -> None:
        """Send activations."""
        cut = tuple(None if t is None else t.detach() for t in payload.tensors)
        noted = self._noted(Op.SEND_ACTIVATION, micro_batch, cut)
        copy = _carry(cut, self._source, self._target, micro_batch, noted=noted)
        needs_gradient = [t is not None and t.requires_grad for t in payload.tensors]
        self.activations.put(micro_batch, (copy, needs_gradient, payload.is_bare))

    def receive(self, micro_batch: int) -> Payload:
        """Wait for activations; they are leaves."""
        copy, needs_gradient, is_bare = self.activations.take(micro_batch)
        leaves = _accept(copy, self._target)
        for leaf, needed in zip(leaves, needs_gradient, strict=True):
            if needed:
                leaf.requires_grad_()
        return Payload(leaves, is_bare)

    def send_gradients(self, micro_batch: int, gradients: Gradients) -> None:
        """Send gradients."""
        noted = self._noted(Op.SEND_GRADIENT, micro_batch, gradients)
        copy = _carry(gradients, self._target, self._source, micro_batch, noted=noted)
        self.gradients.put(micro_batch, copy)

    def receive_gradients(self, micro_batch: int) -> Gradients:
        """Wait for gradients."""
        return _accept(self.gradients.take(micro_batch), self._source)

    def _noted(
        self, send: Op, micro_batch: int, tensors: Gradients
    ) -> AbstractContextManager[None]:
        """Return what notes the transfer while it is open, on the stream that copies."""
        sender, receiver = self._recorders
        if sender is None or receiver is None:
            return nullcontext()
        copies_from, copies_to = self._source, self._target
        if send is Op.SEND_GRADIENT:
            sender, receiver = receiver, sender
            copies_from, copies_to = copies_to, copies_from
        copies = copies_from != copies_to
        return sender.transfer(
            Instruction(send, micro_batch),
            peer=receiver.stage,
            payload_bytes=total_bytes(tensors),
            copied_bytes=total_bytes(tensors) if copies else 0,
            # A copy between two GPUs runs on the stream of the one that it reads from.
            device=(copies_from if copies_from.type == "cuda" else copies_to) if copies else None,
        )


def _carry(
    tensors: Gradients,
    source: torch.device,
    target: torch.device,
    micro_batch: int,
    *,
    noted: AbstractContextManager[None],
) -> _Copy:
    """Copy tensors to the target, if they are not there already."""
    if source == target:
        with noted:
            return _Copy(tensors)
    streams = [
        copy_stream(device, micro_batch) for device in (source, target) if device.type == "cuda"
    ]
    with ExitStack() as stack:
        if source.type == "cuda":
            # Only the computation that makes the tensors is waited for; what the target computes
            # goes on meanwhile.
            streams[0].wait_stream(torch.cuda.current_stream(source))
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        stack.enter_context(noted)
        # Copies to the CPU must be complete before anybody reads them.
        copies = tuple(
            None if t is None else t.to(target, non_blocking=target.type == "cuda")
            for t in tensors
        )
        if source.type == "cuda":
            for tensor in tensors:
                if tensor is not None:
                    # Else its memory could be given away before the copy has read it.
                    tensor.record_stream(streams[0])
        arrived = streams[-1].record_event() if target.type == "cuda" else None
    return _Copy(copies, arrived)


def _accept(copy: _Copy, device: torch.device) -> tuple[Any, ...]:
    """Let the device's present stream wait for a copy, and own its memory."""
    if copy.arrived is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(copy.arrived)
        for tensor in copy.tensors:
            if tensor is not None:
                tensor.record_stream(stream)
    return copy.tensors


@dataclass(frozen=True)
class SkipCrossing:
    """Connect a partition that stashes skips straight to the one that pops them."""

    crossing: Crossing
    num_skips: int


def _parts(tensors: Gradients, skips: Sequence[SkipCrossing]) -> tuple[Gradients, list[Gradients]]:
    """Part a payload's tensors into the hidden state's and those of each skip crossing."""
    first = len(tensors) - sum(skip.num_skips for skip in skips)
    hidden, parts = tensors[:first], []
    for skip in skips:
        parts.append(tensors[first : first + skip.num_skips])
        first += skip.num_skips
    return hidden, parts


class ThreadLink(Link):
    """Hold what both directions share.

    Args:
        hidden: to the neighbouring partition.
        skips: to partitions anywhere on that side.
    """

    def __init__(self, hidden: Crossing, skips: Sequence[SkipCrossing]) -> None:
        self._hidden, self._skips = hidden, skips

    def begin(self, program: StageProgram, sizes: Sequence[int]) -> None:
        """Need nothing: a payload says itself what it is."""

    def flush(self) -> None:
        """Wait for nothing: whatever was sent is in its mailbox."""


class ThreadLinkBelow(ThreadLink, LinkBelow):
    """Take activations from the partition below, and skips from whichever stashed them."""

    def receive(self, micro_batch: int) -> Payload:
        payload = self._hidden.receive(micro_batch)
        tensors = payload.tensors
        for skip in self._skips:
            tensors += skip.crossing.receive(micro_batch).tensors
        return Payload(tensors, payload.is_bare)

    def send_gradients(self, micro_batch: int, gradients: Gradients) -> None:
        hidden, parts = _parts(gradients, self._skips)
        self._hidden.send_gradients(micro_batch, hidden)
        for skip, part in zip(self._skips, parts, strict=True):
            skip.crossing.send_gradients(micro_batch, part)


class ThreadLinkAbove(ThreadLink, LinkAbove):
    """Give activations to the partition above, and skips to whichever pops them."""

    def reserve(self, micro_batch: int) -> None:
        # One micro-batch may wait for the partition above; more would only take memory.
        self._hidden.activations.await_empty()

    def send(self, micro_batch: int, payload: Payload) -> None:
        hidden, parts = _parts(payload.tensors, self._skips)
        # Skips first: whoever takes the hidden state may look for them next.
        for skip, part in zip(self._skips, parts, strict=True):
            skip.crossing.send(micro_batch, Payload(part))
        self._hidden.send(micro_batch, Payload(hidden, payload.is_bare))

    def receive_gradients(self, micro_batch: int) -> Gradients:
        gradients = self._hidden.receive_gradients(micro_batch)
        for skip in self._skips:
            gradients += skip.crossing.receive_gradients(micro_batch)
        return gradients
