"""Time what each layer costs in a few training steps, by hooks on any model.

forward   model ─ embedding ─► block 0 ─► ... ─► block L-1 ─ head ─► loss
backward  optimizer ◄─ embedding + block 0 ◄─ ... ◄─ block L-1 ◄─ head
"""

from __future__ import annotations

import logging
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
from torch.utils.hooks import RemovableHandle

from freeze.advisor.trial_forward import can_run_apart, frozen_forward_s

_TIMED_STEPS, _TRIALS = 6, 3
"""Steps that are timed, and steps in which blocks run as if frozen; the first step is a trial."""

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepCosts:
    """Hold the seconds of a step.

    Args:
        forward_s, backward_s, update_s: by layer, the embedding's in layer 0's. The update is
            split in proportion to the times to copy the weights.
        frozen_s: by layer, its forward without dropout and without a graph.
    """

    step_s: float
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    frozen_s: tuple[float, ...]

    def saved_share(self, num_frozen: int, *, cached: bool) -> float:
        """Return the share of a step that freezing saves.

        Frozen layers have no backward and no update, and a shorter forward; cached, none.
        """
        kinds = [self.forward_s, self.backward_s, self.update_s]
        saved_s = sum(sum(own[:num_frozen]) for own in kinds)
        return (saved_s - (0.0 if cached else sum(self.frozen_s[:num_frozen]))) / self.step_s


class StepTimes:
    """Watch a model's steps; micro-batches add up, and a repeated forward counts as backward.

    In trial steps each block runs once more behind its forward, as if it were frozen. On CUDA
    every mark waits for the device, which slows the few steps watched.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._model, self._blocks, self._num = model, blocks, len(blocks)
        self._on_cuda = any(p.is_cuda for p in model.parameters())
        self._marks: list[tuple[str, int, float]] = []
        self._steps: list[list[float]] = []
        self._trial: list[float] | None = [0.0] * self._num
        self._trials: list[list[float]] = []
        self._in_backward, self._evaluates, self._depth = False, False, 0
        self._began: float | None = None
        self._has_told = False
        self._hooks: list[RemovableHandle] = []
        # The loop may call the model, or only a part of it that holds the blocks.
        for module in _ancestors(model, blocks[0]):
            self._hooks += [
                module.register_forward_pre_hook(self._begin_forward),
                # Also after an exception, or the depth would stay wrong.
                module.register_forward_hook(self._end_forward, always_call=True),
            ]
        for index, block in enumerate(blocks):
            into, after = partial(self._in_block, index), partial(self._after_block, index)
            self._hooks += [
                block.register_forward_pre_hook(into),
                block.register_forward_hook(after, with_kwargs=True),
            ]

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
        return len(self._steps) >= _TIMED_STEPS and len(self._trials) >= _TRIALS

    def close(self) -> StepCosts | None:
        """Remove the hooks; return the medians of the steps, None without a step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if not self._steps:
            return None
        step_s, embedding_s, update_s, *each = _medians(self._steps)
        forward, backward = each[: self._num], each[self._num :]
        # A block that cannot run apart has no trial: it counts as no faster when frozen.
        frozen = [
            min(own, trial) if trial > 0 else own
            for own, trial in zip(forward, _medians(self._trials), strict=True)
        ]
        weights = _trained_weights(self._model, self._blocks)
        copies = [self._copy_s(own) for own in weights]
        return StepCosts(
            step_s,
            (forward[0] + embedding_s, *forward[1:]),
            tuple(backward),
            tuple(update_s * seconds / (sum(copies) or 1.0) for seconds in copies[:-1]),
            (frozen[0] + embedding_s, *frozen[1:]),
        )

    def _copy_s(self, weights: Sequence[nn.Parameter]) -> float:
        """Return the median seconds to copy these weights."""
        # Copies, as an optimizer's intermediates are new tensors: large ones take long to map.
        seconds = []
        for _ in range(3):
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
        # A checkpointed block runs again within the backward.
        if not self._in_backward:
            self._mark("block", index)

    def _after_block(
        self, index: int, block: nn.Module, inputs: Any, options: Any, output: Any
    ) -> None:
        # Not a module's backward hook: its outputs would be views that no code may write to.
        first = next((one for one in tree_leaves(output) if _has_gradient(one)), None)
        if first is not None:
            first.register_hook(partial(self._back_in_block, index))
        if self._trial is None or self._in_backward or not block.training:
            return
        self._trial[index] += self._trial_s(index, block, inputs, options)

    def _trial_s(self, index: int, block: nn.Module, inputs: Any, options: Any) -> float:
        if not can_run_apart(block, (inputs, options)):
            return math.nan
        try:
            return frozen_forward_s(block, inputs, options, self._now)
        except Exception as error:
            # Watching must not end a training that would go on without it.
            if not self._has_told:
                self._has_told = True
                _LOGGER.warning(
                    "layer %d, of %s, cannot run once more as if it were frozen: %s: %s. The "
                    "advice counts it as no faster when it is frozen",
                    index,
                    type(block).__name__,
                    type(error).__name__,
                    error,
                )
            return math.nan

    def _end_forward(self, *_: object) -> None:
        self._depth -= 1
        self._mark("head", 0)
        if self._depth == 0 and self._evaluates:
            # An evaluation is no part of the step: the step begins behind it.
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
        """Add up a step's marks; each lasts to the next one.

        Returns:
            seconds of the step, the embedding, the update, and the blocks' forwards and backwards.
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
                # The last counts: only behind the last micro-batch there is an update.
                update = end - begin
        return [step_s, embedding, update, *forward, *backward]


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _ancestors(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if module is not block and any(one is block for one in module.modules())
    ]


def _trained_weights(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Return each block's trained weights, then all others.

    Weights registered before the first block, an embedding's, count as the first block's.
    """
    of_block = {p: index for index, block in enumerate(blocks) for p in block.parameters()}
    weights: list[list[nn.Parameter]] = [[] for _ in range(len(blocks) + 1)]
    owner = 0
    for parameter in model.parameters():
        owner = len(blocks) if parameter in of_block else owner
        if parameter.requires_grad:
            weights[of_block.get(parameter, owner)].append(parameter)
    return weights
