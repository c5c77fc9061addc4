"""Take down what one stage does in a step; nothing is read from a device before the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from autopipe.schedule import Instruction, Op
from autopipe.trace.span import Span
from autopipe.trace.summary import KeptMemory

Moment = Callable[[], float]
"""Returns seconds of `time.perf_counter`; waits for a device to get there."""


class Clocks:
    """Mark the present moment, on the host or on a device's current stream, to be read later.

    Clocks of host and device are compared once, when the device has nothing to do; the error is
    that of one launch and one wait, some ten microseconds.
    """

    def __init__(self) -> None:
        self._origins: dict[torch.device, tuple[torch.cuda.Event, float]] = {}

    def watch(self, device: torch.device | None) -> None:
        """Prepare for marks of a device; a CUDA device is waited for."""
        if device is None or device.type != "cuda" or device in self._origins:
            return
        torch.cuda.synchronize(device)
        origin = torch.cuda.Event(enable_timing=True)
        before_s = time.perf_counter()
        origin.record(torch.cuda.current_stream(device))
        origin.synchronize()
        self._origins[device] = origin, (before_s + time.perf_counter()) / 2

    def mark(self, device: torch.device | None) -> Moment:
        """Mark now; on a CUDA device, when its current stream will have come here."""
        if device is None or device.type != "cuda":
            now_s = time.perf_counter()
            return lambda: now_s
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        origin, origin_s = self._origins[device]

        def came_s() -> float:
            event.synchronize()
            return origin_s + origin.elapsed_time(event) / 1e3

        return came_s


class Recorder:
    """Note what one stage does in one step: when, what it sends and what it keeps.

    Args:
        step: number of the mini-batch; each has its own recorder.
        device: where the stage computes; a CUDA device tells its own times.
        clocks: shared by the recorders of a trace.
    """

    def __init__(
        self,
        stage: int,
        *,
        step: int = 0,
        device: torch.device | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self.stage, self.step = stage, step
        self._device = device
        self._clocks = Clocks() if clocks is None else clocks
        self._clocks.watch(device)
        self._readers: list[Callable[[], Span]] = []
        self._memory = KeptMemory()
        self._start = self._clocks.mark(None)
        self._num_transfers = 0
        self._in_flight = self._graphs = 0

    @property
    def spans(self) -> list[Span]:
        """Return all spans in the order in which they ended; devices are waited for."""
        return [read() for read in self._readers]

    def _note(self, span: Span, start: Moment, end: Moment) -> None:
        """Keep a span whose times are read later."""
        self._readers.append(lambda: replace(span, start_s=start(), end_s=end()))

    @contextmanager
    def span(self, instruction: Instruction, *, sent_bytes: int = 0) -> Iterator[None]:
        """Note when the instruction inside ran, also one that fails.

        Args:
            sent_bytes: what it gives to a link. If the link notes no transfer, it goes to the
                neighbour's memory, and its span is the instruction's.
        """
        self._num_transfers = 0
        memory = self._memory
        memory.peak_bytes = memory.num_bytes
        builds_graph = instruction.op in (Op.FORWARD, Op.RECOMPUTE)
        self._start = self._clocks.mark(self._device)
        try:
            with memory.counting() if builds_graph else nullcontext():
                yield
        finally:
            span = Span(
                self.stage, instruction.op, instruction.micro_batch, 0.0, 0.0,
                step=self.step, num_in_flight=self._in_flight, num_graphs=self._graphs,
                kept_bytes=memory.num_bytes, peak_bytes=memory.peak_bytes,
            )  # fmt: skip
            start, end = self._start, self._clocks.mark(self._device)
            self._note(span, start, end)
            if sent_bytes and not self._num_transfers:
                peer = self.stage + (1 if instruction.op is Op.SEND_ACTIVATION else -1)
                sent = replace(span, peer=peer, num_bytes=sent_bytes, payload_bytes=sent_bytes)
                self._note(sent, start, end)

    def starts_forward(self) -> None:
        """Let the present span begin only now, after a wait for room."""
        self._start = self._clocks.mark(self._device)

    def keeps(self, *, in_flight: int, graphs: int, inputs: Sequence[Tensor | None]) -> None:
        """Note what the stage keeps at the end of the present span.

        They are micro-batches of which it keeps anything, or a graph; and the inputs that it keeps
        by itself, for a forward to come or to be repeated.
        """
        self._in_flight, self._graphs = in_flight, graphs
        self._memory.set_inputs(inputs)

    @contextmanager
    def transfer(
        self,
        instruction: Instruction,
        *,
        peer: int,
        payload_bytes: int,
        copied_bytes: int,
        device: torch.device | None,
    ) -> Iterator[None]:
        """Note a transfer to a peer: a send's, by the device whose current stream copies."""
        self._num_transfers += 1
        start = self._clocks.mark(device)
        yield
        span = Span(
            self.stage, instruction.op, instruction.micro_batch, 0.0, 0.0, copied_bytes,
            payload_bytes, peer, self.step,
        )  # fmt: skip
        self._note(span, start, self._clocks.mark(device))
