"""Keep the weights that micro-batches in flight were, or will be, computed with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

_T = TypeVar("_T")
Weights = Mapping[str, Tensor]
"""Leaves by name, each of which stands for a parameter."""


class _Held(nn.Module):
    """Give all of a stage's modules one set of names, and a call that they lend weights to."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


class WeightVersions:
    """Hold the versions of some modules' trained parameters; version 0 is what they are now.

    A version is a set of leaves. The newest has the parameters' own memory until an update; then
    the parameters move to new memory, if any graph still needs the old.

    Buffers have no versions: running statistics are those of the newest forward, as published.

    Attributes:
        parameters: by name.
        newest: the number of the newest version.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held = _Held(modules)
        named = self._held.named_parameters()
        self.parameters = {name: p for name, p in named if p.requires_grad}
        self.newest = 0
        self._kept = {0: self._leaves()}

    def __getitem__(self, version: int) -> Weights:
        """Return a version that is kept.

        Raises:
            KeyError: it is not.
        """
        return self._kept[version]

    def run_with(self, weights: Weights, call: Callable[[], _T]) -> _T:
        """Call something that runs the modules, with these weights in their places."""
        result: _T = functional_call(self._held, dict(weights), (call,))
        return result

    def update(
        self, change: Callable[[], None], *, oldest: int, in_use: Iterable[Weights]
    ) -> None:
        """Make a version: let something change the parameters in place, and drop their gradients.

        Args:
            change: what updates them.
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
