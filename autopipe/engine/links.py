"""Say how a stage reaches its neighbours, whatever lies between: processes or threads.

Carry tensors from one process to another, in a known order.

A channel is one direction between two ranks. How its messages travel:

    backend   from and to       a wait blocks           limited by      receives posted ahead
    gloo      host memory       the host                the wait        one
    NCCL      the GPUs' memory  the stream, not the     a watchdog      none
                                host, which launches on

Over gloo a message that arrives during a computation is there at its end, and what lives on a GPU
is copied to host memory to be sent, and back (several processes may share that GPU). Over NCCL a
receive that is posted early occupies the GPU, and a cudaMalloc that has to synchronise would wait
for it, perhaps for good. Headers are in host memory in any case.

Carry micro-batches between the processes of neighbouring stages.

A step begins with a header, so that a receiver knows every shape before it needs it.
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
"""One entry a tensor of the payload that went the other way; None where it gets no gradient."""


@dataclass(frozen=True)
class Payload:
    """Hold what crosses a boundary for one micro-batch.

    Args:
        tensors: the hidden state's tensors, then the skip tensors, which may be None.
        is_bare: whether the hidden state is one tensor by itself rather than a tuple of tensors.
    """

    tensors: tuple[Tensor | None, ...]
    is_bare: bool = True


class Link(ABC):
    """Connect a stage to a neighbour: activations go up, the gradients of their tensors down."""

    def begin(self, program: StageProgram, sizes: Sequence[int]) -> None:  # noqa: B027 - optional
        """Prepare a step of this program with micro-batches of these sizes."""

    def reserve(self, micro_batch: int) -> None:  # noqa: B027 - optional
        """Wait until the stage above has room for one more micro-batch."""

    @abstractmethod
    def send(self, micro_batch: int, payload: Payload) -> None:
        """Send what the neighbour gets of a micro-batch."""

    @abstractmethod
    def receive(self, micro_batch: int) -> Payload:
        """Wait for it; activations are leaves that say whether they need a gradient."""

    def flush(self) -> None:  # noqa: B027 - optional
        """Wait until everything sent has been taken over."""


class RoutedLink(Link):
    """Connect with each worker of a stage: they take micro-batches in turn, in this order."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)

    def begin(self, program: StageProgram, sizes: Sequence[int]) -> None:
        for number, link in enumerate(self.links):
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
    """Describe a micro-batch's tensor, without its first dimension, the sample.

    The dtype is its name in torch, such as "float32"; where `requires_grad` is set the receiver
    owes a gradient.
    """

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
        group: with a CPU backend, and one for the device where that is a GPU.
        tag: keeps channels between the same two ranks apart.
        name: what travels, for error messages.
        watchdog: limits waits between GPUs; None where all messages are in host memory.
        error: raised where a wait fails.
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
        """Start to send or to receive a message, unless an earlier wait has lasted too long."""
        if self.watchdog is not None:
            self.watchdog.check()
        return transfer(message, self.rank, group=self.group, tag=self.tag)

    def wait(self, work: dist.Work | None, message: Tensor, what: str) -> None:
        """Wait for a message: the host, or the current stream where it is on a GPU.

        Raises `error`, which says who waited, where it took too long or the other end is gone.
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
                self.watchdog.check()  # Its abort may be why.
            raise self.error(f"{text} (limit {self.timeout_s:g} s): {error}") from error
        assert self.watchdog is not None, "a message between GPUs that nobody watches"
        self.watchdog.watch(text, self.timeout_s)


class Sender:
    """Send micro-batches without blocking; at a step's end `flush` waits until all have left.

    A message's memory stays referenced until it has left or, between GPUs, until the stream that
    allocated it is to wait for that: what reuses the memory comes later in the same stream.

    Where `most_pending` messages are under way, a further one first waits for the oldest. K do for
    a schedule that keeps K micro-batches in flight.
    """

    def __init__(self, peer: Peer, *, most_pending: int | None = None) -> None:
        self._peer = peer
        self._most_pending = most_pending
        self._pending: deque[tuple[dist.Work | None, Tensor]] = deque()

    def send_header(self, specs: dict[str, TensorSpec]) -> None:
        """Send what the step's tensors look like; raise ValueError if that does not fit."""
        text = json.dumps(
            {name: [list(s.shape), s.dtype, s.requires_grad] for name, s in specs.items()}
        ).encode()
        if len(text) > _HEADER_BYTES:
            raise ValueError(
                f"a batch with {len(specs)} entries needs a header of {len(text)} bytes; "
                f"{_HEADER_BYTES} are allowed: use fewer or shorter entry names"
            )
        self.send(torch.frombuffer(bytearray(text.ljust(_HEADER_BYTES)), dtype=torch.uint8))

    def send(self, tensor: Tensor) -> None:
        """Send a tensor; nobody may change it before `flush`."""
        if self._most_pending is not None and len(self._pending) >= self._most_pending:
            self._await_oldest()
        message = tensor.detach().contiguous()
        if self._peer.watchdog is None:
            message = message.cpu()
        self._pending.append((self._peer.start(dist.isend, message), message))

    def flush(self) -> None:
        """Wait until the receiver has everything; between GPUs for what this rank receives, too.

        After a wait that was aborted the stream goes on with numbers that nobody may use.
        """
        while self._pending:
            self._await_oldest()
        if self._peer.watchdog is not None:
            self._peer.watchdog.settle()

    def _await_oldest(self) -> None:
        peer = self._peer
        work, message = self._pending.popleft()
        peer.wait(work, message, f"for rank {peer.rank} to take its {peer.name}")


class Receiver:
    """Receive micro-batches in a known order, in host memory one receive posted ahead.

    They are brought to the device, if they do not arrive there.
    """

    def __init__(self, peer: Peer, device: torch.device) -> None:
        self._peer = peer
        self.device = device
        self._order: list[int] = []
        self._sizes: Sequence[int] = ()
        self._posted: dict[int, tuple[dist.Work | None, Tensor]] = {}
        self.spec: TensorSpec | None = None

    def begin(self, order: Sequence[int], sizes: Sequence[int]) -> None:
        """Prepare a step of micro-batches of these sizes, which arrive in this order.

        Before the first is received, `spec` is to say what they look like.
        """
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
        """Post the next receive ahead, if its shape is known; between GPUs none is."""
        if self._peer.watchdog is None:
            self._post_next()

    def receive(self, micro_batch: int) -> Tensor:
        assert self.spec is not None, "a receive before its header"
        assert micro_batch in self._posted or micro_batch in self._order, "received twice"
        while micro_batch not in self._posted:
            self._post_next()
        work, buffer = self._posted.pop(micro_batch)
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
    """Receive activations, one tensor each, from the rank below, and send it their gradients.

    Where all below is frozen none is sent back; both ends read that from the same header.
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
            # A stage that ignores its input still owes the neighbour, who waits, a gradient.
            gradient = spec.empty(self._sizes[micro_batch], self.activations.device).zero_()
        self.gradients.send(gradient)

    def flush(self) -> None:
        self.gradients.flush()


class ProcessLinkAbove(Link):
    """Send activations to the rank above, and receive their gradients.

    `needs_gradient` tells whether gradients are sent back: every micro-batch of a step gets one or
    none does, even where some of them reach no trained layer. None asks the first micro-batch.
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
