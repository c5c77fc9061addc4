"""Look through what objects hold: containers, plain objects, functions with what they captured."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn

Numbers: TypeAlias = dict[tuple[nn.Module, str], tuple[float, ...]]
"""Numbers by the module that holds them, however deep, and the attribute's name."""
_REGISTERED = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}
"""What torch keeps of a module itself; of a recurrent one, lists that it brings up to date."""
_MOST_VALUES, _MOST_MEMBERS = 10_000, 1_000
"""As far as it is looked: what is larger is data."""


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return what a module holds beside what it has registered."""
    return {name: value for name, value in vars(module).items() if name not in _REGISTERED}


@dataclass(frozen=True)
class Remembered:
    """Hold the plain numbers, and the tensors with their versions, in a module's attributes and in
    those of the modules within it.
    """

    numbers: Numbers
    tensors: list[tuple[Tensor, int]]

    def has_tensors_of(self, other: Remembered) -> bool:
        """Tell whether both hold the same tensors, with nothing written into them in between."""
        pairs = zip(self.tensors, other.tensors, strict=False)
        return len(self.tensors) == len(other.tensors) and all(
            one is its and version == its_version for (one, version), (its, its_version) in pairs
        )


def remembered(module: nn.Module) -> Remembered:
    """Look at what a module holds now."""
    numbers: Numbers = {}
    tensors: list[tuple[Tensor, int]] = []
    for part in module.modules():
        for name, value in attributes_of(part).items():
            several = [*held(value)]
            if own := numbers_in(several):
                numbers[part, name] = own
            tensors += [(one, _version(one)) for one in several if isinstance(one, Tensor)]
    return Remembered(numbers, tensors)


def numbers_in(values: Iterable[Any]) -> tuple[float, ...]:
    """Return the numbers among values; NaN, which equals nothing, is none."""
    return tuple(one for one in values if isinstance(one, (int, float)) and one == one)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # Which are not counted.


def held(value: Any) -> Iterator[Any]:
    """Yield a value, and what it holds, each once; modules and tensors are not looked into."""
    waiting, seen = deque([value]), set[int]()
    while waiting and len(seen) < _MOST_VALUES:
        one = waiting.popleft()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting.extend(islice(_members(one), _MOST_MEMBERS))


def held_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a value holds."""
    return (one for one in held(value) if isinstance(one, Tensor))


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
