"""Capture a step in CUDA graphs, and leave nothing behind that only a replay computes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopipe.random_state import plain_random_state
from pipetransformer.feed import Batch, seed_torch
from pipetransformer.stage.trained_part import TrainedPart
from pipetransformer.stage.work import Seeding, TrainWork


@dataclass
class StepGraph:
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
class BeforeCapture:
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
class Capture:
    """Capture a step in pieces, on the current stream: seeding ends one and begins the next."""

    def __init__(
        self, graph: StepGraph, pool: Any, draws: frozenset[int], device: torch.device
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
class Draws:
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


def _kept_by(module: nn.Module) -> list[Tensor]:
    """Return a module's own tensors, also those in its lists and mappings."""
    return [one for one in tree_leaves(vars(module)) if isinstance(one, Tensor)]
