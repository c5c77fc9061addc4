"""Keep the weights that micro-batches in flight were, or will be, computed with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

_T = TypeVar("_T")
Weights = Mapping[str, Tensor]
"""Leaves by name, each of which stands for a parameter."""


class WeightVersions:
    """Hold the versions of some modules' trained parameters; version 0 is what they are now.

    A version is a set of leaves. The newest has the parameters' own memory until an update; then
    the parameters move to new memory, if any graph still needs the old.

    Buffers have no versions: running statistics are those of the newest forward, as published.

    Args:
        modules: all that hold the parameters as attributes; a forward may read them from any.
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
        trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
        self.parameters: dict[str, nn.Parameter] = {}
        # Where a forward finds them: a module's own dictionary, and the name there.
        self._slots: list[tuple[dict[str, Any], str, str]] = []
        names: dict[int, str] = {}
        for number, module in enumerate(modules):
            for prefix, part in module.named_modules(prefix=str(number)):
                for key, parameter in part._parameters.items():
                    if parameter is not None and id(parameter) in trained:
                        name = names.setdefault(id(parameter), f"{prefix}.{key}")
                        self.parameters[name] = parameter
                        self._slots.append((part._parameters, key, name))
        self.newest = 0
        self._kept = {0: self._leaves()}

    def __getitem__(self, version: int) -> Weights:
        return self._kept[version]

    def run_with(self, weights: Weights, call: Callable[[], _T]) -> _T:
        """Call something that runs the modules, with these weights in their places."""
        try:
            for place, key, name in self._slots:
                place[key] = weights[name]
            return call()
        finally:
            for place, key, name in self._slots:
                place[key] = self.parameters[name]

    def update(
        self, change: Callable[[], None], *, oldest: int, in_use: Iterable[Weights]
    ) -> None:
        """Make a version: let something change the parameters in place, and drop their gradients.

        Args:
            oldest: version that is still asked for; those before it are forgotten.
            in_use: versions whose memory graphs need.
        """
        present = self._kept[self.newest]
        if oldest <= self.newest or any(weights is present for weights in in_use):
            for parameter in self.parameters.values():
                parameter.data = parameter.data.clone()
        change()
        for parameter in self.parameters.values():
            parameter.grad = None
        self.newest += 1
        self._kept = {v: own for v, own in self._kept.items() if v >= oldest}
        self._kept[self.newest] = self._leaves()

    def count_with(self, in_use: Iterable[Weights]) -> int:
        """Count the versions in memory: those kept, and those in use."""
        return len({id(weights) for weights in (*self._kept.values(), *in_use)})

    def _leaves(self) -> Weights:
        # Not detached, which would count writes to the parameter as writes to the leaf.
        return {name: p.data.requires_grad_() for name, p in self.parameters.items()}
