"""Run one mini-batch through the partitions of a GPipe module, and its gradients back.

One node of the caller's graph stands for the whole pipeline; its backward runs the schedule's. The
parameters are its inputs, so that autograd delivers each gradient once: to `grad`, hooks,
`torch.autograd.grad` and DistributedDataParallel alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from autopipe.engine import Gradients, Payload
from autopipe.gpipe.micro_batch import Gathered, gather, split_gradients
from autopipe.gpipe.partition_work import AsInForward, Ends, Partition, PartitionWork, hooks_held
from autopipe.schedule import (
    Instruction,
    Op,
    Schedule,
    StageProgram,
    split_at_first_backward,
)
from autopipe.threads import ThreadPipeline
from autopipe.trace import Trace


class PipelineRun:
    """Hold one mini-batch: its forward, and the backwards that may follow."""

    def __init__(
        self,
        partitions: Sequence[Partition],
        schedule: Schedule,
        ends: Ends,
        *,
        trace: Trace | None,
    ) -> None:
        self._partitions = partitions
        self._devices = [partition.device for partition in partitions]
        self._schedule, self._ends = schedule, ends
        self._halves = [split_at_first_backward(program) for program in schedule]
        # Each once, also a parameter that several partitions share.
        self.parameters = list(dict.fromkeys(p for part in partitions for p in part.parameters))
        self.gives_bare_tensor = True
        self._lengths: tuple[tuple[int, ...], ...] = ()
        self.keeps_graph = any(ins.op is Op.BACKWARD for ins in schedule[0])
        self._as_in_forward: list[AsInForward] = []
        self._failed = False
        self._pipeline = ThreadPipeline(
            schedule,
            [part.module for part in partitions],
            lambda j, settings, draws: PartitionWork(partitions[j], ends, settings, draws),
            devices=self._devices,
            skips=[edge for part in partitions for edge in part.leaving],
            trace=trace,
        )

    def forward(self) -> Gathered:
        if any(ins.op is Op.RECOMPUTE for ins in self._schedule[0]):
            self._as_in_forward = [AsInForward(partition) for partition in self._partitions]
        self._run([forwards for forwards, _ in self._halves], grad_enabled=self.keeps_graph)
        for state in self._as_in_forward:
            state.end_forwards()
        # Taken out, or the micro-batches' outputs would stay in memory until the backward.
        outputs, self._ends.outputs = self._ends.outputs, {}
        gathered = gather([outputs[i] for i in range(len(outputs))])
        self._lengths = gathered.lengths
        self.gives_bare_tensor = gathered.payload.is_bare
        return gathered

    def backward(self, gradients: Gradients, *, retain: bool) -> None:
        self._ends.output_gradients = split_gradients(gradients, self._lengths)
        with hooks_held(self.parameters), ExitStack() as stack:
            # Without checkpointing there is nothing recorded.
            for stage, before in zip(self._pipeline.stages, self._as_in_forward, strict=False):
                if stage.will_repeat:
                    before.refuse_changes()
                stack.enter_context(before.modes())
            self._run([rest for _, rest in self._halves], grad_enabled=True, retain=retain)
        self._ends.output_gradients = []

    def step(self) -> None:
        """Run the whole schedule, with the loss inside the pipeline."""
        with hooks_held(self.parameters):
            self._run(self._schedule, grad_enabled=True)

    def take_gradients(self) -> tuple[list[Tensor | None], dict[Tensor, Tensor]]:
        """Return the last backward's gradients of the input's tensors and of the parameters."""
        settings = self._pipeline.settings
        with settings.applied(self._devices[-1], grad_enabled=False):
            by_micro_batch = self._pipeline.stages[0].take_input_gradients()
            leaves = zip(*(piece.tensors for piece in self._ends.inputs), strict=True)
            gradients = zip(*(by_micro_batch[i] for i in range(len(by_micro_batch))), strict=True)
            of_inputs = [_put_together(*pair) for pair in zip(leaves, gradients, strict=True)]
            totals: dict[Tensor, Tensor] = {}
            for work in self._pipeline.works:
                for parameter, gradient in work.take_gradients().items():
                    before = totals.get(parameter)
                    totals[parameter] = gradient if before is None else before + gradient
        settings.join_streams()
        return of_inputs, totals

    def _run(
        self, programs: Sequence[StageProgram], *, grad_enabled: bool, retain: bool = False
    ) -> None:
        if self._failed:
            raise RuntimeError(
                "a backward through this output of a GPipe module failed; run its forward again"
            )
        self._failed = True  # Until the run has ended well.
        self._pipeline.run(programs, grad_enabled=grad_enabled, order=self._tick_of, retain=retain)
        self._failed = False

    def _tick_of(self, stage: int, instruction: Instruction) -> int:
        """Return the tick at which GPipe's schedule has a stage's instruction."""
        num_stages, num_micro_batches = len(self._devices), len(self._ends.inputs)
        if instruction.op.is_forward:
            return stage + instruction.micro_batch
        ticks_before = num_stages + num_micro_batches
        return ticks_before + num_stages - stage + num_micro_batches - instruction.micro_batch


def _put_together(
    leaves: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> Tensor | None:
    """Concatenate micro-batches' gradients; those without one get zeros, unless all have none."""
    if all(gradient is None for gradient in gradients):
        return None
    pieces = [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
        if leaf is not None
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: PipelineRun, *tensors: Tensor) -> Any:
        outputs = run.forward()
        ctx.run = run
        # An output that the caller's loss ignores gets None instead of zeros.
        ctx.set_materialize_grads(False)
        # Saved only so that torch refuses a second backward, as it does for any other node.
        ctx.save_for_backward(torch.empty(0))
        pairs = zip(outputs.payload.tensors, outputs.need_gradient, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, needed in pairs if not needed))
        return outputs.payload.tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        _ = ctx.saved_tensors  # Raises in a second backward without retain_graph.
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        with torch.no_grad():
            ctx.run.backward(gradients, retain=retain)
            of_inputs, of_parameters = ctx.run.take_gradients()
        gradients = (*of_inputs, *(of_parameters.get(p) for p in ctx.run.parameters))
        return (None, *(_refusing(gradients) if torch.is_grad_enabled() else gradients))


def _refusing(gradients: Gradients) -> Gradients:
    """Return gradients for create_graph=True, which refuse to be differentiated again."""
    message = (
        "a gradient that came through a GPipe module cannot be differentiated again: its "
        "partitions' graphs are not part of the caller's; use the plain module for a gradient "
        "penalty or a Hessian"
    )
    refusal: Any = torch._C._functions.DelayedError(message.encode(), len(gradients))
    return refusal(*(None if g is None else g.detach().requires_grad_() for g in gradients))


def run_forward(run: PipelineRun, inputs: Sequence[Tensor | None]) -> Payload:
    """Run a forward, as one node of the caller's graph if anything needs a gradient."""
    if not run.keeps_graph:
        return run.forward().payload
    tensors = _Forward.apply(run, *inputs, *run.parameters)
    return Payload(tensors, run.gives_bare_tensor)
