"""Walk through what an object holds: containers, plain objects, functions with what they captured.

A quantized weight is such an object, too. It is a tensor with rules of its own, whose numbers lie
in other tensors: those that a wrapper subclass is made of, or scales that it has as attributes.

    library         the weight            its numbers
    bitsandbytes    Params4bit            its own bytes, and tensors of its `quant_state`
    torchao         a wrapper subclass    tensors under the names of `__tensor_flatten__`

Of a tensor nothing is asked but whether it is plain (`is_opaque`), and which plain tensors hold
its numbers (`plain_tensors`), so that no library needs to be known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_REGISTERED = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}
"""Attributes that torch keeps up to date itself; the last two are a recurrent module's."""
_PLAIN = {Tensor, nn.Parameter}
_MOST_VALUES, _MOST_MEMBERS = 10_000, 1_000
"""Limits of the walk: a larger object is data."""


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's plain attributes."""
    return {name: value for name, value in vars(module).items() if name not in _REGISTERED}


def held(value: Any) -> Iterator[Any]:
    """Yield a value and all that it holds, each once; modules and tensors are not opened."""
    waiting, seen = deque([value]), set[int]()
    while waiting and len(seen) < _MOST_VALUES:
        one = waiting.popleft()
        # An object may hold itself, so each is opened once.
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting.extend(islice(_members(one), _MOST_MEMBERS))


def held_tensors(value: Any) -> Iterator[Tensor]:
    return (one for one in held(value) if isinstance(one, Tensor))


def is_opaque(tensor: Tensor) -> bool:
    """Return whether a tensor is of a class with rules of its own, such as a quantized weight.

    Its `data` may be swapped by its own forward, and is never swapped, moved or converted here.
    """
    return type(tensor) not in _PLAIN and not is_lazy(tensor)


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors in whose memory a tensor's numbers lie; itself, where it is plain.

    Raises:
        ValueError: no memory is found.
    """
    if not is_opaque(tensor):
        return [tensor]
    # A wrapper has no memory of its own.
    found = [tensor] if tensor.data_ptr() or not tensor.numel() else []
    inner: list[Any] = []
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    for one in held_tensors([*inner, vars(tensor)]):
        found += plain_tensors(one) if is_opaque(one) else [one]
    if not found and not tensor.is_meta:
        raise ValueError(
            f"a {type(tensor).__name__} shows no tensor that holds its numbers, so that changes "
            "of it would not be noticed; give its class a __tensor_flatten__"
        )
    return [*{id(one): one for one in found}.values()]


def marks_of(tensor: Tensor) -> list[tuple[int, int]]:
    """Return addresses and versions; one of them changes where a tensor is written to."""
    if not is_opaque(tensor):
        return [(tensor.data_ptr(), tensor._version)]
    # What is written through a wrapper counts for it alone.
    return [(one.data_ptr(), one._version) for one in (tensor, *plain_tensors(tensor))]


@contextmanager
def opaque_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Have opaque tensors be again what they were, whatever forwards make of them within.

    A forward in eval mode may lay a quantized weight out in another way, which has no gradient:
    bitsandbytes does so on CPUs that multiply bfloat16.
    """
    kept = [(one, one.data, one.data_ptr()) for one in tensors if is_opaque(one)]
    # Both the weight and its object are changed in place, so both are put back.
    owners = {id(own): own for one, _, _ in kept for own in _owners(one)}
    had = [(own, dict(own)) for own in owners.values()]
    try:
        yield
    finally:
        for own, before in had:
            own.clear()
            own.update(before)
        for one, data, address in kept:
            if one.data_ptr() != address:
                one.data = data


def _owners(tensor: Tensor) -> Iterator[dict[str, Any]]:
    """Yield the attributes of a tensor, and of the objects in them."""
    for one in (tensor, *held(vars(tensor))):
        if isinstance(one, (nn.Module, type, ModuleType)) or (
            isinstance(one, Tensor) and one is not tensor
        ):
            continue
        if isinstance(own := getattr(one, "__dict__", None), dict):
            yield own


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, (Tensor, nn.Module, type, ModuleType)):
        return ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, FunctionType):
        return *_captured(value), value.__defaults__, value.__kwdefaults__
    return getattr(value, "__dict__", {}).values()


def _captured(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # Not assigned yet.
            continue
