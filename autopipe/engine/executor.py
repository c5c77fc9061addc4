"""Run one stage's program: the instructions of a schedule, in its order and never autograd's."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

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

_T = TypeVar("_T")


class StageWork(ABC):
    """Say what a stage computes on a micro-batch; the engine says when."""

    @abstractmethod
    def first_input(self, micro_batch: int) -> Payload:
        """Return what the first stage's layers take."""

    @abstractmethod
    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        """Run the stage's layers; each tensor's first dimension is the sample."""

    @abstractmethod
    def finish(self, micro_batch: int, outputs: Payload) -> Tensor | None:
        """Take the last stage's output; return the 0-dim value to back-propagate.

        None where `output_gradients` will give the outputs' gradients, or no backward follows.
        """

    def output_gradients(self, micro_batch: int) -> Gradients:
        """Return the gradients of the last stage's outputs, where `finish` gave no loss."""
        raise NotImplementedError(f"{type(self).__name__} back-propagates losses only")

    def update(self, micro_batch: int) -> None:
        """Update the stage's weights, where the schedule has a batch end with a micro-batch."""
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
        """Back-propagate; unless overridden, into the `grad` of every leaf.

        There is one gradient a start, None for a loss. Anchors are the leaves that stand for the
        stage's inputs, whose gradients are returned. Retained, the graph is needed again.
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
    compute_s: float
    """In forwards, recomputations, backwards and updates; on a GPU, of launching them."""
    wait_s: float
    """Until a neighbour had sent, or had taken."""
    peak_in_flight: int
    """Most micro-batches whose activations were kept at once."""


class StageRun:
    """Run a stage's program, a row of a schedule, for one step, at once or in portions.

    `sizes` are the samples of every micro-batch; a recorder notes when each instruction ran.
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
        self._work, self._links, self._recorder = work, links, recorder
        self._num_micro_batches = len(sizes)
        backwards = [ins for ins in program if ins.op is Op.BACKWARD]
        self._last_backward = backwards[-1] if backwards else None
        self._checkpointed = {ins.micro_batch for ins in program if ins.op is Op.RECOMPUTE}
        # By micro-batch, what is kept between a forward and its backward. Inputs are kept from
        # their arrival to the forward; checkpointed ones to the backward.
        self._inputs: dict[int, Payload] = {}
        # What gets the inputs' gradients, while their graph is alive.
        self._anchors: dict[int, Gradients] = {}
        self._outputs: dict[int, Payload] = {}
        self._roots: dict[int, Roots] = {}
        # Of a checkpointed micro-batch's inputs, where its outputs need a gradient.
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
        program: StageProgram,
        *,
        retain: bool = False,
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> StageReport:
        """Execute a portion of the program.

        Args:
            retain: whether its backwards will be asked for once more.
            before_last_backward: called once, when the gradients of the coming backward complete
                the step's.
        Raises:
            the links' peers' error: a neighbour did not send or take a micro-batch in time.
            RuntimeError: the input of a checkpointed forward was changed in place.
        """
        self._retain, self._spent_s = retain, {"compute": 0.0, "wait": 0.0}
        for instruction in program:
            self.current = instruction
            if instruction == self._last_backward:
                before_last_backward()
            if self._recorder is None:
                self._execute(instruction.op, instruction.micro_batch)
            else:
                self._record(self._recorder, instruction)
        for link in self._links:
            self._timed("wait", link.flush)
        return StageReport(self._spent_s["compute"], self._spent_s["wait"], self._peak)

    @property
    def will_repeat(self) -> bool:
        """Tell whether a forward that has run is to be repeated before its backward."""
        return bool(self._versions)

    def take_input_gradients(self) -> dict[int, Gradients]:
        """Hand over, once, the gradients of the first stage's inputs, by micro-batch."""
        gradients, self._input_gradients = self._input_gradients, {}
        return gradients

    def _record(self, recorder: Recorder, instruction: Instruction) -> None:
        op, i = instruction.op, instruction.micro_batch
        sent_bytes = 0
        if op is Op.SEND_ACTIVATION:
            sent_bytes = total_bytes(self._outputs[i].tensors)
        elif op is Op.SEND_GRADIENT:
            sent_bytes = total_bytes(self._input_gradients[i])
        with recorder.span(instruction, sent_bytes=sent_bytes):
            self._execute(op, i)
            recorder.keeps(
                in_flight=len(self._roots.keys() | self._inputs.keys()),
                graphs=len(self._roots),
                inputs=[t for payload in self._inputs.values() for t in payload.tensors],
            )

    def _execute(self, op: Op, i: int) -> None:
        if op is Op.FORWARD:
            self._prepare_forward(i)
            self._timed("compute", self._forward, i)
        elif op is Op.RECOMPUTE:
            self._timed("compute", self._recompute, i)
        elif op is Op.BACKWARD:
            self._timed("compute", self._backward, i)
        elif op is Op.RECV_ACTIVATION:
            self._inputs[i] = self._timed("wait", _present(self._links.below).receive, i)
        elif op is Op.UPDATE:
            self._timed("compute", self._work.update, i)
        elif op is Op.SEND_ACTIVATION:
            _present(self._links.above).send(i, self._outputs.pop(i))
        elif op is Op.RECV_GRADIENT:
            received = self._timed("wait", _present(self._links.above).receive, i)
            self._gradients[i] = received.tensors
        else:
            _present(self._links.below).send(i, Payload(self._input_gradients.pop(i)))

    def _timed(self, kind: str, work: Callable[..., _T], *arguments: int) -> _T:
        start = time.perf_counter()
        result = work(*arguments)
        self._spent_s[kind] += time.perf_counter() - start
        return result

    def _prepare_forward(self, i: int) -> None:
        if self._links.above is not None:
            self._timed("wait", self._links.above.reserve, i)
        if self._links.below is None:
            self._inputs[i] = self._work.first_input(i)
        if self._recorder is not None:
            self._recorder.starts_forward()

    def _forward(self, i: int) -> None:
        checkpointing = i in self._checkpointed
        before = versions(self._inputs[i])
        with running(ForwardPass(i, self._num_micro_batches, checkpointing=checkpointing)):
            outputs = self._work.forward(i, self._enter(i))
            if checkpointing:
                # The graph ends here; only with one do layers go the way they will go again, and
                # is it known which outputs need a gradient.
                outputs = cut(outputs)
                if any(map(needs_gradient, outputs.tensors)):
                    self._versions[i] = before
            loss = self._finish(i, outputs)
        if self._links.above is not None:
            self._outputs[i] = outputs
        if self._last_backward is not None and not checkpointing:
            self._keep(i, outputs, loss)

    def _enter(self, i: int) -> Payload:
        """Start a graph; nobody here holds its inputs, so that a skip can be freed when popped."""
        inputs = self._inputs[i] if i in self._checkpointed else self._inputs.pop(i)
        self._anchors[i], entered = enter(inputs)
        return entered

    def _finish(self, i: int, outputs: Payload) -> Tensor | None:
        return None if self._links.above is not None else self._work.finish(i, outputs)

    def _keep(self, i: int, outputs: Payload, loss: Tensor | None) -> None:
        self._roots[i] = roots_of(outputs, loss)
        self._peak = max(self._peak, len(self._roots))

    def _recompute(self, i: int) -> None:
        if i not in self._versions:
            return
        if versions(self._inputs[i]) != self._versions[i]:
            raise RuntimeError(
                f"micro-batch {i}: the input of a checkpointed partition was changed in place, so "
                "its forward cannot be repeated; let the partition's first layers work out of "
                "place, leave the input alone until the backward, or use checkpoint='never'"
            )
        with (
            running(ForwardPass(i, self._num_micro_batches, recomputing=True)),
            torch.enable_grad(),
        ):
            outputs = self._work.forward(i, self._enter(i))
            loss = self._finish(i, outputs)
        self._keep(i, outputs, loss)

    def _backward(self, i: int) -> None:
        gradients = self._gradients.pop(i, None)
        again = self._retain and i not in self._checkpointed
        roots = self._roots.get(i) if again else self._roots.pop(i, None)
        anchors = self._anchors[i] if again else self._anchors.pop(i)
        if not self._retain:
            self._inputs.pop(i, None)
        self._input_gradients[i] = (None,) * len(anchors)
        if roots is None:
            return
        starts: Starts = [roots] if isinstance(roots, Tensor) else []
        values = None
        if not isinstance(roots, Tensor):
            if self._links.above is None:
                gradients = self._work.output_gradients(i)
            assert gradients is not None, "a backward before its gradient"
            known = {n: gradient for n in roots if (gradient := gradients[n]) is not None}
            starts, values = [roots[n] for n in known], list(known.values())
        if starts:
            self._input_gradients[i] = self._work.backward(
                i, starts, values, anchors, retain=again
            )


def _present(link: Link | None) -> Link:
    assert link is not None, "the ends of a pipeline have no neighbour beyond them"
    return link


def run_program(
    program: StageProgram,
    work: StageWork,
    links: StageLinks,
    sizes: Sequence[int],
    *,
    before_last_backward: Callable[[], None] = lambda: None,
    recorder: Recorder | None = None,
) -> StageReport:
    """Execute a stage's program for one step; see `StageRun`."""
    run = StageRun(program, work, links, sizes, recorder=recorder)
    return run.run(program, before_last_backward=before_last_backward)
