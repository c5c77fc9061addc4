"""Refuse ranks that were given different things: they would train on, and drift apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autocache import chain_hash
from autodp import gather_json
from pipetransformer.durable_files import hash_json
from pipetransformer.feed import Samples
from pipetransformer.model import Task, attributes_of, held, named_tensors
from pipetransformer.processes import World, agree

_OF_A_PROCESS = {
    "cache_folder", "device", "folder", "label", "memory_limit_bytes", "num_workers", "pin_memory",
    "prefetch_factor", "progress", "resume", "setup_timeout_s", "step_timeout_s",
}  # fmt: skip
"""Settings that may differ from rank to rank: the trained weights do not depend on them."""
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
    facts_by_rank = gather_json(facts, group=world.group)
    advised = {what: advice for one in facts_by_rank for what, (_, advice) in one.items()}
    for what, advice in advised.items():
        values = [one[what][0] if what in one else _ABSENT for one in facts_by_rank]
        # None is a sample that reads differently twice on one rank: it tells nothing.
        if None not in values and any(value != values[0] for value in values):
            text = ", ".join(map(str, values))
            text = text if len(text) < 200 else f"{text[:200]} ..."
            raise ValueError(f"{what} differs from rank to rank ({text}); {advice}")


def _facts(
    task: Task, optimizer: str, data: Mapping[str, Samples]
) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield (name, (value, advice where it differs)) of all that must be equal."""
    advice = "give all ranks the same: samples are shared out, and random numbers drawn, for all"
    for name, value in task.config.plain().items():
        if name not in _OF_A_PROCESS:
            yield f"setting {name!r}", (str(value), advice)
    limits = [task.config.cache_limit, *task.config.cache_limits]
    yield "the number of the cache's folders, or a limit,", (str(limits), advice)
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
    for name, tensors in _unregistered(task.model.model):
        yield f"attribute {name}, which is not registered,", (_digest(tensors), register)


def _unregistered(model: nn.Module) -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
    """Yield the tensors that modules hold in plain attributes, by the attribute's name."""
    for owner, module in model.named_modules():
        for name, value in attributes_of(module).items():
            tensors: list[tuple[str, Tensor]] = []
            for one in held(value):
                if isinstance(one, Tensor):
                    tensors.append(("", one))
                elif isinstance(one, nn.Module) and one is not model:
                    tensors += named_tensors(one).items()
            if tensors:
                yield f"{name!r} of {owner or type(module).__name__!r}", tensors


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    plain = ((n, t) for n, t in tensors if not t.is_meta and not t.is_sparse)
    return f"{chain_hash(0, plain, mode=''):x}"


Place: TypeAlias = tuple[nn.Module | None, str]
"""The module that holds something, however deep, and the attribute's name."""
Kept: TypeAlias = dict[Place, tuple[tuple[float, ...], list[Tensor]]]


@dataclass(frozen=True)
class Remembered:
    """Hold the numbers, and the tensors with their versions, that a module and its parts keep."""

    numbers: dict[Place, tuple[float, ...]]
    tensors: list[tuple[Place, Tensor, int]]

    def is_as(self, other: Remembered) -> bool:
        """Return whether both hold the same, with nothing written into tensors in between."""
        # By identity: `==` would compare the tensors' elements.
        mine, its = ([(id(t), version) for _, t, version in one.tensors] for one in (self, other))
        return mine == its and self.numbers == other.numbers

    def copied(self) -> Kept:
        """Copy numbers and tensors as they are now; tensors without plain memory are left out.

        Parameters are, too: whoever keeps one in an attribute does not own it.
        """
        copies: Kept = {place: (numbers, []) for place, numbers in self.numbers.items()}
        for place, tensor, _ in self.tensors:
            if _is_plain(tensor) and not isinstance(tensor, nn.Parameter):
                copies.setdefault(place, ((), []))[1].append(tensor.detach().clone())
        return copies

    def put_numbers_back(self) -> None:
        """Give plain attributes of modules the numbers that they had."""
        for (module, name), (number, *_) in self.numbers.items():
            if module is not None and isinstance(vars(module).get(name), (int, float)):
                setattr(module, name, number)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own for each element."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return False
    # A number that stands for many cannot be written, and a copy would spell it out.
    return tensor.numel() < 2 or any(tensor.stride())


def remembered(holder: Any, *, with_buffers: bool = False) -> Remembered:
    """Return what a module and its parts keep in attributes, or what a function holds."""
    values: list[tuple[Place, Any]] = [((None, ""), holder)]
    if isinstance(holder, nn.Module):
        values = [
            ((part, name), value)
            for part in holder.modules()
            for name, value in {
                **attributes_of(part),
                **(part._buffers if with_buffers else {}),
            }.items()
        ]
    numbers: dict[Place, tuple[float, ...]] = {}
    tensors: list[tuple[Place, Tensor, int]] = []
    for place, value in values:
        several = [*held(value)]
        # A NaN equals nothing, and is left out.
        if plain_numbers := tuple(x for x in several if isinstance(x, (int, float)) and x == x):
            numbers[place] = plain_numbers
        # Reading the version of an inference tensor is an error.
        tensors += [
            (place, one, -1 if one.is_inference() else one._version)
            for one in several
            if isinstance(one, Tensor)
        ]
    return Remembered(numbers, tensors)
