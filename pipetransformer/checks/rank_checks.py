"""Refuse ranks that were given different things: they would train on, and drift apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
