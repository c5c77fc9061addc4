"""Time what each layer costs in a few training steps, by hooks on any model.

forward   model ─ embedding ─► block 0 ─► ... ─► block L-1 ─ head ─► loss
backward  optimizer ◄─ embedding + block 0 ◄─ ... ◄─ block L-1 ◄─ head
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from freeze.advisor.frozen_forward import can_run_apart, frozen_forward_s


@dataclass(frozen=True)
class StepCosts:
    """Hold the seconds of a step.

    Args:
        step_s: the whole.
        forward_s, backward_s, update_s: by layer; an embedding's are in layer 0's. Updates are
            split by the number of weights.
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

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


class StepTimes:
    """Watch a model's steps: micro-batches add up, and a repeated forward counts as backward.

    After each block's forward it runs once more, as if it were frozen; that counts for itself. On
    CUDA every mark waits for the device, which slows these few steps.

    Args:
        model: what is called in the loop, or what that wraps.
        blocks: its layers, bottom first; they train.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._num = len(blocks)
        self._on_cuda = any(p.is_cuda for p in model.parameters())
        self._sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
        total = sum(p.numel() for p in model.parameters() if p.requires_grad)
        first = dict.fromkeys(p for block in blocks for p in block.parameters())
        self._sizes[0] += _before_blocks(model, first)
        self._shares = [size / total for size in self._sizes]
        self._marks: list[tuple[str, int, float]] = []
        self._frozen_s = [0.0] * self._num
        self._steps: list[StepCosts] = []
        self._in_backward, self._depth = False, 0
        self._began: float | None = None
        self._hooks = []
        # A loop may call the model, or only a part of it that holds the blocks.
        for module in _ancestors(model, blocks[0]):
            self._hooks.append(module.register_forward_pre_hook(self._begin_forward))
            self._hooks.append(module.register_forward_hook(self._end_forward))
        for index, block in enumerate(blocks):
            into, back = partial(self._in_block, index), partial(self._back_in_block, index)
            self._hooks.append(block.register_forward_pre_hook(into))
            after = partial(self._after_block, index)
            self._hooks.append(block.register_forward_hook(after, with_kwargs=True))
            self._hooks.append(block.register_full_backward_pre_hook(back))

    def end_update(self) -> None:
        """Note that the optimizer's step is done."""
        self._mark("updated", 0)

    def end_step(self) -> None:
        """Note the end of a step; the first one is left out."""
        now = self._now()
        if self._began is not None and self._marks:
            self._steps.append(self._costs(now - self._began))
        self._began, self._marks, self._frozen_s = now, [], [0.0] * self._num

    @property
    def num_steps(self) -> int:
        """Return how many steps were timed."""
        return len(self._steps)

    def close(self) -> StepCosts | None:
        """Take the hooks away; return the medians of the steps, None where there was none."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if not self._steps:
            return None

        def median(name: str) -> tuple[float, ...]:
            columns = zip(*(getattr(step, name) for step in self._steps), strict=True)
            return tuple(map(statistics.median, columns))

        step_s = statistics.median(step.step_s for step in self._steps)
        kinds = map(median, ("forward_s", "backward_s", "update_s", "frozen_s"))
        return StepCosts(step_s, *kinds)

    def _begin_forward(self, *_: object) -> None:
        if self._depth == 0:
            self._in_backward = False
            self._mark("forward", 0)
        self._depth += 1

    def _in_block(self, index: int, *_: object) -> None:
        # Checkpointed blocks run again within the backward.
        if not self._in_backward:
            self._mark("block", index)

    def _after_block(
        self, index: int, block: nn.Module, inputs: Any, options: Any, output: Any
    ) -> None:
        if self._in_backward or not block.training:
            return
        if can_run_apart(block):
            self._mark("aside", index)
            self._frozen_s[index] += frozen_forward_s(block, inputs, options, self._now)
            self._mark("block", index)
        else:
            self._frozen_s[index] = math.nan

    def _end_forward(self, *_: object) -> None:
        self._depth -= 1
        self._mark("head", 0)

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

    def _costs(self, step_s: float) -> StepCosts:
        """Add a step's marks up: each lasts to the next one."""
        forward, backward = [0.0] * self._num, [0.0] * self._num
        embedding = update = 0.0
        ends = [when for _, _, when in self._marks[1:]]
        for (kind, index, begin), end in zip(self._marks, ends, strict=False):
            if kind == "forward":
                embedding += end - begin
            elif kind == "block":
                forward[index] += end - begin
            elif kind == "aside":
                step_s -= end - begin
            elif kind == "back":
                backward[index] += end - begin
            elif kind == "between":
                # Clipping and the optimizer's step; before another micro-batch there is neither.
                update = end - begin
        shares = tuple(share * update for share in self._shares)
        # Of a block that cannot run apart it is not known that it would be faster.
        frozen = [
            min(own, as_frozen) if as_frozen > 0 else own
            for own, as_frozen in zip(forward, self._frozen_s, strict=True)
        ]
        forward[0] += embedding
        frozen[0] += embedding
        return StepCosts(step_s, tuple(forward), tuple(backward), shares, tuple(frozen))


def _ancestors(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """Return the modules that hold a block, the model first."""
    return [
        module
        for module in model.modules()
        if module is not block and any(one is block for one in module.modules())
    ]


def _before_blocks(model: nn.Module, of_blocks: dict[nn.Parameter, None]) -> int:
    """Return how many weights are registered before the first block's."""
    num = 0
    for parameter in model.parameters():
        if parameter in of_blocks:
            break
        num += parameter.numel()
    return num
