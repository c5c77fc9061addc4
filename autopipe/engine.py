"""Run one stage's program: the instructions of a schedule, in order.

Each micro-batch has its own local graph on each stage, and its own backward.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopipe.link import Receiver, Sender, TensorSpec
from autopipe.schedule import Op, StageProgram


class StageWork(ABC):
    """Say what a stage computes on a micro-batch; the engine says when."""

    @abstractmethod
    def first_input(self, micro_batch: int) -> Tensor:
        """Return what the first stage's layers take (asked of the first stage only)."""

    @abstractmethod
    def forward(self, micro_batch: int, hidden: Tensor) -> Tensor:
        """Run the stage's layers; the result's first dimension is the sample."""

    @abstractmethod
    def finish(self, micro_batch: int, output: Tensor) -> Tensor | None:
        """Take the last stage's output.

        Returns:
            the 0-dim value to back-propagate; None where no backward follows.
        """


@dataclass
class StageLinks:
    """Hold a stage's four channels; the ends of a pipeline lack two of them."""

    activation_in: Receiver | None = None
    activation_out: Sender | None = None
    gradient_in: Receiver | None = None
    gradient_out: Sender | None = None


@dataclass
class _Flight:
    """Hold what a step keeps between a micro-batch's forward and its backward.

    Args:
        has_backward: whether the program runs backwards; without them nothing is kept.
    """

    has_backward: bool
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    peak: int = 0


@dataclass(frozen=True)
class StageReport:
    """Report a step of one stage.

    Args:
        compute_s: seconds in forwards and backwards.
        wait_s: seconds waiting for a neighbour to send or to take.
        peak_in_flight: most micro-batches kept between their forward and their backward.
    """

    compute_s: float
    wait_s: float
    peak_in_flight: int


def run_program(program: StageProgram, work: StageWork, links: StageLinks,
                sizes: Sequence[int], *,
                before_last_backward: Callable[[], None] = lambda: None) -> StageReport:
    """Execute a stage's program for one step.

    Args:
        program: one row of a schedule.
        work: the stage's computation.
        links: channels to the neighbours.
        sizes: samples of every micro-batch.
        before_last_backward: called once, when the gradients of the coming backward complete the
            step's.
    Returns:
        the stage's times.
    Raises:
        LinkError: a neighbour did not send or take a micro-batch in time.
    """
    _begin(program, links, sizes)
    last_backward = max((n for n, ins in enumerate(program) if ins.op is Op.BACKWARD), default=-1)
    flight = _Flight(has_backward=last_backward >= 0)
    waited = _waited(links)
    compute_s = 0.0
    for number, instruction in enumerate(program):
        i, op = instruction.micro_batch, instruction.op
        if op is Op.FORWARD:
            hidden = work.first_input(i) if links.activation_in is None else _enter(i, flight)
            start = time.perf_counter()
            _forward(i, hidden, work, links, flight)
            compute_s += time.perf_counter() - start
        elif op is Op.BACKWARD:
            if number == last_backward:
                before_last_backward()
            start = time.perf_counter()
            _backward(i, flight)
            compute_s += time.perf_counter() - start
        else:
            _communicate(op, i, links, flight)
    start = time.perf_counter()
    for sender in (links.activation_out, links.gradient_out):
        if sender is not None:
            sender.flush()
    flush_s = time.perf_counter() - start
    return StageReport(compute_s, _waited(links) - waited + flush_s, flight.peak)


def _begin(program: StageProgram, links: StageLinks, sizes: Sequence[int]) -> None:
    for op, receiver in ((Op.RECV_ACTIVATION, links.activation_in),
                         (Op.RECV_GRADIENT, links.gradient_in)):
        if receiver is not None:
            receiver.begin([ins.micro_batch for ins in program if ins.op is op], sizes)


class _LocalInput(torch.autograd.Function):
    """Give the layers a non-leaf that shares a leaf's memory: the first may work in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _enter(i: int, flight: _Flight) -> Tensor:
    leaf = flight.inputs[i] if flight.has_backward else flight.inputs.pop(i)
    return _LocalInput.apply(leaf) if leaf.requires_grad else leaf


def _forward(i: int, hidden: Tensor, work: StageWork, links: StageLinks,
             flight: _Flight) -> None:
    output = work.forward(i, hidden)
    if links.activation_out is not None:
        flight.outputs[i] = output
    elif (result := work.finish(i, output)) is not None and flight.has_backward:
        flight.outputs[i] = result
    if flight.has_backward:
        flight.peak = max(flight.peak, len(flight.outputs))


def _backward(i: int, flight: _Flight) -> None:
    output = flight.outputs.pop(i)
    if output.requires_grad:
        torch.autograd.backward(output, flight.gradients.pop(i, None))


def _communicate(op: Op, i: int, links: StageLinks, flight: _Flight) -> None:
    """Carry out a send or a receive.

    Where a boundary's activations need no gradient (all below is frozen), none is sent back; both
    ends read that from the same header.
    """
    if op is Op.RECV_ACTIVATION:
        assert links.activation_in is not None
        flight.inputs[i] = _receive_activation(i, links.activation_in)
    elif op is Op.SEND_ACTIVATION:
        _send_activation(i, links, flight)
    elif op is Op.RECV_GRADIENT:
        assert links.gradient_in is not None
        if flight.outputs[i].requires_grad:
            flight.gradients[i] = links.gradient_in.receive(i)
    elif op is Op.SEND_GRADIENT:
        assert links.gradient_out is not None
        hidden = flight.inputs.pop(i)
        if hidden.requires_grad:
            # A stage that ignores its input still owes the neighbour, who waits, a gradient.
            gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
            links.gradient_out.send(gradient)


def _receive_activation(i: int, receiver: Receiver) -> Tensor:
    if receiver.spec is None:
        receiver.spec = receiver.receive_header()["hidden"]
        receiver.post()
    hidden = receiver.receive(i)
    return hidden.requires_grad_(receiver.spec.requires_grad and torch.is_grad_enabled())


def _send_activation(i: int, links: StageLinks, flight: _Flight) -> None:
    assert links.activation_out is not None
    output = flight.outputs[i] if flight.has_backward else flight.outputs.pop(i)
    spec = TensorSpec.of(output)
    receiver = links.gradient_in
    assert receiver is not None
    if receiver.spec is None:
        links.activation_out.send_header({"hidden": spec})
        receiver.spec = spec
        if spec.requires_grad:
            receiver.post()
    elif receiver.spec != spec:
        raise ValueError(f"micro-batch {i} leaves the stage as {spec}, the step's first one as "
                         f"{receiver.spec}; samples of one step need one shape: pad them")
    links.activation_out.send(output)


def _waited(links: StageLinks) -> float:
    return sum(receiver.waited_s for receiver in (links.activation_in, links.gradient_in)
               if receiver is not None)
