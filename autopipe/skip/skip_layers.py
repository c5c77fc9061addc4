"""Carry a tensor from the layer that makes it to the layer that needs it, past those between.

A layer declares the names it stashes and pops, and its forward is a generator that yields them:

    layer       0        1        2        3
    forward   stash a    |     stash b   pop b
                         |               pop a
    waiting     a        a       a b       -

Each forward of a micro-batch through a partition has a store where it waits. Outside a pipeline it
waits in the thread's own store.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopipe.skip.routes import SkipKey, Skippable, names_of

SkipStore = dict[SkipKey, Tensor | None]
"""The skips of one forward, each until it is popped."""


# Compared by identity: tensors have no truth value.
@dataclass(frozen=True, eq=False)
class Command:
    """Ask to keep or to take a tensor; made by `stash` and `pop`."""

    verb: str
    name: str
    tensor: Tensor | None = None


def stash(name: str, tensor: Tensor | None) -> Command:
    """Keep a tensor, or None, for the layer that pops the name: `yield stash(name, tensor)`."""
    return Command("stash", name, tensor)


def pop(name: str) -> Command:
    """Take the tensor stashed under a name: `tensor = yield pop(name)`, None where it was None."""
    return Command("pop", name)


class _Thread(threading.local):
    """Hold the store given to this thread's forward, and its own store for plain models."""

    def __init__(self) -> None:
        self.given: SkipStore | None = None
        self.own: SkipStore = {}
        # Weak, so that a plain model can be freed.
        self.stashed_by = weakref.WeakValueDictionary[SkipKey, Skippable]()


_thread = _Thread()


@contextmanager
def using(store: SkipStore) -> Iterator[None]:
    """Let layers that run in this thread stash into and pop from a store."""
    before, _thread.given = _thread.given, store
    try:
        yield
    finally:
        _thread.given = before


def _current_store() -> SkipStore:
    return _thread.own if _thread.given is None else _thread.given


def _complete(layer: Skippable, result: Any) -> Any:
    """Serve the commands of a layer's forward, and check that it did all that it declared."""
    done: set[tuple[str, str]] = set()
    try:
        if isinstance(result, types.GeneratorType):
            forward, answer = result, None
            try:
                while True:
                    answer = _serve(layer, forward.send(answer), done)
            except StopIteration as stop:
                result = stop.value
        if missing := [
            f"{skip[0]} {skip[1]!r}" for skip in layer.declared_skips if skip not in done
        ]:
            message = f"{layer.describe_skips()} did not {' nor '.join(missing)} in its forward; "
            raise RuntimeError(message + "do it on every path, with None where there is no skip")
    except BaseException:
        # A failed forward leaves nothing behind for the next one to trip over.
        for verb, name in done:
            if verb == "stash":
                _current_store().pop(layer.skip_key(name), None)
        raise
    return result


def _serve(layer: Skippable, command: Any, done: set[tuple[str, str]]) -> Tensor | None:
    who = layer.describe_skips()
    if not isinstance(command, Command):
        kind = type(command).__name__
        raise TypeError(f"{who} yielded a {kind}; yield stash(name, tensor) or pop(name) only")
    verb, name = command.verb, command.name
    if (verb, name) not in layer.declared_skips:
        raise RuntimeError(f"{who} tried to {verb} {name!r}; add it to skippable({verb}=[...])")
    if (verb, name) in done:
        raise RuntimeError(f"{who} tried to {verb} {name!r} twice in one forward; {verb} it once")
    skip = None
    if verb == "pop":
        skip = _take(layer, name)
    else:
        _keep(layer, name, command.tensor)
    done.add((verb, name))
    return skip


def _keep(layer: Skippable, name: str, tensor: Tensor | None) -> None:
    key, who = layer.skip_key(name), layer.describe_skips()
    if not isinstance(tensor, (Tensor, types.NoneType)):
        kind = type(tensor).__name__
        raise TypeError(f"{who} stashed a {kind} as {name!r}; stash a tensor or None")
    # A given store is one forward's; the thread's own may hold skips of a failed one.
    if _thread.given is None:
        _drop_leftovers(key, layer)
    if key in _current_store():
        message = f"{who} stashed {name!r}, which another layer stashed before it; "
        raise RuntimeError(message + "isolate each pair by a Namespace of its own")
    _current_store()[key] = tensor


def _take(layer: Skippable, name: str) -> Tensor | None:
    key, store = layer.skip_key(name), _current_store()
    if key not in store:
        message = f"{layer.describe_skips()} popped {name!r}, but no layer before it stashed it "
        raise RuntimeError(message + "in this forward and thread; check by verify_skippables")
    return store.pop(key)


def _drop_leftovers(key: SkipKey, layer: Skippable) -> None:
    """Empty the thread's own store if a failed forward left the skip there."""
    before = _thread.stashed_by.get(key)
    _thread.stashed_by[key] = layer
    if key not in _thread.own:
        return
    _thread.own = {}
    if before is not None and before is not layer:
        message = f"{layer.describe_skips()} stashes {key.name!r}, which another layer stashed; "
        message += "no layer popped it, and it is dropped. Isolate the two by Namespaces"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


_new_object = copyreg.__newobj__  # type: ignore[attr-defined]
# Weak values, so that a class made from a local class can be freed with it.
_made: weakref.WeakValueDictionary[Any, type[Skippable]] = weakref.WeakValueDictionary()


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Declare the skips of a layer class whose forward yields `stash(...)` and `pop(...)`.

        @skippable(stash=["lto3"])
        class Layer1(nn.Module):
            def forward(self, input):
                yield stash("lto3", input)
                return f1(input)

    The decorated class derives from the layer class. So methods must call `super()`, not
    `super(Layer1, self)`, which would recur. Type checkers overlook decorators of classes, but
    understand `SkippableLayer1 = skippable(stash=["lto3"])(Layer1)`.

    Args:
        stash, pop: names that each forward stashes, and pops, exactly once.
    Raises:
        TypeError: `stash` or `pop` is a single string or holds no strings; or the decorated object
            is no class of nn.Module, or is skippable already.
    Source: torchgpipe's manual, 2.3.2. Ours keeps the layer's class, its attributes and the names
    in its state_dict.
    """
    declared = names_of(stash, what="stash"), names_of(pop, what="pop")

    def decorate(layer: type[nn.Module]) -> type[Skippable]:
        if not isinstance(layer, type) or not issubclass(layer, nn.Module):
            raise TypeError(f"skippable decorates classes of nn.Module, not {layer!r}")
        if issubclass(layer, Skippable):
            raise TypeError(f"{layer.__name__} is skippable already; declare all names at once")
        return _derive(layer, *declared)

    return decorate


def _derive(
    layer: type[nn.Module], stashed: tuple[str, ...], popped: tuple[str, ...]
) -> type[Skippable]:
    if known := _made.get((layer, stashed, popped)):
        return known

    # Wrapped, so that the decorated forward has the layer's own signature.
    @functools.wraps(layer.forward)
    def forward(self: Skippable, *args: Any, **kwargs: Any) -> Any:
        return _complete(self, layer.forward(self, *args, **kwargs))

    def reduce(self: Skippable, protocol: Any) -> Any:
        reduced = super(made, self).__reduce_ex__(max(protocol, 2))
        # After `S = skippable(...)(Layer)`, pickle finds the plain class under the name Layer.
        # So instances are pickled by what their class was made from.
        if type(self) is made and reduced[0] is _new_object and _importable(layer):
            return _rebuild, (layer, stashed, popped), *reduced[2:]
        return reduced

    declared = (*(("stash", name) for name in stashed), *(("pop", name) for name in popped))
    names = {name: getattr(layer, name) for name in ("__doc__", "__module__", "__qualname__")}
    body = {**names, "__reduce_ex__": reduce, "forward": forward, "declared_skips": declared}
    metaclass: Any = type(layer)
    made: type[Skippable] = metaclass(layer.__name__, (Skippable, layer), body)
    _made[layer, stashed, popped] = made
    return made


def _importable(cls: type) -> bool:
    part_of: object = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        part_of = getattr(part_of, part, None)
    return part_of is cls


def _rebuild(layer: type[nn.Module], *declared: tuple[str, ...]) -> Skippable:
    made = _derive(layer, *declared)
    return made.__new__(made)
