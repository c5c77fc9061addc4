"""Connect a stage with its neighbours: what a link is, and links between processes.

A sender and a receiver form a channel, one direction between two ranks:

    backend   from and to       a wait blocks           limited by      receives posted ahead
    gloo      host memory       the host                the wait        one
    NCCL      the GPUs' memory  the stream only         a watchdog      none

Over gloo, tensors on a GPU are copied to host memory to be sent, and back (several processes may
share that GPU). A receive posted ahead lets a message arrive during a computation. Over NCCL a
receive posted ahead would occupy the GPU, and a cudaMalloc that synchronises might wait for it
forever. A step begins with a header, always in host memory, which tells the receiver the shapes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.engine.stream_watchdog import Watchdog
from autopipe.schedule import Op, StageProgram

Gradients = tuple[Tensor | None, ...]
"""One entry for each tensor of a payload; None if it gets no gradient."""


@dataclass(frozen=True)
class Payload:
    """Hold what crosses a boundary for one micro-batch.

    Args:
        tensors: the hidden state's tensors, then the skip tensors, which may be None.
        is_bare: whether the hidden state is one tensor rather than a tuple of tensors.
    """

    tensors: tuple[Tensor | None, ...]
    is_bare: bool = True


class Link(ABC):
    """Connect a stage to a neighbour: activations go up, their gradients down."""

    def begin(self, program: StageProgram, sizes: Sequence[int]) -> None:  # noqa: B027 - optional
        """Prepare a step of this program with micro-batches of these sizes."""

    def reserve(self, micro_batch: int) -> None:  # noqa: B027 - optional
        """Wait until the stage above has room for one more micro-batch."""

    @abstractmethod
    def send(self, micro_batch: int, payload: Payload) -> None:
        """Send a micro-batch's payload to the neighbour."""

    @abstractmethod
    def receive(self, micro_batch: int) -> Payload:
        """Wait for a micro-batch's payload; activations are leaves with `requires_grad` set."""

    def flush(self) -> None:  # noqa: B027 - optional
        """Wait until the neighbour has everything that was sent."""


class RoutedLink(Link):
    """Connect with each worker of a stage; they take micro-batches in turn."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)

    def begin(self, program: StageProgram, sizes: Sequence[int]) -> None:
        for number, link in enumerate(self.links):
            # As `StageWorkers.of` numbers them: micro-batch i goes to worker i % n.
            own = (ins for ins in program if ins.micro_batch % len(self.links) == number)
            link.begin(tuple(own), sizes)

    def reserve(self, micro_batch: int) -> None:
        self._to(micro_batch).reserve(micro_batch)

    def send(self, micro_batch: int, payload: Payload) -> None:
        self._to(micro_batch).send(micro_batch, payload)

    def receive(self, micro_batch: int) -> Payload:
        return self._to(micro_batch).receive(micro_batch)

    def flush(self) -> None:
        for link in self.links:
            link.flush()

    def _to(self, micro_batch: int) -> Link:
        return self.links[micro_batch % len(self.links)]


_HEADER_BYTES = 1024


@dataclass(frozen=True)
class TensorSpec:
    """Describe a sample's tensor, its dtype by name, and whether a gradient is sent back."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        return TensorSpec(
            tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad
        )

    def empty(self, num_samples: int, device: torch.device) -> Tensor:
        return torch.empty(
            (num_samples, *self.shape), dtype=getattr(torch, self.dtype), device=device
        )


@dataclass(frozen=True)
class Peer:
    """Name the other end of a channel, for torch and for messages.

    Args:
        rank: global, not the group's.
        group: with a CPU backend, and for messages between GPUs also the GPU's.
        tag: keeps channels between the same two ranks apart.
        name: what travels, for error messages.
        watchdog: limits waits between GPUs; None if all messages are in host memory.
        error: raised if a wait fails.
    """

    rank: int
    group: dist.ProcessGroup
    tag: int
    name: str
    timeout_s: float
    watchdog: Watchdog | None = None
    error: type[RuntimeError] = RuntimeError

    def start(
        self, transfer: Callable[..., dist.Work | None], message: Tensor
    ) -> dist.Work | None:
        """Start to send or receive a message, unless an earlier wait has lasted too long."""
        if self.watchdog is not None:
            self.watchdog.check()
        return transfer(message, self.rank, group=self.group, tag=self.tag)

    def wait(self, work: dist.Work | None, message: Tensor, what: str) -> None:
        """Let the host, or a GPU's current stream, wait for a message.

        Raises:
            the peer's error: it took too long, or the other end is gone.
        """
        if work is None:
            return
        text = f"rank {dist.get_rank()} waited {what}"
        try:
            if message.is_cpu:
                work.wait(timedelta(seconds=self.timeout_s))
                return
            work.wait()
        except RuntimeError as error:
            if self.watchdog is not None:
                self.watchdog.check()  # Its abort may be the cause, and it knows who waited.
            raise self.error(f"{text} (limit {self.timeout_s:g} s): {error}") from error
        assert self.watchdog is not None, "a message between GPUs that nobody watches"
        self.watchdog.watch(text, self.timeout_s)


class Sender:
    """Send micro-batches without blocking; at a step's end `flush` waits until all have left.

    Between GPUs only the stream waits: before a number leaves the process, the watchdog settles.

    Args:
        most_pending: messages under way before a further one waits for the oldest; K suffice for
            a schedule that keeps K micro-batches in flight. None for no limit.
    """

    def __init__(self, peer: Peer, *, most_pending: int | None = None) -> None:
        self._peer = peer
        self._most_pending = most_pending
        # Holds each message's memory until it has left. Between GPUs, until the stream waits for
        # that: whatever reuses the memory comes later in the same stream.
        self._pending: deque[tuple[dist.Work | None, Tensor]] = deque()

    def send_header(self, specs: dict[str, TensorSpec]) -> None:
        """Send the step's tensor specs; a ValueError if they exceed the header's bytes."""
        text = json.dumps(
            {name: [list(s.shape), s.dtype, s.requires_grad] for name, s in specs.items()}
        ).encode()
        if len(text) > _HEADER_BYTES:
            raise ValueError(
                f"a batch with {len(specs)} entries needs a header of {len(text)} bytes; "
                f"{_HEADER_BYTES} are allowed: use fewer or shorter entry names"
            )
        # Padded to a fixed size, so that the receiver can post it without knowing the entries.
        self.send(torch.frombuffer(bytearray(text.ljust(_HEADER_BYTES)), dtype=torch.uint8))

    def send(self, tensor: Tensor) -> None:
        """Send a tensor, which must not change before `flush`."""
        if self._most_pending is not None and len(self._pending) >= self._most_pending:
            self._await_oldest()
        # Transports need contiguous memory; the copy, if any, is kept in `_pending`.
        message = tensor.detach().contiguous()
        if self._peer.watchdog is None:
            message = message.cpu()
        self._pending.append((self._peer.start(dist.isend, message), message))

    def flush(self) -> None:
        """Wait, or let the stream wait, until the receiver has everything."""
        while self._pending:
            self._await_oldest()

    def _await_oldest(self) -> None:
        peer = self._peer
        work, message = self._pending.popleft()
        peer.wait(work, message, f"for rank {peer.rank} to take its {peer.name}")


class Receiver:
    """Receive micro-batches in a known order, and bring them to the device.

    In host memory one receive is posted ahead.
    """

    def __init__(self, peer: Peer, device: torch.device) -> None:
        self._peer = peer
        self.device = device
        self._order: list[int] = []
        self._sizes: Sequence[int] = ()
        self._posted: dict[int, tuple[dist.Work | None, Tensor]] = {}
        self.spec: TensorSpec | None = None

    def begin(self, order: Sequence[int], sizes: Sequence[int]) -> None:
        """Prepare a step's arrivals, in order; set `spec` before the first is received."""
        self._order, self._sizes, self.spec = list(order), sizes, None
        self._posted.clear()

    def receive_header(self) -> dict[str, TensorSpec]:
        text = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        self._wait(self._peer.start(dist.irecv, text), text)
        return {
            name: TensorSpec(tuple(shape), dtype, grad)
            for name, (shape, dtype, grad) in json.loads(text.numpy().tobytes()).items()
        }

    def post(self) -> None:
        """Post the next receive ahead, if its shape is known; never between GPUs."""
        if self._peer.watchdog is None:
            self._post_next()

    def receive(self, micro_batch: int) -> Tensor:
        assert self.spec is not None, "a receive before its header"
        assert micro_batch in self._posted or micro_batch in self._order, "received twice"
        while micro_batch not in self._posted:
            self._post_next()
        work, buffer = self._posted.pop(micro_batch)
        # The next one can arrive while this one is waited for and computed.
        self.post()
        self._wait(work, buffer)
        return buffer.to(self.device)

    def _post_next(self) -> None:
        if self.spec is not None and self._order:
            i = self._order.pop(0)
            place = torch.device("cpu") if self._peer.watchdog is None else self.device
            buffer = self.spec.empty(self._sizes[i], place)
            self._posted[i] = (self._peer.start(dist.irecv, buffer), buffer)

    def _wait(self, work: dist.Work | None, message: Tensor) -> None:
        self._peer.wait(work, message, f"for the {self._peer.name} of rank {self._peer.rank}")


class ProcessLinkBelow(Link):
    """Receive activations, one tensor each, from the rank below, and send their gradients back.

    None goes back if everything below is frozen; both ends know it from the header.
    """

    def __init__(self, activations: Receiver, gradients: Sender) -> None:
        self.activations = activations
        self.gradients = gradients
        self._sizes: Sequence[int] = ()

    def begin(self, program: StageProgram, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self.activations.begin(_order(program, Op.RECV_ACTIVATION), sizes)

    def receive(self, micro_batch: int) -> Payload:
        receiver = self.activations
        if receiver.spec is None:
            receiver.spec = receiver.receive_header()["hidden"]
            receiver.post()
        hidden = receiver.receive(micro_batch)
        needs_gradient = receiver.spec.requires_grad and torch.is_grad_enabled()
        return Payload((hidden.requires_grad_(needs_gradient),))

    def send(self, micro_batch: int, payload: Payload) -> None:
        spec = self.activations.spec
        assert spec is not None, "gradients of an activation that never came"
        if not spec.requires_grad:
            return
        gradient = payload.tensors[0]
        if gradient is None:
            # The neighbour waits for a gradient, even of an input that this stage ignores.
            gradient = spec.empty(self._sizes[micro_batch], self.activations.device).zero_()
        self.gradients.send(gradient)

    def flush(self) -> None:
        self.gradients.flush()


class ProcessLinkAbove(Link):
    """Send activations to the rank above, and receive their gradients.

    Args:
        needs_gradient: whether gradients come back, for all micro-batches of a step or for none.
            None asks the first micro-batch.
    """

    def __init__(
        self, activations: Sender, gradients: Receiver, *, needs_gradient: bool | None = None
    ) -> None:
        self.activations = activations
        self.gradients = gradients
        self._needs_gradient = needs_gradient

    def begin(self, program: StageProgram, sizes: Sequence[int]) -> None:
        self.gradients.begin(_order(program, Op.RECV_GRADIENT), sizes)

    def send(self, micro_batch: int, payload: Payload) -> None:
        hidden = payload.tensors[0]
        if hidden is None or len(payload.tensors) > 1 or not payload.is_bare:
            raise TypeError(
                f"a stage of a process pipeline returned {len(payload.tensors)} "
                "tensors; it must return one: move the others into the batch"
            )
        spec = TensorSpec.of(hidden)
        if self._needs_gradient is not None and hidden.is_floating_point():
            spec = replace(spec, requires_grad=self._needs_gradient)
        receiver = self.gradients
        if receiver.spec is None:
            self.activations.send_header({"hidden": spec})
            receiver.spec = spec
            if spec.requires_grad:
                receiver.post()
        elif receiver.spec != spec:
            raise ValueError(
                f"micro-batch {micro_batch} leaves the stage as {spec}, the step's "
                f"first one as {receiver.spec}; samples of one step need one shape: "
                "pad them"
            )
        self.activations.send(hidden)

    def receive(self, micro_batch: int) -> Payload:
        spec = self.gradients.spec
        assert spec is not None, "gradients of an activation that was never sent"
        return Payload((self.gradients.receive(micro_batch) if spec.requires_grad else None,))

    def flush(self) -> None:
        self.activations.flush()


def _order(program: StageProgram, op: Op) -> list[int]:
    return [instruction.micro_batch for instruction in program if instruction.op is op]
