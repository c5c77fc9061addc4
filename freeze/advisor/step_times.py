"""Time what each layer costs in a few training steps, by hooks on any model.

forward   model ─ embedding ─► block 0 ─► ... ─► block L-1 ─ head ─► loss
backward  optimizer ◄─ embedding + block 0 ◄─ ... ◄─ block L-1 ◄─ head
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from freeze.advisor.frozen_forward_time import can_run_apart, frozen_forward_s

_TIMED_STEPS, _TRIALS = 6, 3
"""Steps that are timed, and in which blocks run as if frozen; the first step is of the latter."""


@dataclass(frozen=True)
class StepCosts:
    """Hold the seconds of a step.

    Args:
        forward_s, backward_s, update_s: by layer; an embedding's are in layer 0's. Updates are
            split as the times to copy the weights.
        frozen_s: forwards of frozen layers, which need neither dropout nor a graph.
    """

    step_s: float
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    frozen_s: tuple[float, ...]

    def saved_share(self, num_frozen: int, *, cached: bool) -> float:
        """Return the share of a step that freezing so many layers saves.

        Frozen layers have neither a backward nor an update, and a shorter forward; with their
        activations cached no forward either.
        """
        kinds = [self.forward_s, self.backward_s, self.update_s]
        saved_s = sum(sum(own[:num_frozen]) for own in kinds)
        return (saved_s - (0.0 if cached else sum(self.frozen_s[:num_frozen]))) / self.step_s


class StepTimes:
    """Watch a model's steps: micro-batches add up, and a repeated forward counts as backward.

    In the first step, which is not timed, and the last few, each block runs once more behind its
    forward, as if it were frozen. On CUDA every mark waits for the device, which slows these few
    steps.

    Args:
        model: what is called in the loop, or what that wraps.
        blocks: its layers, bottom first; they train.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._num = len(blocks)
        self._on_cuda = any(p.is_cuda for p in model.parameters())
        self._weights = _trained_weights(model, blocks)
        self._marks: list[tuple[str, int, float]] = []
        self._steps: list[list[float]] = []
        self._trial: list[float] | None = [0.0] * self._num
        self._trials: list[list[float]] = []
        self._in_backward, self._evaluates, self._depth = False, False, 0
        self._began: float | None = None
        self._hooks = []
        # A loop may call the model, or only a part of it that holds the blocks.
        for module in _ancestors(model, blocks[0]):
            self._hooks.append(module.register_forward_pre_hook(self._begin_forward))
            end = module.register_forward_hook(self._end_forward, always_call=True)
            self._hooks.append(end)
        for index, block in enumerate(blocks):
            into, after = partial(self._in_block, index), partial(self._after_block, index)
            self._hooks.append(block.register_forward_pre_hook(into))
            self._hooks.append(block.register_forward_hook(after, with_kwargs=True))

    def end_update(self) -> None:
        self._mark("updated", 0)

    def end_step(self) -> None:
        now = self._now()
        if self._trial is not None:
            self._trials.append(self._trial)
        elif self._began is not None and self._marks:
            self._steps.append(self._timed(now - self._began))
        self._trial = [0.0] * self._num if len(self._steps) >= _TIMED_STEPS else None
        self._began, self._marks = now, []

    @property
    def is_done(self) -> bool:
        """Tell whether more steps would tell nothing more."""
        return len(self._steps) >= _TIMED_STEPS and len(self._trials) >= _TRIALS

    def close(self) -> StepCosts | None:
        """Take the hooks away; return the medians of the steps, None where there was none."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if not self._steps:
            return None
        step_s, embedding_s, update_s, *each = _medians(self._steps)
        forward, backward = each[: self._num], each[self._num :]
        # Of a block that cannot run apart it is not known that it would be faster.
        frozen = [
            min(own, trial) if trial > 0 else own
            for own, trial in zip(forward, _medians(self._trials), strict=True)
        ]
        copies = [self._copy_s(weights) for weights in self._weights]
        return StepCosts(
            step_s,
            (forward[0] + embedding_s, *forward[1:]),
            tuple(backward),
            tuple(update_s * seconds / (sum(copies) or 1.0) for seconds in copies[:-1]),
            (frozen[0] + embedding_s, *frozen[1:]),
        )

    def _copy_s(self, weights: Sequence[nn.Parameter], *, repeats: int = 3) -> float:
        """Return the seconds to write as many new values as an optimizer does for intermediates.

        Large ones take longer than their number says, as fresh memory has to be found for them.
        """
        seconds = []
        for _ in range(repeats):
            start = self._now()
            for weight in weights:
                weight.detach().clone()
            seconds.append(self._now() - start)
        return statistics.median(seconds)

    def _begin_forward(self, module: nn.Module, *_: object) -> None:
        if self._depth == 0:
            self._in_backward = False
            self._evaluates = not (module.training or torch.is_grad_enabled())
            self._mark("forward", 0)
        self._depth += 1

    def _in_block(self, index: int, *_: object) -> None:
        # Checkpointed blocks run again within the backward.
        if not self._in_backward:
            self._mark("block", index)

    def _after_block(
        self, index: int, block: nn.Module, inputs: Any, options: Any, output: Any
    ) -> None:
        # Not a module's backward hook, which would hand on a view that nobody may write into.
        first = next((one for one in tree_leaves(output) if _has_gradient(one)), None)
        if first is not None:
            first.register_hook(partial(self._back_in_block, index))
        if self._trial is None or self._in_backward or not block.training:
            return
        seconds = math.nan
        if can_run_apart(block):
            seconds = frozen_forward_s(block, inputs, options, self._now)
        self._trial[index] += seconds

    def _end_forward(self, *_: object) -> None:
        self._depth -= 1
        self._mark("head", 0)
        if self._depth == 0 and self._evaluates:
            # The step begins behind it.
            self._began, self._marks = self._now(), []

    def _back_in_block(self, index: int, *_: object) -> None:
        if not self._in_backward:
            self._in_backward = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
        self._mark("back", index)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._mark("between", 0)

    def _mark(self, kind: str, index: int) -> None:
        self._marks.append((kind, index, self._now()))

    def _now(self) -> float:
        if self._on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _timed(self, step_s: float) -> list[float]:
        """Add a step's marks up, of which each lasts to the next one.

        Returns:
            the seconds of the step, the embedding, the update, the blocks' forwards and their
            backwards.
        """
        forward, backward = [0.0] * self._num, [0.0] * self._num
        embedding = update = 0.0
        ends = [when for _, _, when in self._marks[1:]]
        for (kind, index, begin), end in zip(self._marks, ends, strict=False):
            if kind == "forward":
                embedding += end - begin
            elif kind == "block":
                forward[index] += end - begin
            elif kind == "back":
                backward[index] += end - begin
            elif kind == "between":
                # Clipping and the optimizer's step; before another micro-batch there is neither.
                update = end - begin
        return [step_s, embedding, update, *forward, *backward]


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _ancestors(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """Return the modules that hold a block, the model first."""
    return [
        module
        for module in model.modules()
        if module is not block and any(one is block for one in module.modules())
    ]


def _trained_weights(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Return each block's trained weights, and behind the last one's all others.

    What is registered before the first block is an embedding's, and so the first block's.
    """
    of_block = {p: index for index, block in enumerate(blocks) for p in block.parameters()}
    weights: list[list[nn.Parameter]] = [[] for _ in range(len(blocks) + 1)]
    owner = 0
    for parameter in model.parameters():
        owner = len(blocks) if parameter in of_block else owner
        if parameter.requires_grad:
            weights[of_block.get(parameter, owner)].append(parameter)
    return weights
