"""Carry micro-batches between the processes of neighbouring stages.

A step begins with a header, so that a receiver knows every shape before it needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from autopipe.engine.channel import Receiver, Sender, TensorSpec
from autopipe.engine.link import Link, Payload
from autopipe.schedule import Op, StageProgram


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
