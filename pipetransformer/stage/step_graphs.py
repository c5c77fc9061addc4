"""Launch a step's kernels at once: captured as a CUDA graph, and replayed with other samples.

    a batch's shapes    host
    for the first time  launches all, and looks which sublayers draw random numbers
    again               captures all: nothing runs; then replays
    from then on        copies the batch to where the graph reads it, and replays

A graph ends where a sublayer that draws is to be seeded, and another begins there; the first of
them is seeded before all:

    seed 1 | graph 0: sublayers 0 to 2 | seed 3 | graph 1: sublayers 3 ..., loss, backward, update

Graphs share one pool of memory, as no two of them run at once.

A replay repeats kernels, not Python. What a forward reads of its module besides tensors is as it
was; so every `_LOOKS_EVERY` replays the model's own forward is asked for the same loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch
from torch.optim import optimizer as optimizers_of_torch

from pipetransformer.config import TrainConfig
from pipetransformer.feed import Batch, ComingStep
from pipetransformer.stage.step_capture import BeforeCapture, Capture, Draws, StepGraph
from pipetransformer.stage.trained_part import TrainedPart
from pipetransformer.stage.work import TrainWork

_LOGGER = logging.getLogger(__name__)

_MOST_SHAPES = 8
"""Shapes of batches that are captured; each keeps gradients of its own."""

_LOOKS_EVERY = 64

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    # For all modules and optimizers, in torch's own files.
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
    "_global_backward_pre_hooks", "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks",
)  # fmt: skip

_Shapes: TypeAlias = tuple[tuple[Any, ...], ...]


@final
class StepGraphs:
    """Capture and replay the steps of a run's only GPU.

    Args:
        train: launches all kernels of a step: forward, backward, and the update; returns the
            step's numbers, (n,).
        loss: launches those of its forward; returns the batch's mean loss, 0-dim.
        modules: those that the step runs.
        repeats: whether layers run forward again in the backward.
    Attributes:
        why_not: why steps are not replayed, or "".
    """

    def __init__(
        self,
        part: TrainedPart,
        device: torch.device,
        *,
        train: Callable[[TrainWork], Tensor],
        loss: Callable[[TrainWork], Tensor],
        modules: list[nn.Module],
        repeats: bool,
    ) -> None:
        self._part, self._device, self._train, self._loss = part, device, train, loss
        self._modules, self._repeats = modules, repeats
        self._tables = [table for one in modules for table in (one._parameters, one._buffers)]
        self._draws: dict[_Shapes, frozenset[int]] = {}
        self._graphs: dict[_Shapes, StepGraph] = {}
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._look: tuple[int, StepGraph, Tensor, torch.cuda.Event] | None = None
        self.why_not = ""
        assert part.optimizer is not None
        # Also for steps that are launched: all compute alike.
        part.keep_rates_on(device)
        for group in part.optimizer.param_groups:
            group["capturable"] = True
        self._refuse_hooks()

    def run(self, work: TrainWork, coming: ComingStep) -> bool:
        """Run a step by a graph, if there is one, or can be; say whether it has run."""
        self.settle()
        draws = self._draws.get(_shapes_of(work.parts))
        if self.why_not or draws is None:
            return False
        self._part.set_rates(coming)
        graph = self._graph_of(work, coming.step, draws)
        if graph is None:
            return False
        graph.replays += 1
        looks = graph.replays % _LOOKS_EVERY == 0
        if looks and self._refuse_hooks():
            return False
        for own, given in zip(_entries(graph.parts), _entries(work.parts), strict=True):
            own.copy_(given, non_blocking=True)
        # In grad mode, as kernels and compiled blocks differ without.
        expected = self._loss(work.alike(work.parts, work.seeding)) if looks else None
        for seeded, piece in graph.pieces:
            if seeded is not None:
                work.seed_layer(*seeded)
            piece.replay()
        for parameter, gradient in graph.gradients:
            parameter.grad = gradient
        work.values = graph.values
        if expected is not None:
            self._note(coming.step, graph, expected)
        return True

    @contextmanager
    def note_draws(self, work: TrainWork) -> Iterator[None]:
        """Note what a step draws whose shapes are new, within the block."""
        shapes = _shapes_of(work.parts)
        if self.why_not or shapes in self._draws or len(self._draws) == _MOST_SHAPES:
            yield
            return
        draws = Draws(self._device, work.seeding)
        work.seeding = draws
        yield
        draws.end()
        if draws.on_host:
            self._leave("the model draws random numbers on the host, or decides by them")
        elif draws.sublayers and self._repeats:
            self._leave("layers that draw random numbers run again in the backward")
        self._draws[shapes] = frozenset(draws.sublayers)
        if len(self._draws) == _MOST_SHAPES:
            _LOGGER.warning(
                "cuda_graph: batches have had %d shapes; those of others are not captured. Pad "
                "texts to fewer lengths",
                _MOST_SHAPES,
            )

    def settle(self) -> None:
        """Leave the graphs if the model's own forward no longer gives what they give."""
        if self._look is None:
            return
        (step, graph, differs, event), self._look = self._look, None
        event.synchronize()
        if bool(differs):
            self._leave(
                f"the model's forward gives another loss in step {step} than its captured kernels "
                f"do. What it reads besides tensors was changed, and steps {graph.looked_at} to "
                f"{step} trained with what it was before; or its kernels are not deterministic"
            )
        graph.looked_at = step

    def close(self) -> None:
        """Free the graphs' memory."""
        if self._graphs:
            torch.cuda.current_stream(self._device).synchronize()
        self._graphs.clear()
        self._draws.clear()

    def _graph_of(self, work: TrainWork, step: int, draws: frozenset[int]) -> StepGraph | None:
        """Return the graph of a step's shapes, captured anew where tensors were replaced."""
        shapes, held = _shapes_of(work.parts), self._held()
        graph = self._graphs.get(shapes)
        if graph is not None and graph.held == held:
            return graph
        self._graphs.pop(shapes, None)
        parts = {
            i: {name: entry.clone() for name, entry in batch.items()}
            for i, batch in work.parts.items()
        }
        before = BeforeCapture(self._modules, self._part)
        graph = StepGraph(parts, held, before.tensors, looked_at=step)
        if not self._graphs:  # torch refuses a pool whose last graph is gone.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            self._capture(graph, work, draws)
            before.refuse_others()
        except Exception as error:
            # The step is launched instead, and raises what is no fault of the capture's.
            before.restore()
            text = str(error).partition("\n")[0]
            self._leave(f"step {step} cannot be captured: {type(error).__name__}: {text}")
            return None
        self._graphs[shapes] = graph
        return graph

    def _capture(self, graph: StepGraph, work: TrainWork, draws: frozenset[int]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # Within a capture torch frees no memory that launched steps have left in its cache.
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            capture = Capture(graph, self._pool, draws, self._device)
            capture.begin(work)
            try:
                graph.values = self._train(work.alike(graph.parts, capture))
            except BaseException:  # Also when interrupted: a checkpoint is still to be written.
                capture.give_up()
                raise
            capture.end()
        current.wait_stream(self._stream)
        graph.gradients = [(p, p.grad) for p in self._part.parameters.values()]

    def _held(self) -> tuple[Any, ...]:
        """Return where weights, buffers and moments are, and the settings but the rates."""
        optimizer = self._part.optimizer
        assert optimizer is not None
        settings = (
            (key, value)
            for group in optimizer.param_groups
            for key, value in group.items()
            if key not in ("params", "lr")
        )
        tables = (*self._tables, *optimizer.state.values())
        tensors = (one for table in tables for one in table.values())
        return (*(one.data_ptr() for one in tensors if isinstance(one, Tensor)), *settings)

    def _refuse_hooks(self) -> bool:
        """Leave the graphs if there are hooks; return whether there are."""
        optimizer = self._part.optimizer
        assert optimizer is not None
        holders = [type(one).__name__ for one in self._modules if _has_hooks(vars(one))]
        if _has_hooks(vars(optimizer)):
            holders.append(type(optimizer).__name__)
        if _has_hooks(vars(modules_of_torch)) or _has_hooks(vars(optimizers_of_torch)):
            holders.append("global registry")
        if holders:
            self._leave(f"a {holders[0]} has hooks, which a replay does not call")
        return bool(holders)

    def _note(self, step: int, graph: StepGraph, expected: Tensor) -> None:
        """Compare a loss with that of the kernels, without waiting for it."""
        assert graph.values is not None
        loss = graph.values[0]
        differs = (expected != loss) & ((expected == expected) | (loss == loss))
        told = torch.empty((), dtype=torch.bool, pin_memory=True)
        told.copy_(differs, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._look = step, graph, told, event

    def _leave(self, why: str) -> None:
        """Launch all steps from now on, and say why."""
        self.why_not = self.why_not or why
        _LOGGER.warning("cuda_graph: %s; kernels are launched one by one", why)
        self.close()


def tell_why_not(config: TrainConfig, device: torch.device, *, size: int) -> None:
    """Say why no step of a run is captured."""
    if size > 1:
        why = f"{size} processes train, which wait for each other within a step"
    elif device.type != "cuda":
        why = f"the run is on {device.type!r}, and not on a GPU"
    elif config.precision == "fp16" or config.weight_versions is not None:
        why = "with precision='fp16' or weight_versions= the host decides on updates"
    else:
        why = (
            "the host decides on updates, where the optimizer is not torch's fused Adam or AdamW, "
            "or the policy's signals sum gradients"
        )
    _LOGGER.warning("cuda_graph has no effect: %s", why)


def _shapes_of(parts: dict[int, Batch]) -> _Shapes:
    return tuple(
        (i, name, entry.shape, entry.dtype)
        for i, batch in parts.items()
        for name, entry in batch.items()
    )


def _entries(parts: dict[int, Batch]) -> list[Tensor]:
    return [entry for batch in parts.values() for entry in batch.values()]


def _has_hooks(holder: Mapping[str, Any]) -> bool:
    """Return whether one of a holder's registries of hooks for a step has any."""
    return any(holder.get(name) for name in _HOOKS)
