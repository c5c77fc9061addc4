"""Notice what a user changes of a model by hand: modules, hooks and plain attributes.

Tensors are not looked at here: their versions tell.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autopipe.profile import left_as_found
from pipetransformer.feed import own_random_numbers
from pipetransformer.loop.randomness import generators_kept

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
_MOST_MEMBERS = 256
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
        seen: set[int] = set()
        places = [p for module in self._modules for p in _places(vars(module), seen)]
        self._places = [p for p in places if (id(p[0]), p[1]) not in self.ignored]
        self._values = self._values_now()
        self._children, self._hooked = self._children_now(), self._hooks_now()
        self._forwards = self._forwards_now()

    def ignore_changes(self) -> None:
        """Watch no more what has changed by itself, and take the rest as it is now."""
        for place, value, old in zip(self._places, self._values_now(), self._values, strict=True):
            if not _same(value, old):
                self.ignored.add((id(place[0]), place[1]))
        self.renew()

    def replaced(self) -> bool:
        """Return whether a module has taken another one's place."""
        return self._children_now() != self._children

    def changed(self) -> bool:
        """Return whether a plain attribute or a hook is another."""
        now = self._values_now()
        if not all(map(operator.is_, now, self._values)):
            if not all(map(_same, now, self._values)):
                return True
        if not all(map(operator.is_, self._forwards_now(), self._forwards)):
            return True
        return self._hooks_now() != self._hooked

    def _children_now(self) -> list[int]:
        return [id(table.get(name)) for table, name in self._slots]

    def _hooks_now(self) -> list[int]:
        return [key for hooks in self._hooks for key in hooks]

    def _forwards_now(self) -> list[Any]:
        """Return modules' own `forward`, but ours."""
        found = [vars(module).get("forward") for module in self._modules]
        return [None if one is not None and _is_ours(one) else one for one in found]

    def _values_now(self) -> list[Any]:
        # A list may be changed in place, so it is kept as it was.
        values = [container.get(key) for container, key in self._places]
        return [tuple(value) if type(value) is list else value for value in values]


def _places(attributes: dict[str, Any], seen: set[int]) -> Iterator[_Place]:
    """Yield where values are: a module's attributes, and members of its dicts and settings."""
    for name in _plain_names(attributes):
        value = attributes[name]
        if name == "forward":
            continue  # Of each module, whether it has one or not.
        yield attributes, name
        members = value if type(value) is dict else getattr(value, "__dict__", None)
        if isinstance(value, (Tensor, nn.Module)) or not isinstance(members, dict):
            continue
        if id(members) not in seen and len(members) <= _MOST_MEMBERS:
            seen.add(id(members))  # One configuration serves many modules.
            yield from ((members, key) for key, one in members.items() if isinstance(one, _PLAIN))


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("pipetransformer.")


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are one, or equal plain values, or lists of these."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)) and len(one) == len(other) <= _MOST_MEMBERS:
        return all(map(_same, one, other))
    return isinstance(one, _PLAIN) and one == other


def _plain_names(attributes: dict[str, Any]) -> list[str]:
    return [name for name in attributes if name not in _REGISTERED]


_REGISTERED = frozenset(vars(nn.Module()))


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
                if not _is_ours(one):
                    del hooks[key]
        yield
    finally:
        for name, hooks in kept.items():
            vars(model)[name].clear()
            vars(model)[name].update(hooks)
