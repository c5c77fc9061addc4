"""Carry micro-batches between the processes of neighbouring stages.

A channel is one direction between two ranks. The first message of a step is a header of fixed
length that says what a micro-batch looks like, so that a receiver knows every shape before it
needs it. The receiver keeps one receive posted ahead of the one it waits for: a message that
arrives during a computation is there at its end.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.link import Gradients, LinkAbove, LinkBelow, Payload
from autopipe.schedule import Op, StageProgram

_HEADER_BYTES = 1024


class LinkError(RuntimeError):
    """Say who waited for what, and why it failed: a time limit, or a neighbour that is gone."""


@dataclass(frozen=True)
class TensorSpec:
    """Describe a micro-batch's tensor, without its first dimension.

    Args:
        shape: sizes after the sample dimension.
        dtype: name in torch, for instance "float32".
        requires_grad: whether the receiver owes a gradient.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """Describe a tensor whose first dimension is the sample."""
        return TensorSpec(
            tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad
        )

    def empty(self, num_samples: int, device: torch.device) -> Tensor:
        """Return uninitialised memory for a micro-batch."""
        return torch.empty(
            (num_samples, *self.shape), dtype=getattr(torch, self.dtype), device=device
        )


@dataclass(frozen=True)
class Peer:
    """Name the other end of a channel, for torch and for messages.

    Args:
        rank: global rank.
        group: group with a CPU backend, and one for the device where that is a GPU.
        tag: keeps channels between the same two ranks apart.
        name: what travels, for error messages.
        timeout_s: longest wait for one message.
    """

    rank: int
    group: dist.ProcessGroup
    tag: int
    name: str
    timeout_s: float


class Sender:
    """Send micro-batches without blocking; at a step's end `flush` waits until all have left.

    Args:
        peer: the receiver.
        most_pending: messages that may be under way; a further one first waits for the oldest.
            K suffices for a schedule that keeps K micro-batches in flight: the receiver has
            taken the older ones. None bounds nothing.
    """

    def __init__(self, peer: Peer, *, most_pending: int | None = None) -> None:
        self._peer = peer
        self._most_pending = most_pending
        self._pending: deque[tuple[dist.Work | None, Tensor]] = deque()

    def send_header(self, specs: dict[str, TensorSpec]) -> None:
        """Send what the step's tensors look like.

        Raises:
            ValueError: the description does not fit the header.
        """
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
        """Send a tensor; its memory stays referenced until it has left."""
        if self._most_pending is not None and len(self._pending) >= self._most_pending:
            self._await_oldest()
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, self._peer.rank, group=self._peer.group, tag=self._peer.tag)
        self._pending.append((work, tensor))

    def flush(self) -> None:
        """Wait until everything has been taken over by the receiver."""
        while self._pending:
            self._await_oldest()

    def _await_oldest(self) -> None:
        work, _ = self._pending.popleft()
        _wait(work, self._peer, f"for rank {self._peer.rank} to take its {self._peer.name}")


class Receiver:
    """Receive micro-batches in a known order, one receive posted ahead."""

    def __init__(self, peer: Peer, device: torch.device) -> None:
        self._peer = peer
        self.device = device
        self._order: list[int] = []
        self._sizes: Sequence[int] = ()
        self._posted: dict[int, tuple[dist.Work | None, Tensor]] = {}
        self.spec: TensorSpec | None = None
        self.waited_s = 0.0

    def begin(
        self, order: Sequence[int], sizes: Sequence[int], spec: TensorSpec | None = None
    ) -> None:
        """Prepare a step.

        Args:
            order: micro-batches in the order in which they arrive.
            sizes: samples of every micro-batch.
            spec: what they look like; None where a header says so.
        """
        self._order, self._sizes, self.spec = list(order), sizes, spec
        self._posted.clear()

    def receive_header(self) -> dict[str, TensorSpec]:
        """Receive what the step's tensors look like."""
        text = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        work = dist.irecv(text, self._peer.rank, group=self._peer.group, tag=self._peer.tag)
        self._timed_wait(work)
        return {
            name: TensorSpec(tuple(shape), dtype, grad)
            for name, (shape, dtype, grad) in json.loads(text.numpy().tobytes()).items()
        }

    def post(self) -> None:
        """Post the next receive, if its shape is known."""
        if self.spec is not None and self._order:
            i = self._order.pop(0)
            buffer = self.spec.empty(self._sizes[i], self.device)
            work = dist.irecv(buffer, self._peer.rank, group=self._peer.group, tag=self._peer.tag)
            self._posted[i] = (work, buffer)

    def receive(self, micro_batch: int) -> Tensor:
        """Wait for a micro-batch."""
        assert self.spec is not None, "a receive before its header"
        assert micro_batch in self._posted or micro_batch in self._order, "received twice"
        while micro_batch not in self._posted:
            self.post()
        work, buffer = self._posted.pop(micro_batch)
        self.post()
        self._timed_wait(work)
        return buffer

    def _timed_wait(self, work: dist.Work | None) -> None:
        start = time.perf_counter()
        _wait(work, self._peer, f"for the {self._peer.name} of rank {self._peer.rank}")
        self.waited_s += time.perf_counter() - start


class ProcessLinkBelow(LinkBelow):
    """Receive activations from the rank below, and send it their gradients.

    A hidden state is one tensor here. Where it needs no gradient (all below is frozen) none is
    sent back; both ends read that from the same header.
    """

    def __init__(self, activations: Receiver, gradients: Sender) -> None:
        self.activations = activations
        self.gradients = gradients
        self._sizes: Sequence[int] = ()

    @property
    def waited_s(self) -> float:
        """Return the seconds waited so far, over all steps."""
        return self.activations.waited_s

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

    def send_gradients(self, micro_batch: int, gradients: Gradients) -> None:
        spec = self.activations.spec
        assert spec is not None, "gradients of an activation that never came"
        if not spec.requires_grad:
            return
        gradient = gradients[0]
        if gradient is None:
            # A stage that ignores its input still owes the neighbour, who waits, a gradient.
            gradient = spec.empty(self._sizes[micro_batch], self.activations.device).zero_()
        self.gradients.send(gradient)

    def flush(self) -> None:
        self.gradients.flush()


class ProcessLinkAbove(LinkAbove):
    """Send activations to the rank above, and receive their gradients.

    Args:
        activations, gradients: the two directions.
        needs_gradient: whether gradients are sent back; every micro-batch of a step gets one or
            none does, even where some of them reach no trained layer. None takes it from the
            first micro-batch.
    """

    def __init__(
        self, activations: Sender, gradients: Receiver, *, needs_gradient: bool | None = None
    ) -> None:
        self.activations = activations
        self.gradients = gradients
        self._needs_gradient = needs_gradient

    @property
    def waited_s(self) -> float:
        """Return the seconds waited so far, over all steps."""
        return self.gradients.waited_s

    def begin(self, program: StageProgram, sizes: Sequence[int]) -> None:
        self.gradients.begin(_order(program, Op.RECV_GRADIENT), sizes)

    def reserve(self, micro_batch: int) -> None:
        """Wait for nothing: the sender bounds what is under way."""

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

    def receive_gradients(self, micro_batch: int) -> Gradients:
        spec = self.gradients.spec
        assert spec is not None, "gradients of an activation that was never sent"
        return (self.gradients.receive(micro_batch),) if spec.requires_grad else (None,)

    def flush(self) -> None:
        self.activations.flush()


def _order(program: StageProgram, op: Op) -> list[int]:
    return [instruction.micro_batch for instruction in program if instruction.op is op]


def _wait(work: dist.Work | None, peer: Peer, what: str) -> None:
    """Wait with the peer's timeout, and say who waited for what if it passes."""
    if work is None:
        return
    try:
        work.wait(timedelta(seconds=peer.timeout_s))
    except RuntimeError as error:
        raise LinkError(
            f"rank {dist.get_rank()} waited {what} (limit {peer.timeout_s:g} s): {error}"
        ) from error
