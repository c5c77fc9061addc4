"""Refuse ranks that were given different things: they would train on, and drift apart.

Look through what objects hold: containers, plain objects, functions with what they captured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn

from autocache import chain_hash
from autodp import gather_json
from pipetransformer.durable_files import hash_json
from pipetransformer.feed import Samples
from pipetransformer.model import Task, named_tensors
from pipetransformer.processes import World, agree

_OF_A_PROCESS = {
    "cache_folder", "device", "folder", "label", "memory_limit_bytes", "num_workers", "pin_memory",
    "prefetch_factor", "progress", "resume", "setup_timeout_s", "step_timeout_s",
}  # fmt: skip
"""Settings that may differ, as nothing that is learned depends on them."""
_NUM_SAMPLES, _ABSENT = 4, "absent"


def refuse_differing_ranks(
    task: Task, world: World, *, optimizer: str, data: Mapping[str, Samples]
) -> None:
    """Compare settings, optimizer, data and what the model holds unregistered. Collective.

    Args:
        optimizer: its groups' settings, spelled.
        data: by the argument's name.
    Raises:
        ValueError: on every rank: it names what differs first.
    """
    if world.group is None:
        return
    facts = agree(lambda: dict(_facts(task, optimizer, data)), group=world.group)
    found = gather_json(facts, group=world.group)
    advised = {what: advice for one in found for what, (_, advice) in one.items()}
    for what, advice in advised.items():
        values = [one[what][0] if what in one else _ABSENT for one in found]
        # What changes from read to read on one rank says nothing.
        if None not in values and any(value != values[0] for value in values):
            raise ValueError(f"{what} differs from rank to rank ({_shortened(values)}); {advice}")


def _facts(
    task: Task, optimizer: str, data: Mapping[str, Samples]
) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield what must be equal, by its name, with what to do where it is not."""
    advice = "give all ranks the same: samples are shared out, and random numbers drawn, for all"
    for name, value in task.config.plain().items():
        if name not in _OF_A_PROCESS:
            yield f"setting {name!r}", (str(value), advice)
    yield "what optimizer= builds", (optimizer, advice)
    yield "loss_fn=", (task.loss_fn.name, advice)
    yield "the set of parameters that train", (hash_json(sorted(task.trainable)), advice)
    for name, samples in data.items():
        yield f"the length of {name}", (len(samples.dataset), advice)
        for index in samples.spread(_NUM_SAMPLES):
            once, again = (_digest(samples.probe([index]).items()) for _ in range(2))
            told = once if once == again else None
            split = "give all ranks the same data set, split with a fixed seed: it is shared out"
            yield f"sample {index} of {name}", (told, split)
    register = "make it a buffer or a module, so that rank 0's counts"
    for name, digest in _unregistered(task.model.model):
        yield f"attribute {name}, which is not registered,", (digest, register)


def _unregistered(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield digests of the tensors that modules hold in plain attributes, by name."""
    for owner, module in model.named_modules():
        for name, value in attributes_of(module).items():
            tensors: list[tuple[str, Tensor]] = []
            for one in held(value):
                if isinstance(one, Tensor):
                    tensors.append(("", one))
                elif isinstance(one, nn.Module) and one is not model:
                    tensors += named_tensors(one).items()
            if tensors:
                yield f"{name!r} of {owner or type(module).__name__!r}", _digest(tensors)


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    plain = ((n, t) for n, t in tensors if not t.is_meta and not t.is_sparse)
    return f"{chain_hash(0, plain, mode=''):x}"


def _shortened(values: list[Any]) -> str:
    text = ", ".join(map(str, values))
    return text if len(text) < 200 else f"{text[:200]} ..."


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
