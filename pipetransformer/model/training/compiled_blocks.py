"""Compile a model's blocks for training steps; all else runs as it is.

                    training step    frozen prefix, evaluation, probes
    embedding       eager            eager
    blocks          compiled         eager
    head, loss      eager            eager

Equal blocks share one graph, and a graph serves all batch sizes and lengths but 1, which torch
compiles by itself. The prefix stays eager: graphs of other sizes may round otherwise, and a cached
row must be equal to a computed one. Evaluation would need graphs of its own, for little.

Between two steps the model is as the user gave it: forwards are put into modules for a step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, ClassVar, TypeAlias, final

import torch
from torch import nn
from torch.fx.experimental import _config as symbolic_shapes_config

from pipetransformer.model.layered_model import LayeredModel

_SHAPES: Any = symbolic_shapes_config
_Forwards: TypeAlias = Mapping[nn.Module, Callable[..., Any]]


@final
class CompiledBlocks:
    """Hold the compiled forwards of a model's blocks.

    Args:
        backend, mode: as `torch.compile` takes them.
    Attributes:
        num_frames: what torch has compiled for blocks of all runs, as its own counters count.
    Raises:
        ValueError: there is no such backend, or a forward cannot be replaced for a while.
    """

    num_frames: ClassVar[int] = 0

    def __init__(self, model: LayeredModel, *, backend: str, mode: str | None) -> None:
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(
                f"compile_backend is {backend!r}, which torch does not have here; choose one of "
                f"{', '.join(known)}"
            )
        self._parts = {
            index: sublayer.compiled_part
            # The embedding and the head differ from all else, and run once a micro-batch.
            for index, sublayer in enumerate(model.sublayers[1:-1], start=1)
        }
        for index, part in self._parts.items():
            if "forward" in vars(part) or not isinstance(type(part).forward, FunctionType):
                raise ValueError(
                    f"sublayer {model.sublayers[index].name!r} runs a {type(part).__name__} whose "
                    "forward is no method of its class, which compile=True cannot put another in "
                    "the place of; leave compile out"
                )
        self._compile = partial(torch.compile, backend=backend, mode=mode, dynamic=True)
        self._forwards: dict[Any, Callable[..., Any]] = {}

    def of(self, indices: Iterable[int]) -> Callable[[], AbstractContextManager[None]]:
        """Return a context in which blocks among sublayers run compiled, whoever calls them.

        It holds for which parameters need gradients now.
        """
        modules = [self._parts[index] for index in indices if index in self._parts]
        # A dict, as a model may run one block many times.
        return partial(self._used, {module: self._forward_of(module) for module in modules})

    def _forward_of(self, module: nn.Module) -> Callable[..., Any]:
        """Return a module's compiled forward; equal modules share all graphs.

        torch 2.11 does not look at which parameters need gradients when it chooses a graph, so
        those of other flags are kept under another code object. So are those of other shapes, as
        torch keeps eight graphs for each and then goes on without.
        """
        key = type(module), tuple((p.shape, p.requires_grad) for p in module.parameters())
        if key not in self._forwards:
            forward: Any = type(module).forward
            self._forwards[key] = self._compile(_copied(forward))
        return MethodType(self._forwards[key], module)

    @contextmanager
    def _used(self, forwards: _Forwards) -> Iterator[None]:
        others = num_frames() - CompiledBlocks.num_frames
        for module, forward in forwards.items():
            # Not the module's whole call: hooks within `__call__` stay eager, and are seen.
            vars(module)["forward"] = forward
        try:
            # A batch of as many samples as a hidden state is wide must not be taken for its width.
            with _SHAPES.patch(use_duck_shape=False):
                yield
        finally:
            for module in forwards:
                del vars(module)["forward"]
            # Right also where one such context is within another, as while costs are measured.
            CompiledBlocks.num_frames = num_frames() - others


def _copied(function: FunctionType) -> FunctionType:
    """Return a function with a code object of its own, under which torch keeps its graphs."""
    code: CodeType = function.__code__.replace()
    copied = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def num_frames() -> int:
    """Return how many pieces of code torch has compiled so far."""
    return sum(torch._dynamo.utils.counters["frames"].values())
