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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch
from torch.optim import optimizer as optimizers_of_torch
from torch.utils._pytree import tree_leaves

from autopipe.random_state import plain_random_state
from pipetransformer.config import TrainConfig
from pipetransformer.feed import Batch, ComingStep, seed_torch
from pipetransformer.stage.trained_part import TrainedPart
from pipetransformer.stage.work import Seeding, TrainWork

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


@dataclass(frozen=True)
class StepKernels:
    """Say what launches a step's kernels.

    Args:
        train: all of them: forward, backward, and the update; returns the step's numbers, (n,).
        loss: those of its forward; returns the batch's mean loss, 0-dim.
    """

    train: Callable[[TrainWork], Tensor]
    loss: Callable[[TrainWork], Tensor]


@dataclass
class _Graph:
    """Hold a captured step.

    Attributes:
        parts: entries of the micro-batches, where the kernels read them.
        held: what they read and write besides, as `_held` tells.
        kept: all tensors of the modules: the kernels may read those that are replaced since.
        pieces: a graph each, and which micro-batch and sublayer is seeded before it.
        values: (n,) the step's numbers.
        gradients: of the parameters, where the kernels leave them.
        replays: how often it ran.
        looked_at: the step of its capture, or of the last look at the model's own loss.
    """

    parts: dict[int, Batch]
    held: tuple[Any, ...]
    kept: list[Tensor]
    pieces: list[tuple[tuple[int, int] | None, torch.cuda.CUDAGraph]] = field(default_factory=list)
    values: Tensor | None = None
    gradients: list[tuple[nn.Parameter, Tensor | None]] = field(default_factory=list)
    replays: int = 0
    looked_at: int = 0


@final
class StepGraphs:
    """Capture and replay the steps of a run's only GPU.

    Args:
        modules: those that the step runs.
        repeats: whether layers run forward again in the backward.
    Attributes:
        why_not: why steps are not replayed, or "".
    """

    def __init__(
        self,
        part: TrainedPart,
        device: torch.device,
        kernels: StepKernels,
        *,
        modules: list[nn.Module],
        repeats: bool,
    ) -> None:
        self._part, self._device, self._kernels = part, device, kernels
        self._modules, self._repeats = modules, repeats
        self._draws: dict[_Shapes, frozenset[int]] = {}
        self._graphs: dict[_Shapes, _Graph] = {}
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._look: tuple[int, _Graph, Tensor, torch.cuda.Event] | None = None
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
        expected = self._kernels.loss(work.alike(work.parts, work.seeding)) if looks else None
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
    def looking(self, work: TrainWork) -> Iterator[None]:
        """Look meanwhile at what a step draws whose shapes are new."""
        shapes = _shapes_of(work.parts)
        if self.why_not or shapes in self._draws or len(self._draws) == _MOST_SHAPES:
            yield
            return
        draws = _Draws(self._device, work.seeding)
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

    def _graph_of(self, work: TrainWork, step: int, draws: frozenset[int]) -> _Graph | None:
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
        before = _Before(self._modules, self._part)
        graph = _Graph(parts, held, before.tensors, looked_at=step)
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

    def _capture(self, graph: _Graph, work: TrainWork, draws: frozenset[int]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # Within a capture torch frees no memory that launched steps have left in its cache.
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            capture = _Capture(graph, self._pool, draws, self._device)
            capture.begin(work)
            try:
                graph.values = self._kernels.train(work.alike(graph.parts, capture))
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
        tables = [table for one in self._modules for table in (one._parameters, one._buffers)]
        tensors = (one for table in (*tables, *optimizer.state.values()) for one in table.values())
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

    def _note(self, step: int, graph: _Graph, expected: Tensor) -> None:
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


@final
class _Before:
    """Note what modules and the optimizer hold before a capture, in which nothing is computed.

    Attributes:
        tensors: those of the modules.
    """

    def __init__(self, modules: list[nn.Module], part: TrainedPart) -> None:
        assert part.optimizer is not None
        self._modules, self._part, self._states = modules, part, part.optimizer.state
        self._trained = set(self._states)
        self.tensors = [one for module in modules for one in _kept_by(module)]
        # Mappings in a module: of its parameters and buffers, and such as it caches in.
        tables = [
            table
            for module in modules
            for table in (vars(module), *vars(module).values())
            if isinstance(table, dict)
        ]
        self._tables = [(table, dict(table)) for table in tables]

    def refuse_others(self) -> None:
        """Raise an error if the capture has left what only a replay computes."""
        if self._states.keys() - self._trained:
            raise ValueError("a parameter gets its first gradient in a captured step")
        known = {*map(id, self.tensors)}
        for module in self._modules:
            if any(id(one) not in known for one in _kept_by(module)):
                raise ValueError(
                    f"the forward of a {type(module).__name__} keeps a tensor that it computes, "
                    "which replays of other shapes would overwrite"
                )

    def restore(self) -> None:
        """Have all be as it was before the capture."""
        self._part.drop_gradients()
        for parameter in self._states.keys() - self._trained:
            del self._states[parameter]
        for table, before in self._tables:
            table.clear()
            table.update(before)


@final
class _Capture:
    """Capture a step in pieces, on the current stream: seeding ends one and begins the next."""

    def __init__(
        self, graph: _Graph, pool: Any, draws: frozenset[int], device: torch.device
    ) -> None:
        self._graph, self._pool, self._draws, self._device = graph, pool, draws, device

    def begin(self, work: TrainWork) -> None:
        """Begin the first piece, behind the seed of the first sublayer that draws."""
        # What runs before that one draws nothing, so no piece is needed for it, or is empty.
        first = (next(iter(self._graph.parts)), min(self._draws)) if self._draws else None
        if first is not None:
            work.seed_layer(*first)
        self._begin(first)

    def __call__(self, micro_batch: int, index: int, seed: int, *, plainly: bool) -> None:
        """Begin another piece, if the sublayer draws; see `Seeding`."""
        if index in self._draws and (micro_batch, index) != self._graph.pieces[0][0]:
            self.end()
            seed_torch(seed, self._device)
            self._begin((micro_batch, index))

    def end(self) -> None:
        """End the last piece."""
        self._graph.pieces[-1][1].capture_end()

    def give_up(self) -> None:
        """End the capture after an error."""
        with suppress(RuntimeError):  # What was captured is of no use.
            self.end()
        # torch goes on refusing random numbers: the generator's state still counts as captured.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())

    def _begin(self, seeded: tuple[int, int] | None) -> None:
        piece = torch.cuda.CUDAGraph()
        # Other threads, which copy rows, are not in the way.
        piece.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph.pieces.append((seeded, piece))


@final
class _Draws:
    """Note which sublayers draw random numbers, between their seeds.

    Attributes:
        sublayers: those that draw on the device.
        on_host: whether anything draws on the host.
    """

    def __init__(self, device: torch.device, seeding: Seeding) -> None:
        self.sublayers: set[int] = set()
        self.on_host = False
        self._device, self._seeding = device, seeding
        self._index: int | None = None
        self._before: tuple[Tensor, Tensor, bytes] | None = None

    def __call__(self, micro_batch: int, index: int, seed: int, *, plainly: bool) -> None:
        """Seed; see `Seeding`."""
        self.end()
        self._seeding(micro_batch, index, seed, plainly=plainly)
        self._index, self._before = index, self._states()

    def end(self) -> None:
        """Look at the last sublayer, and the loss."""
        if self._before is None:
            return
        (device, host, plain), now = self._before, self._states()
        assert self._index is not None
        if not torch.equal(device, now[0]):
            self.sublayers.add(self._index)
        self.on_host |= plain != now[2] or not torch.equal(host, now[1])
        self._before = None

    def _states(self) -> tuple[Tensor, Tensor, bytes]:
        return torch.cuda.get_rng_state(self._device), torch.get_rng_state(), plain_random_state()


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


def _kept_by(module: nn.Module) -> list[Tensor]:
    """Return a module's own tensors, also those in its lists and mappings."""
    return [one for one in tree_leaves(vars(module)) if isinstance(one, Tensor)]


def _has_hooks(holder: Mapping[str, Any]) -> bool:
    """Return whether one of a holder's registries of hooks for a step has any."""
    return any(holder.get(name) for name in _HOOKS)
