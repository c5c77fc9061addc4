"""Time what each layer costs in a few training steps, by hooks on any model.

forward   model ─ embedding ─► block 0 ─► ... ─► block L-1 ─ head ─► loss
backward  optimizer ◄─ embedding + block 0 ◄─ ... ◄─ block L-1 ◄─ head
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from freeze.in_place import freezing_with

_SKIPPED_STEPS, _TIMED_STEPS = 1, 6


@dataclass(frozen=True)
class StepCosts:
    """Hold the seconds of a step, and of it by layer; the embedding's are in layer 0's.

    The update is split in proportion to the times to copy the weights.
    """

    step_s: float
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]

    def saved_share(self, num_frozen: int, *, cached: bool) -> float:
        """Return the least share of a step that freezing saves.

        Frozen layers have no backward and no update; cached, no forward. Without a cache theirs
        is shorter, too, as it has no dropout and no graph. That is not counted.
        """
        kinds = [self.backward_s, self.update_s, *([self.forward_s] if cached else [])]
        return sum(sum(layers[:num_frozen]) for layers in kinds) / self.step_s


class StepTimes:
    """Watch a model's steps; micro-batches add up, and a repeated forward counts as backward.

    On CUDA every mark waits for the device, which slows the few steps watched.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._model, self._blocks = model, blocks
        self._on_cuda = any(p.is_cuda for p in model.parameters())
        self._marks: list[tuple[str, int, float]] = []
        self._steps: list[list[float]] = []
        self._num_steps, self._in_backward = 0, False
        self._began = self._now()
        # The loop may call the model, or only a part of it that holds the blocks.
        self._hooks = [
            module.register_forward_pre_hook(partial(self._in_forward, "embedding", 0))
            for module in model.modules()
            if module is not blocks[0] and any(part is blocks[0] for part in module.modules())
        ]
        for index, block in enumerate(blocks):
            into, after = partial(self._in_forward, "block", index), partial(self._after, index)
            self._hooks.append(block.register_forward_pre_hook(into))
            self._hooks.append(block.register_forward_hook(after))

    def end_update(self) -> None:
        self._mark("updated", 0)

    def end_step(self) -> None:
        now, self._num_steps = self._now(), self._num_steps + 1
        if self._num_steps > _SKIPPED_STEPS and self._marks:
            self._steps.append(self._timed(now - self._began))
        self._began, self._marks, self._in_backward = now, [], False

    @property
    def is_done(self) -> bool:
        return len(self._steps) >= _TIMED_STEPS

    def close(self) -> StepCosts | None:
        """Remove the hooks; return the medians of the steps, None without a step."""
        for hook in self._hooks:
            hook.remove()
        if not self._steps:
            return None
        columns = zip(*self._steps, strict=True)
        step_s, embedding_s, update_s, *each = map(statistics.median, columns)
        forward, backward = each[: len(self._blocks)], each[len(self._blocks) :]
        layers = [{*layer.values()} for layer in freezing_with(self._model, self._blocks)]
        above = {*self._model.parameters()}.difference(*layers)
        copies = [self._copy_s(weights) for weights in (*layers, above)]
        return StepCosts(
            step_s,
            (forward[0] + embedding_s, *forward[1:]),
            tuple(backward),
            tuple(update_s * seconds / (sum(copies) or 1.0) for seconds in copies[:-1]),
        )

    def _copy_s(self, weights: Iterable[nn.Parameter]) -> float:
        """Return the median seconds to copy those of the weights that train."""
        # Copies, as an optimizer's intermediates are new tensors: large ones take long to map.
        trained, seconds = [weight for weight in weights if weight.requires_grad], []
        for _ in range(3):
            start = self._now()
            for weight in trained:
                weight.detach().clone()
            seconds.append(self._now() - start)
        return statistics.median(seconds)

    def _in_forward(self, kind: str, index: int, *_: object) -> None:
        # A checkpointed block runs again within the backward.
        if not self._in_backward:
            self._mark(kind, index)

    def _after(self, index: int, block: nn.Module, inputs: Any, output: Any) -> None:
        if not (self._model.training or torch.is_grad_enabled()):
            # An evaluation is no part of the step: the step begins behind it.
            self._began, self._marks = self._now(), []
            return
        # Not a module's backward hook: its outputs would be views that no code may write to.
        leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        if (first := next((leaf for leaf in leaves if leaf.requires_grad), None)) is not None:
            first.register_hook(partial(self._back_in_block, index))
        self._in_forward("head", 0)

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
        spent: dict[tuple[str, int], float] = defaultdict(float)
        ends = [when for _, _, when in self._marks[1:]]
        for (kind, index, begin), end in zip(self._marks, ends, strict=False):
            # The last counts: only behind the last micro-batch there is an update.
            before = 0.0 if kind == "between" else spent[kind, index]
            spent[kind, index] = before + end - begin
        layers = range(len(self._blocks))
        each = [spent[kind, index] for kind in ("block", "back") for index in layers]
        return [step_s, spent["embedding", 0], spent["between", 0], *each]
