"""Notice what a user changes of a model by hand: modules, hooks and plain attributes.

Tensors are not looked at here: their versions tell.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, repeat
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autopipe.profile import left_as_found
from pipetransformer.feed import own_random_numbers
from pipetransformer.loop.batches import generators_kept
from pipetransformer.model import asks_for_gradients, is_opaque, named_tensors, opaque_kept

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
_MOST_MEMBERS = 256
"""Of a list or a dict, such as the scales of a module's adapters; a larger one is data."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks")

_AT_FIRST_FORWARD = "_output_capturing_hooks_installed"
"""The attribute by which transformers notes that it has hooked blocks, to return their states."""
_HARMLESS = {
    "gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook",
    "_require_grads_hooks", "_frozen_in_place", _AT_FIRST_FORWARD,
    # Of peft's models, which switch adapters; what each layer does is looked at by itself.
    "active_adapter", "_adapters_disabled",
    # Its `generate` fills in what it lacks; a forward does not read it.
    "generation_config",
}  # fmt: skip
"""Attributes that change no number. TRL's DPO makes some anew in each step."""
_UNCOUNTED = ("forward", *_HARMLESS)
_HARMLESS_HOOKS = {"make_inputs_require_grads", "output_capturing_hook"}

_VERSION = operator.attrgetter("_version")

_Place = tuple[Any, Any]
"""A container, and a key of it."""


@final
class ModelWatch:
    """Watch some modules: whether each is still where it was, and what it holds.

    Attributes:
        modules: those that are watched, each once.
        ignored: places whose values a forward itself changes.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(dict.fromkeys(modules))
        self._attributes = [vars(module) for module in self.modules]
        own = set(self.modules)
        slots = [
            (table, name)
            for table in (attributes["_modules"] for attributes in self._attributes)
            for name, child in table.items()
            if child in own
        ]
        self._tables, self._names = [t for t, _ in slots], [name for _, name in slots]
        self._hooks = [attributes[name] for attributes in self._attributes for name in HOOKS]
        self.ignored: set[tuple[int, Any]] = set()
        self.renew()

    def renew(self) -> None:
        """Take what is there now for what should be there."""
        seen: set[int] = set()
        keys: dict[int, list[Any]] = {}
        containers: dict[int, dict[Any, Any]] = {}
        for attributes in self._attributes:
            for container, key in _places(attributes, seen):
                if (id(container), key) not in self.ignored:
                    containers[id(container)] = container
                    keys.setdefault(id(container), []).append(key)
        self._containers = [*containers.values()]
        self._keys = [*keys.values()]
        # One key more, as of a single one no tuple would come.
        self._getters = [operator.itemgetter(*own, own[0]) for own in self._keys]
        self._values = values = self._values_now()
        # A list may be changed in place, so it is kept as it was.
        self._lists = [
            one for own in values for one in own
            if type(one) is list and len(one) <= _MOST_MEMBERS
        ]  # fmt: skip
        self._listed = [*map(tuple, self._lists)]
        self._tensors = [
            one for own in values for one in own
            if isinstance(one, Tensor) and not one.is_inference()
        ]  # fmt: skip
        self._versions = [*map(_VERSION, self._tensors)]
        self._children, self._hooked = [*self._children_now()], self._hooks_now()
        self._forwards, self._sizes = [*self._forwards_now()], self._sizes_now()
        self._take_outline()

    def _take_outline(self) -> None:
        """Take note of what tells in a moment that nothing was touched."""
        self._objects = [*self._objects_in(self._values_now())]
        self._outline = self._outline_now()
        # Where one of these goes, as many attributes may be others.
        uncounted = [(own, name) for own in self._attributes for name in _UNCOUNTED if name in own]
        self._with_uncounted = [own for own, _ in uncounted]
        self._uncounted = [name for _, name in uncounted]

    def ignore_changes(self) -> None:
        """Watch no more what has changed by itself, and take the rest as it is now."""
        self.ignored.update((id(container), key) for container, key in self._changed_places())
        self.renew()

    def change(self) -> str:
        """Say what was changed, by name where it is a module's attribute."""
        owners = dict(zip(map(id, self._attributes), self.modules, strict=True))
        for container, key in chain(self._changed_places(), self._added_places()):
            if (module := owners.get(id(container))) is not None:
                return f"attribute {key!r} of {type(module).__name__} was changed"
            for module in self.modules:
                for name, value in vars(module).items():
                    if container is value or container is getattr(value, "__dict__", None):
                        return f"{key!r} in {name!r} of {type(module).__name__} was changed"
        return "attributes or hooks of frozen modules, or around them, were changed"

    def _changed_places(self) -> Iterator[_Place]:
        """Yield where values are others than they were."""
        was = dict(zip(map(id, self._lists), self._listed, strict=True))
        versions = dict(zip(map(id, self._tensors), self._versions, strict=True))
        for container, keys, old in zip(self._containers, self._keys, self._values, strict=True):
            for key, before in zip(keys, old, strict=False):
                now: Any = container.get(key)
                before = was.get(id(before), before) if type(before) is list else before
                was_written = id(now) in versions and now._version != versions[id(now)]
                if was_written or not _same(tuple(now) if type(now) is list else now, before):
                    yield container, key

    def _added_places(self) -> Iterator[_Place]:
        """Yield attributes of modules that were not there."""
        known = {id(one): keys for one, keys in zip(self._containers, self._keys, strict=True)}
        for own in self._attributes:
            there = {*known.get(id(own), ()), *_UNCOUNTED}
            added = (name for name in _plain_names(own) if name not in there)
            yield from ((own, name) for name in added if (id(own), name) not in self.ignored)

    def replaced(self) -> bool:
        """Return whether a module has taken another one's place."""
        return not all(map(operator.is_, self._children_now(), self._children))

    def changed(self) -> bool:
        """Return whether a plain attribute, a hook or a `forward` is another."""
        return self.has_other_attributes() or self._has_other_forwards()

    def has_other_attributes(self) -> bool:
        """Return whether a plain attribute or a hook is another."""
        if self._is_untouched():
            return False
        if self._has_other_values():
            return True
        self._take_outline()  # What has come or gone changes no number.
        return False

    def _is_untouched(self) -> bool:
        """Return whether all is the very same objects, which is quickly seen."""
        # Numbers first: as many members tell which object is compared with which.
        if self._outline_now() != self._outline:
            return False
        if not all(map(operator.contains, self._with_uncounted, self._uncounted)):
            return False
        try:
            now = self._objects_in(self._values_now())
        except KeyError:  # One was deleted.
            return False
        return all(map(operator.is_, now, self._objects))

    def _has_other_values(self) -> bool:
        if not all(map(_same, map(tuple, self._lists), self._listed)):
            return True
        if [*map(_VERSION, self._tensors)] != self._versions or self._sizes_now() != self._sizes:
            return True
        if self._hooks_now() != self._hooked:
            return True
        try:
            now = self._values_now()
        except KeyError:  # One was deleted.
            return True
        for own, before in zip(now, self._values, strict=True):
            # Most are the same objects, which is quickly seen.
            if not all(map(operator.is_, own, before)) and not all(map(_same, own, before)):
                return True
        return False

    def _has_other_forwards(self) -> bool:
        if all(map(operator.is_, self._forwards_now(), self._forwards)):
            return False
        now = [*self._forwards_now()]
        if not all(map(operator.is_, map(_but_ours, now), map(_but_ours, self._forwards))):
            return True
        self._forwards = now
        return False

    def _children_now(self) -> Iterator[Any]:
        return map(dict.get, self._tables, self._names)

    def _outline_now(self) -> list[int]:
        """Return how many attributes and members there are, tensors' versions and hooks' keys."""
        # No two hooks of a process have one key, so that equal keys are the same hooks.
        return [
            *map(len, self._attributes), *map(len, self._lists), *map(_VERSION, self._tensors),
            *chain.from_iterable(self._hooks),
        ]  # fmt: skip

    def _objects_in(self, values: list[tuple[Any, ...]]) -> Iterator[Any]:
        return chain(chain.from_iterable(values), chain.from_iterable(self._lists))

    def _hooks_now(self) -> list[int]:
        return [
            key
            for hooks in filter(None, self._hooks)
            for key, hook in hooks.items()
            # Ours come and go as others serve the model, such as an evaluation.
            if not _is_ours(hook) and getattr(hook, "__name__", "") not in _HARMLESS_HOOKS
        ]

    def _forwards_now(self) -> Iterator[Any]:
        """Return modules' own `forward`."""
        return map(dict.get, self._attributes, repeat("forward"))

    def _sizes_now(self) -> list[int]:
        """Return how many attributes each module has, but those that change no number."""
        return [len(own) - sum(map(own.__contains__, _UNCOUNTED)) for own in self._attributes]

    def _values_now(self) -> list[tuple[Any, ...]]:
        pairs = zip(self._getters, self._containers, strict=True)
        return [getter(container) for getter, container in pairs]


def _places(attributes: dict[str, Any], seen: set[int]) -> Iterator[_Place]:
    """Yield where values are: a module's attributes, and members of its dicts and settings."""
    # A quantized weight may have its scales in an object beside it.
    is_quantized = any(p is not None and is_opaque(p) for p in attributes["_parameters"].values())
    kinds = (*_PLAIN, Tensor) if is_quantized else _PLAIN
    for name in _plain_names(attributes):
        value = attributes[name]
        # `forward` is looked at of each module, whether it has one or not.
        if name == "forward" or name in _HARMLESS:
            continue
        yield attributes, name
        members = value if type(value) is dict else getattr(value, "__dict__", None)
        if isinstance(value, (Tensor, nn.Module)) or not isinstance(members, dict):
            continue
        if id(members) not in seen and len(members) <= _MOST_MEMBERS:
            seen.add(id(members))  # One configuration serves many modules.
            yield from ((members, key) for key, one in members.items() if isinstance(one, kinds))


def _but_ours(forward: Any) -> Any:
    """Return what ours has taken the place of, such as a forward that accelerate has set."""
    return getattr(forward, "own", None) if forward is not None and _is_ours(forward) else forward


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith(("pipetransformer.", "freeze."))


@final
class InnerHooks:
    """Know the hooks on modules within a part, whose calls do not come where rows are read."""

    def __init__(self, part: nn.Module) -> None:
        self._names = [name for name, _ in part.named_modules() if name for _ in HOOKS]
        self._tables = [
            vars(module)[table] for name, module in part.named_modules() if name for table in HOOKS
        ]
        self._own = [vars(part)[table] for table in HOOKS]
        self._keys: list[int] | None = None
        self._missed_at, self._need_gradients = "", False

    def are_on_it(self) -> bool:
        """Return whether the part itself has a hook that somebody would miss."""
        own = (hook for hooks in self._own for hook in hooks.values())
        return not all(map(_is_missed_by_nobody, own))

    def missed_at(self) -> str:
        """Name a module with a hook that somebody would miss; "" without one."""
        self._look()
        return self._missed_at

    def need_gradients(self) -> bool:
        """Return whether one has what the part returns need a gradient, for a checkpoint."""
        self._look()
        return self._need_gradients

    def _look(self) -> None:
        # No two hooks of a process have one key, so that equal keys are the same hooks.
        if (keys := [*chain.from_iterable(self._tables)]) == self._keys:
            return
        self._keys = keys
        missed = (
            name
            for name, hooks in zip(self._names, self._tables, strict=True)
            if not all(map(_is_missed_by_nobody, hooks.values()))
        )
        self._missed_at = next(missed, "")
        self._need_gradients = any(
            map(asks_for_gradients, (hook for own in self._tables for hook in own.values()))
        )


def looking_hook(blocks: Sequence[nn.Module], run: Callable[[], object]) -> str:
    """Name a module with a hook that only looks at it in a run, and would see rows; "" for none.

    A hook that changes what it is given is a part of what rows are made from. The last block's
    own hooks act on rows.
    """
    looked = list[str]()

    def noted(name: str, hook: Callable[..., Any], *given: Any, **named: Any) -> Any:
        answer = hook(*given, **named)
        if answer is None:
            looked.append(name)
        return answer

    places = [
        (vars(module)[kind], f"{name!r} of block {place}" if name else f"block {place}")
        for place, block in enumerate(blocks)
        for name, module in block.named_modules()
        for kind in HOOKS
        if name or place < len(blocks) - 1
    ]
    missed = [
        (table, key, hook, name)
        for table, name in places
        for key, hook in table.items()
        if not _is_missed_by_nobody(hook)
    ]
    if not missed:
        return ""
    try:
        for table, key, hook, name in missed:
            table[key] = partial(noted, name, hook)
        run()
    finally:
        for table, key, hook, _ in missed:
            table[key] = hook
    return next(iter(looked), "")


def _is_missed_by_nobody(hook: Any) -> bool:
    # Those of libraries act on their module alone, as weight norm's.
    owner = hook if hasattr(hook, "__qualname__") else type(hook)
    is_of_library = str(owner.__module__).startswith(("torch.", "transformers."))
    return _is_ours(hook) or is_of_library or asks_for_gradients(hook)


def hold_others(hooks: Iterable[Mapping[int, Any]]) -> bool:
    """Return whether modules' hooks are not all ours."""
    return not all(_is_ours(hook) for own in hooks for hook in own.values())


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are one, or equal plain values, or lists of these."""
    if one is other:
        return True
    if type(one) is not type(other):
        # transformers writes a dtype's name in its place as it saves.
        if {type(one), type(other)} == {torch.dtype, str}:
            return str(one).removeprefix("torch.") == str(other).removeprefix("torch.")
        # peft makes a list of an adapter's name when it switches to another and back.
        mine, others = ([each] if isinstance(each, str) else each for each in (one, other))
        return type(mine) is type(others) is list and mine == others
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
    # transformers hooks blocks at the first forward that returns their states, and notes it in an
    # attribute: both go, or it would hook them twice.
    hooked = [(hooks, {*hooks}) for m in modules for hooks in (vars(m)[name] for name in HOOKS)]
    with ExitStack() as stack:
        stack.enter_context(generators_kept(*modules))
        stack.enter_context(own_random_numbers(device))
        stack.enter_context(left_as_found([model], device))
        stack.enter_context(opaque_kept(named_tensors(model).values()))
        stack.enter_context(_without_others_hooks(model))
        stack.enter_context(_without_zeros(model))
        # A loop may be within a checkpoint, which counts what its forward saves. An output that
        # its own graph keeps would hold that graph for ever, were it not detached.
        stack.enter_context(saved_tensors_hooks(Tensor.detach, lambda saved: saved))
        try:
            yield
        finally:
            for now, before in kept:
                for name in _plain_names(now):
                    if name not in before:
                        del now[name]
                now.update(before)
            for hooks, had in hooked:
                for key in [key for key in hooks if key not in had]:
                    del hooks[key]


@contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Have weights that train, and begin at zero, show what lies behind them.

    LoRA's second factor, a gate or a new head: what they hide would be taken for of no use.
    """
    values: dict[nn.Parameter, Tensor] = {}
    try:
        for weight in model.parameters():
            if weight.requires_grad and _is_zero(weight):
                values[weight] = weight.data
                num_inputs = weight[0].numel() if weight.ndim > 1 else 4
                weight.data = torch.randn_like(weight.data) / num_inputs**0.5
        yield
    finally:
        for weight, value in values.items():
            weight.data = value


def _is_zero(weight: Tensor) -> bool:
    # Most are told by their first number.
    return weight.numel() > 0 and not bool(weight.flatten()[0]) and not bool(weight.any())


@contextmanager
def _without_others_hooks(model: nn.Module) -> Iterator[None]:
    """Have a model's own hooks see nothing of looks, but ours; they act on all forwards alike."""
    kept = {name: dict(vars(model)[name]) for name in HOOKS}
    try:
        for hooks in (vars(model)[name] for name in HOOKS):
            for key, one in list(hooks.items()):
                if not _is_ours(one):
                    del hooks[key]
        yield
    finally:
        for name, hooks in kept.items():
            vars(model)[name].clear()
            vars(model)[name].update(hooks)
