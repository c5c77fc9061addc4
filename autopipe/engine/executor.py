"""Run one stage's program: a schedule's instructions, in the schedule's order, not autograd's."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from autopipe.engine.current_micro_batch import ForwardPass, running
from autopipe.engine.graph_cut import (
    Roots,
    Starts,
    cut,
    enter,
    needs_gradient,
    roots_of,
    total_bytes,
    versions,
)
from autopipe.engine.links import Gradients, Link, Payload
from autopipe.schedule import Instruction, Op, StageProgram
from autopipe.trace import Recorder


class StageWork(ABC):
    """Define what a stage computes on a micro-batch; the engine decides when."""

    @abstractmethod
    def first_input(self, micro_batch: int) -> Payload:
        """Return what the first stage's layers are given."""

    @abstractmethod
    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        """Run the stage's layers; tensors are (B, ...)."""

    @abstractmethod
    def finish(self, micro_batch: int, outputs: Payload) -> Tensor | None:
        """Take the last stage's output; return the 0-dim loss to back-propagate.

        None if `output_gradients` gives the outputs' gradients, or no backward follows.
        """

    def output_gradients(self, micro_batch: int) -> Gradients:
        """Return the gradients of the last stage's outputs, if `finish` gave no loss."""
        raise NotImplementedError(f"{type(self).__name__} back-propagates losses only")

    def update(self, micro_batch: int) -> None:
        """Update the stage's weights; `micro_batch` is its last of a batch."""
        raise NotImplementedError(f"{type(self).__name__} leaves its weights to its caller")

    def backward(
        self,
        micro_batch: int,
        starts: Starts,
        gradients: Sequence[Tensor] | None,
        anchors: Gradients,
        *,
        retain: bool,
    ) -> Gradients:
        """Back-propagate, here into the `grad` of every leaf; return the inputs' gradients.

        Args:
            gradients: one for each start; None for a loss.
            anchors: leaves that stand for the stage's inputs.
            retain: whether the graph is needed again.
        """
        torch.autograd.backward(starts, gradients, retain_graph=retain)
        return tuple(None if anchor is None else anchor.grad for anchor in anchors)


@dataclass
class StageLinks:
    below: Link | None = None
    above: Link | None = None

    def __iter__(self) -> Iterator[Link]:
        return iter([link for link in (self.below, self.above) if link is not None])


@dataclass(frozen=True)
class StageReport:
    """Report one portion of a step.

    Args:
        compute_s: forwards, recomputations, backwards and updates; on a GPU, launching them.
        wait_s: waiting for a neighbour to send or to take.
        peak_in_flight: most micro-batches whose graphs were kept at once.
    """

    compute_s: float
    wait_s: float
    peak_in_flight: int


_ACTIONS = {
    Op.FORWARD: ("compute", "_forward"),
    Op.RECOMPUTE: ("compute", "_recompute"),
    Op.BACKWARD: ("compute", "_backward"),
    Op.UPDATE: ("compute", "_update"),
    Op.RECV_ACTIVATION: ("wait", "_receive_activation"),
    Op.RECV_GRADIENT: ("wait", "_receive_gradient"),
    Op.SEND_ACTIVATION: ("send", "_send_activation"),
    Op.SEND_GRADIENT: ("send", "_send_gradient"),
}
"""What an instruction's time counts as, and the method of `StageRun`; a send only begins."""


class StageRun:
    """Run a stage's program, a row of a schedule, for one step, at once or in portions.

    Args:
        sizes: samples of each micro-batch.
        recorder: notes when each instruction ran; None for no trace.
    Attributes:
        current: the instruction that runs, or ran last.
    """

    def __init__(
        self,
        program: StageProgram,
        work: StageWork,
        links: StageLinks,
        sizes: Sequence[int],
        *,
        recorder: Recorder | None = None,
    ) -> None:
        self.current: Instruction | None = None
        self._program = program
        self._work, self._links, self._recorder = work, links, recorder
        self._num_micro_batches = len(sizes)
        backwards = [ins for ins in program if ins.op is Op.BACKWARD]
        self._last_backward = backwards[-1] if backwards else None
        self._checkpointed = {ins.micro_batch for ins in program if ins.op is Op.RECOMPUTE}
        # All by micro-batch. Inputs stay until the forward, checkpointed ones until the backward.
        self._inputs: dict[int, Payload] = {}
        self._anchors: dict[int, Gradients] = {}
        self._outputs: dict[int, Payload] = {}
        self._roots: dict[int, Roots] = {}
        # In-place versions of checkpointed inputs; only of those that a backward will need.
        self._versions: dict[int, list[int]] = {}
        self._gradients: dict[int, Gradients] = {}
        self._input_gradients: dict[int, Gradients] = {}
        self._peak = 0
        self._spent_s: dict[str, float] = {}
        self._retain = False
        for link in links:
            link.begin(program, sizes)

    def run(
        self,
        portion: StageProgram | None = None,
        *,
        retain: bool = False,
        before_last_backward: Callable[[], None] | None = None,
    ) -> StageReport:
        """Execute the program, or a portion of it.

        Args:
            retain: whether its backwards will run once more.
            before_last_backward: called before the backward that completes the gradients.
        Raises:
            the links' peers' error: a neighbour did not send or take a micro-batch in time.
            RuntimeError: the input of a checkpointed forward was changed in place.
        """
        self._begin(retain)
        for instruction in self._program if portion is None else portion:
            if before_last_backward is not None and instruction == self._last_backward:
                before_last_backward()
            with self._executing(instruction) as act:
                act(instruction.micro_batch)
        return self._end()

    def _begin(self, retain: bool) -> None:
        self._retain, self._spent_s = retain, {"compute": 0.0, "wait": 0.0, "send": 0.0}

    @contextmanager
    def _executing(self, instruction: Instruction) -> Iterator[Callable[[int], object]]:
        """Give what executes an instruction: called from here, it would be a frame further off."""
        self.current = instruction
        kind, method = _ACTIONS[instruction.op]
        with self._recorded(instruction):
            if instruction.op is Op.FORWARD:
                self._await_forward(instruction.micro_batch)
            start = time.perf_counter()
            yield getattr(self, method)
            self._spent_s[kind] += time.perf_counter() - start

    def _end(self) -> StageReport:
        start = time.perf_counter()
        for link in self._links:
            link.flush()
        self._spent_s["wait"] += time.perf_counter() - start
        return StageReport(self._spent_s["compute"], self._spent_s["wait"], self._peak)

    @property
    def will_repeat(self) -> bool:
        """Return whether a forward that has run must be repeated before its backward."""
        return bool(self._versions)

    def take_input_gradients(self) -> dict[int, Gradients]:
        """Return and forget the gradients of the first stage's inputs, by micro-batch."""
        gradients, self._input_gradients = self._input_gradients, {}
        return gradients

    def _recorded(self, instruction: Instruction) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._in_span(instruction)

    @contextmanager
    def _in_span(self, instruction: Instruction) -> Iterator[None]:
        recorder, op, i = self._recorder, instruction.op, instruction.micro_batch
        assert recorder is not None
        sent_bytes = 0
        if op is Op.SEND_ACTIVATION:
            sent_bytes = total_bytes(self._outputs[i].tensors)
        elif op is Op.SEND_GRADIENT:
            sent_bytes = total_bytes(self._input_gradients[i])
        # Sizes were read first: a send gives its tensors away.
        with recorder.span(instruction, sent_bytes=sent_bytes):
            yield
            recorder.keeps(
                in_flight=len(self._roots.keys() | self._inputs.keys()),
                graphs=len(self._roots),
                inputs=[t for payload in self._inputs.values() for t in payload.tensors],
            )

    def _update(self, i: int) -> None:
        self._work.update(i)

    def _receive_activation(self, i: int) -> None:
        self._inputs[i] = _present(self._links.below).receive(i)

    def _receive_gradient(self, i: int) -> None:
        self._gradients[i] = _present(self._links.above).receive(i).tensors

    def _send_activation(self, i: int) -> None:
        _present(self._links.above).send(i, self._outputs.pop(i))

    def _send_gradient(self, i: int) -> None:
        _present(self._links.below).send(i, Payload(self._input_gradients.pop(i)))

    def _await_forward(self, i: int) -> None:
        if self._links.above is not None:
            start = time.perf_counter()
            self._links.above.reserve(i)
            self._spent_s["wait"] += time.perf_counter() - start
        if self._links.below is None:
            # Not timed: reading samples is no compute.
            self._inputs[i] = self._work.first_input(i)
        if self._recorder is not None:
            self._recorder.starts_forward()

    def _forward(self, i: int) -> None:
        checkpointing = i in self._checkpointed
        before = versions(self._inputs[i])
        with running(ForwardPass(i, self._num_micro_batches, checkpointing=checkpointing)):
            outputs = self._work.forward(i, self._enter(i))
            if checkpointing:
                # The forward ran with a graph, though it is dropped here: layers must behave as
                # in the repetition, and the graph tells which outputs need a gradient.
                outputs = cut(outputs)
                if any(map(needs_gradient, outputs.tensors)):
                    self._versions[i] = before
            loss = self._finish(i, outputs)
        if self._links.above is not None:
            self._outputs[i] = outputs
        if self._last_backward is not None and not checkpointing:
            self._keep(i, outputs, loss)

    def _enter(self, i: int) -> Payload:
        """Start a micro-batch's graph at its inputs."""
        # Popped, not read: a reference from here would keep a popped skip's memory alive.
        inputs = self._inputs[i] if i in self._checkpointed else self._inputs.pop(i)
        self._anchors[i], entered = enter(inputs)
        return entered

    def _finish(self, i: int, outputs: Payload) -> Tensor | None:
        return None if self._links.above is not None else self._work.finish(i, outputs)

    def _keep(self, i: int, outputs: Payload, loss: Tensor | None) -> None:
        self._roots[i] = roots_of(outputs, loss)
        self._peak = max(self._peak, len(self._roots))

    def _recompute(self, i: int) -> None:
        if i not in self._versions:  # No output needs a gradient.
            return
        if versions(self._inputs[i]) != self._versions[i]:
            raise RuntimeError(
                f"micro-batch {i}: the input of a checkpointed partition was changed in place, so "
                "its forward cannot be repeated; let the partition's first layers work out of "
                "place, leave the input alone until the backward, or use checkpoint='never'"
            )
        # enable_grad, because a backward may run without.
        with (
            running(ForwardPass(i, self._num_micro_batches, recomputing=True)),
            torch.enable_grad(),
        ):
            outputs = self._work.forward(i, self._enter(i))
            loss = self._finish(i, outputs)
        self._keep(i, outputs, loss)

    def _backward(self, i: int) -> None:
        gradients = self._gradients.pop(i, None)
        # A checkpointed micro-batch gets a new graph by another repetition.
        again = self._retain and i not in self._checkpointed
        roots = self._roots.get(i) if again else self._roots.pop(i, None)
        anchors = self._anchors[i] if again else self._anchors.pop(i)
        if not self._retain:
            self._inputs.pop(i, None)
        # The send that follows needs an entry even if nothing is back-propagated.
        self._input_gradients[i] = (None,) * len(anchors)
        if roots is None:
            return
        starts: Starts
        values: list[Tensor] | None = None
        if isinstance(roots, Tensor):
            starts = [roots]
        else:
            if self._links.above is None:
                gradients = self._work.output_gradients(i)
            assert gradients is not None, "a backward before its gradient"
            # The neighbour sends None for an output that its loss does not depend on.
            known = {n: gradient for n in roots if (gradient := gradients[n]) is not None}
            starts, values = [roots[n] for n in known], list(known.values())
        if starts:
            self._input_gradients[i] = self._work.backward(
                i, starts, values, anchors, retain=again
            )


def run_chunks(program: StageProgram, chunks: Sequence[StageRun]) -> tuple[StageReport, ...]:
    """Run a worker's program on its chunks of layers; return a report for each.

    Args:
        program: of a worker of interleaved stages.
        chunks: a run for each chunk, of the program's instructions for it. Each is a stage of its
            own, so that its links lead to the stages below and above, in a ring of the workers.
    Raises:
        what `StageRun.run` raises.
    """
    for chunk in chunks:
        chunk._begin(retain=False)
    for instruction in program:
        with chunks[instruction.chunk]._executing(instruction) as act:
            act(instruction.micro_batch)
    return tuple(chunk._end() for chunk in chunks)


def _present(link: Link | None) -> Link:
    assert link is not None, "the ends of a pipeline have no neighbour beyond them"
    return link
