"""Record what one stage does and keeps in a step; devices are read only at the end."""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopipe.schedule import Instruction, Op
from autopipe.trace.span import Span

Moment = Callable[[], float]
"""Returns seconds of `time.perf_counter`; waits until a device has reached the moment."""


class Clocks:
    """Mark the present moment, on the host or on a device's current stream, to be read later.

    Clocks of host and device are compared once, on an idle device. The error is that of one launch
    and one wait, about ten microseconds.
    """

    def __init__(self) -> None:
        self._origins: dict[torch.device, tuple[torch.cuda.Event, float]] = {}

    def watch(self, device: torch.device | None) -> None:
        """Prepare for marks of a device; waits for a CUDA device."""
        if device is None or device.type != "cuda" or device in self._origins:
            return
        torch.cuda.synchronize(device)
        origin = torch.cuda.Event(enable_timing=True)
        before_s = time.perf_counter()
        origin.record(torch.cuda.current_stream(device))
        origin.synchronize()
        # The event happened between the two readings of the host's clock: take the middle.
        self._origins[device] = origin, (before_s + time.perf_counter()) / 2

    def mark(self, device: torch.device | None) -> Moment:
        """Mark now; on a CUDA device, the moment when its current stream gets here."""
        if device is None or device.type != "cuda":
            now_s = time.perf_counter()
            return lambda: now_s
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        origin, origin_s = self._origins[device]

        def reached_s() -> float:
            event.synchronize()
            return origin_s + origin.elapsed_time(event) / 1e3

        return reached_s


class _View(NamedTuple):
    """Name a part of a storage by its addresses; equal views are the same memory."""

    storage: int
    start: int
    num_bytes: int


@dataclass
class _Storage:
    """Count the holders of a storage's parts, which may overlap."""

    total_bytes: int
    holders: Counter[_View] = field(default_factory=Counter)

    def num_bytes(self) -> int:
        # Overlapping views add up to too much, but never to more than the storage has.
        return min(self.total_bytes, sum(view.num_bytes for view in self.holders))


class KeptMemory:
    """Count the bytes of one stage's activations that graphs saved or that wait as inputs.

    Each memory counts once, however many graphs and views hold it. Parameters and their views do
    not count. Tensors in a layer's own saved-tensor hooks are not seen, nor those that an
    autograd.Function keeps without `save_for_backward`.

    Attributes:
        peak_bytes: the most kept since it was last set.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._num_bytes = 0
        self._storages: dict[int, _Storage] = {}
        self._inputs: list[_View] = []
        # Any thread may free a graph, even during a count: freed views wait here.
        self._released: deque[_View] = deque()

    def count_bytes(self) -> int:
        """Forget what graphs have freed; return the bytes that are kept."""
        while self._released:
            self._let_go(self._released.popleft())
        return self._num_bytes

    def counting(self) -> AbstractContextManager[Any]:
        """Count what graphs built inside save, until they free it."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def set_inputs(self, tensors: Sequence[Tensor | None]) -> None:
        """Count these tensors, too, until the next call; no reference to them is kept."""
        self._released.extend(self._inputs)
        self._inputs = [self._keep(tensor) for tensor in tensors if tensor is not None]

    def _pack(self, tensor: Tensor) -> _Saved:
        # Detached: a graph that held its own output would be a cycle, and never be freed.
        saved = _Saved(tensor.detach(), tensor._version)
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, nn.Parameter):
            weakref.finalize(saved, self._released.append, self._keep(tensor))
        return saved

    def _keep(self, tensor: Tensor) -> _View:
        if tensor.layout is torch.strided:
            whole = tensor.untyped_storage()
            view = _View(whole.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            total_bytes = whole.nbytes()
        else:
            # Other layouts, such as sparse ones, have several storages: count the tensor.
            view, total_bytes = _View(id(tensor), 0, tensor.nbytes), tensor.nbytes
        kept_bytes = self.count_bytes()
        storage = self._storages.setdefault(view.storage, _Storage(total_bytes))
        before = storage.num_bytes()
        storage.holders[view] += 1
        self._num_bytes = kept_bytes + storage.num_bytes() - before
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)
        return view

    def _let_go(self, view: _View) -> None:
        storage = self._storages[view.storage]
        before = storage.num_bytes()
        storage.holders[view] -= 1
        if not storage.holders[view]:
            del storage.holders[view]
        self._num_bytes += storage.num_bytes() - before
        if not storage.holders:
            del self._storages[view.storage]


@dataclass(eq=False)
class _Saved:
    """Hold a saved tensor in a graph; it dies when the graph frees the tensor."""

    tensor: Tensor
    version: int


def _unpack(saved: _Saved) -> Tensor:
    # torch does not check versions of tensors that hooks pack.
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a {tuple(saved.tensor.shape)} tensor is at version "
            f"{saved.tensor._version}; expected version {saved.version}"
        )
    return saved.tensor


class Recorder:
    """Record what one stage does in one step: when, what it sends and what it keeps.

    Args:
        step: the mini-batch's number; each mini-batch has its own recorder.
        device: where the stage computes; a CUDA device's own clock is read.
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
        """Return all spans in the order in which they ended; waits for devices."""
        return [read() for read in self._readers]

    def _note(self, span: Span, start: Moment, end: Moment) -> None:
        self._readers.append(lambda: replace(span, start_s=start(), end_s=end()))

    @contextmanager
    def span(self, instruction: Instruction, *, sent_bytes: int = 0) -> Iterator[None]:
        """Note when the instruction inside ran, even if it fails.

        Args:
            sent_bytes: what it gives to a link. If the link notes no transfer itself, a transfer
                to the neighbour is noted with the instruction's times.
        """
        self._num_transfers = 0
        memory = self._memory
        memory.peak_bytes = memory.count_bytes()
        builds_graph = instruction.op in (Op.FORWARD, Op.RECOMPUTE)
        self._start = self._clocks.mark(self._device)
        try:
            with memory.counting() if builds_graph else nullcontext():
                yield
        finally:
            span = Span(
                self.stage, instruction.op, instruction.micro_batch, 0.0, 0.0,
                step=self.step, num_in_flight=self._in_flight, num_graphs=self._graphs,
                kept_bytes=memory.count_bytes(), peak_bytes=memory.peak_bytes,
            )  # fmt: skip
            start, end = self._start, self._clocks.mark(self._device)
            self._note(span, start, end)
            if sent_bytes and not self._num_transfers:
                peer = self.stage + (1 if instruction.op is Op.SEND_ACTIVATION else -1)
                sent = replace(span, peer=peer, num_bytes=sent_bytes, payload_bytes=sent_bytes)
                self._note(sent, start, end)

    def starts_forward(self) -> None:
        """Restart the present span: a wait for room is over."""
        self._start = self._clocks.mark(self._device)

    def keeps(self, *, in_flight: int, graphs: int, inputs: Sequence[Tensor | None]) -> None:
        """Note what the stage keeps at the end of the span: see `Span`; inputs outside graphs."""
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
        """Note a transfer to a peer; `device` is the one whose current stream copies."""
        self._num_transfers += 1
        start = self._clocks.mark(device)
        yield
        span = Span(
            self.stage, instruction.op, instruction.micro_batch, 0.0, 0.0, copied_bytes,
            payload_bytes, peer, self.step,
        )  # fmt: skip
        self._note(span, start, self._clocks.mark(device))
