"""Declare a layer's skips, find out which partitions exchange them, and check that they pair up.

    layer      0          1          2          3
    declares   stash a    stash b    pop b      pop a
    cut        | partition 0 ------- | partition 1 -- |

Here one edge leads from partition 0 to partition 1; its keys are a, b.
"""

from __future__ import annotations

import inspect
import itertools
import types
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn


@dataclass(frozen=True)
class Namespace:
    """Tell skips of the same name apart; see `Skippable.isolate`.

    Two namespaces differ; a copied or pickled one equals its original.
    """

    id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)


@dataclass(frozen=True)
class SkipKey:
    """Name one skip of a model, and the namespace that isolates it."""

    namespace: Namespace | None
    name: str


class Skippable(nn.Module):
    """Hold a layer's declared skips; the base of every class that `skippable` makes."""

    # ("stash" or "pop", name), in the order they were declared.
    declared_skips: ClassVar[tuple[tuple[str, str], ...]] = ()
    _skip_namespaces: Mapping[str, Namespace] = types.MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isgeneratorfunction(cls.__dict__.get("forward")):
            raise TypeError(
                f"{cls.__name__} overrides the forward of a skippable class by a generator, which "
                f"nothing would run; derive it from the undecorated class and decorate it itself"
            )

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Skippable:
        """Tell this layer's skips apart from others of the same names; return the layer itself.

        Args:
            ns: shared by the layers that stash and pop them.
            only: names to isolate; None for all declared names.
        Raises:
            TypeError: `ns` is not a Namespace, or `only` is a single string.
            ValueError: `only` holds a name that the layer does not declare.
        """
        if not isinstance(ns, Namespace):
            raise TypeError(f"isolate takes a Namespace, not {ns!r}; pass Namespace()")
        declared = [name for _, name in self.declared_skips]
        names = declared if only is None else names_of(only, what="only")
        if unknown := [name for name in names if name not in declared]:
            who = self.describe_skips()
            raise ValueError(f"{who} cannot isolate {unknown}; name skips that it declares")
        # A new mapping: the class's own is shared by all layers.
        self._skip_namespaces = {**self._skip_namespaces, **dict.fromkeys(names, ns)}
        return self

    def stashable(self) -> tuple[SkipKey, ...]:
        """Return the skips that each forward stashes, in declared order."""
        return tuple(self.skip_key(name) for verb, name in self.declared_skips if verb == "stash")

    def poppable(self) -> tuple[SkipKey, ...]:
        """Return the skips that each forward pops, in declared order."""
        return tuple(self.skip_key(name) for verb, name in self.declared_skips if verb == "pop")

    def skip_key(self, name: str) -> SkipKey:
        return SkipKey(self._skip_namespaces.get(name), name)

    def describe_skips(self) -> str:
        """Return the layer's class and what it declared, for messages."""
        stashed, popped = [k.name for k in self.stashable()], [k.name for k in self.poppable()]
        return f"{type(self).__name__} (declared stash={stashed}, pop={popped})"

    def __repr__(self) -> str:
        return f"@skippable({super().__repr__()})"


def names_of(names: Iterable[str], *, what: str) -> tuple[str, ...]:
    """Return distinct names in their order."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(
            f"{what} must be an iterable of names, not {names!r}; write "
            f"skippable(stash=['name']) or only=['name']"
        )
    listed = tuple(dict.fromkeys(names))
    if wrong := [name for name in listed if not isinstance(name, str)]:
        raise TypeError(f"{what} must hold strings, not {wrong}")
    return listed


@dataclass(frozen=True)
class SkipEdge:
    """Name the skips that one partition stashes for another, in declared order."""

    source: int
    target: int
    keys: tuple[SkipKey, ...]


def skip_edges(partitions: Sequence[Iterable[nn.Module]]) -> tuple[SkipEdge, ...]:
    """List the edges between partitions, by source and then by target; nested modules count.

    Source: the portals of torchgpipe, section 3.3: a skip goes straight to where it is popped.
    """
    skippables = [
        [module for layer in layers for module in layer.modules() if isinstance(module, Skippable)]
        for layers in partitions
    ]
    poppers = {
        key: target
        for target, modules in enumerate(skippables)
        for module in modules
        for key in module.poppable()
    }
    keys_of: dict[tuple[int, int], list[SkipKey]] = {}
    for source, modules in enumerate(skippables):
        for module in modules:
            for key in module.stashable():
                # A skip that is popped in its own partition stays there.
                if poppers.get(key, -1) > source:
                    keys_of.setdefault((source, poppers[key]), []).append(key)
    return tuple(SkipEdge(*pair, tuple(keys_of[pair])) for pair in sorted(keys_of))


def verify_skippables(module: nn.Sequential) -> None:
    """Check that each skip of a model is stashed by one layer and popped by a later one.

    Inside a layer both orders pass: the layer decides which of its modules runs first.

    Raises:
        TypeError: `module` is no nn.Sequential, or some stash and pop do not match; every
            failure is listed with the layer's name.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"verify_skippables checks an nn.Sequential, not {type(module).__name__}")
    stashed: set[SkipKey] = set()
    popped: set[SkipKey] = set()
    failures: list[str] = []
    # Duplicates stay: a module that stands in two places declares its skips twice.
    named = (
        (name, child)
        for name, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, Skippable) and name
    )
    for _, layer in itertools.groupby(named, key=lambda item: item[0].split(".")[0]):
        members = list(layer)
        for name, child in members:
            failures += [f"{name!r} {wrong}" for wrong in _wrong_stashes(child, stashed)]
            stashed.update(child.stashable())
        for name, child in members:
            failures += [f"{name!r} {wrong}" for wrong in _wrong_pops(child, stashed, popped)]
            popped.update(child.poppable())
    for key in sorted(stashed - popped, key=lambda key: key.name):
        failures.append(
            f"no module declared {key.name!r} as poppable but stashed: let a layer after it pop "
            f"it, isolated by the same Namespace if it is isolated"
        )
    if failures:
        raise TypeError("some stash and pop do not match:\n* " + "\n* ".join(failures))


_ISOLATE = "but not isolated by namespace: isolate each pair by a Namespace of its own"


def _wrong_stashes(module: Skippable, stashed: set[SkipKey]) -> Iterator[str]:
    for key in module.stashable():
        if key in module.poppable():
            yield (
                f"declared {key.name!r} both as stashable and as poppable: give the two skips "
                f"different names"
            )
        elif key in stashed:
            yield f"redeclared {key.name!r} as stashable {_ISOLATE}"


def _wrong_pops(module: Skippable, stashed: set[SkipKey], popped: set[SkipKey]) -> Iterator[str]:
    for key in module.poppable():
        if key not in stashed:
            yield (
                f"declared {key.name!r} as poppable but it was not stashed: let a layer before it "
                f"stash it, isolated by the same Namespace if it is isolated"
            )
        elif key in popped and key not in module.stashable():
            yield f"redeclared {key.name!r} as poppable {_ISOLATE}"
