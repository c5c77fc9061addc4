"""Notice what a user changes of a model by hand: modules, hooks and plain attributes.

Tensors are not looked at here: their versions tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autopipe.profile import left_as_found
from pipetransformer.feed import own_random_numbers
from pipetransformer.loop.randomness import generators_kept

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
_MOST_MEMBERS = 64
"""Of a list or a dict, such as the scales of a module's adapters; a larger one is data."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

_Place = tuple[Any, Any]
"""A container, and a key of it."""


@final
class ModelWatch:
    """Watch some modules: whether each is still where it was, and what it holds.

    Attributes:
        ignored: places whose values a forward itself changes.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(dict.fromkeys(modules))
        own = set(self._modules)
        self._slots = [
            (table, name)
            for table in (vars(module)["_modules"] for module in self._modules)
            for name, child in table.items()
            if child in own
        ]
        self._hooks = [vars(module)[name] for module in self._modules for name in _HOOKS]
        self.ignored: set[tuple[int, Any]] = set()
        self.renew()

    def renew(self) -> None:
        """Take what is there now for what should be there."""
        places = [place for module in self._modules for place in _places(vars(module))]
        self._places = [p for p in places if (id(p[0]), p[1]) not in self.ignored]
        self._values = [container[key] for container, key in self._places]
        self._children, self._hooked = self._children_now(), self._hooks_now()

    def ignore_changes(self) -> None:
        """Watch no more what has changed by itself, and take the rest as it is now."""
        now = self._values_now()
        for place, value, old in zip(self._places, now, self._values, strict=True):
            if value is not old and value != old:
                self.ignored.add((id(place[0]), place[1]))
        self.renew()

    def replaced(self) -> bool:
        """Return whether a module has taken another one's place."""
        return self._children_now() != self._children

    def changed(self) -> bool:
        """Return whether a plain attribute or a hook is another."""
        return self._values_now() != self._values or self._hooks_now() != self._hooked

    def _children_now(self) -> list[int]:
        return [id(table.get(name)) for table, name in self._slots]

    def _hooks_now(self) -> list[int]:
        return [key for hooks in self._hooks for key in hooks]

    def _values_now(self) -> list[Any]:
        return [container.get(key) for container, key in self._places]


def _places(attributes: dict[str, Any]) -> Iterator[_Place]:
    """Yield where plain values are, among a module's attributes and in their dicts."""
    for name in _plain_names(attributes):
        value = attributes[name]
        if isinstance(value, _PLAIN):
            yield attributes, name
        elif type(value) is dict and len(value) <= _MOST_MEMBERS:
            yield from ((value, key) for key, one in value.items() if isinstance(one, _PLAIN))


def _plain_names(attributes: dict[str, Any]) -> list[str]:
    return [name for name in attributes if name not in _REGISTERED]


_REGISTERED = frozenset(vars(nn.Module())) | {"forward"}


@contextmanager
def left_alone(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Have looks at a model leave no trace: buffers, modes, attributes, generators, gradients."""
    modules = list(model.modules())
    kept = [
        (vars(module), {name: vars(module)[name] for name in _plain_names(vars(module))})
        for module in modules
    ]
    with ExitStack() as stack:
        stack.enter_context(generators_kept(*modules))
        stack.enter_context(own_random_numbers(device))
        stack.enter_context(left_as_found([model], device))
        stack.enter_context(_without_others_hooks(model))
        # A loop may be within a checkpoint, which counts what its forward saves.
        stack.enter_context(saved_tensors_hooks(lambda saved: saved, lambda saved: saved))
        try:
            yield
        finally:
            for now, before in kept:
                for name in _plain_names(now):
                    if name not in before:
                        del now[name]
                now.update(before)


@contextmanager
def _without_others_hooks(model: nn.Module) -> Iterator[None]:
    """Have a model's own hooks see nothing of looks, but ours; they act on all forwards alike."""
    kept = {name: dict(vars(model)[name]) for name in _HOOKS}
    try:
        for hooks in (vars(model)[name] for name in _HOOKS):
            for key, one in list(hooks.items()):
                if not type(one).__module__.startswith("pipetransformer."):
                    del hooks[key]
        yield
    finally:
        for name, hooks in kept.items():
            vars(model)[name].clear()
            vars(model)[name].update(hooks)
