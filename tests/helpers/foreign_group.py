"""Make the default group one that a script made for GPUs alone, as transformers does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

_MOVES = {
    "all_gather": 2, "all_reduce": 2, "barrier": 0, "broadcast": 2, "irecv": 2, "isend": 2,
    "recv": 2, "send": 2,
}  # fmt: skip
"""What moves numbers, and which of its arguments says in which group."""


@contextmanager
def without_cpus() -> Iterator[None]:
    """Let the default group, over gloo, say that it has no backend for CPUs, and refuse to work.

    A group made beside it can have gloo for what it calls GPUs.
    """
    told = dist.get_backend_config

    def config(group: dist.ProcessGroup | None = None) -> str:
        return "cuda:gloo" if group in (None, dist.group.WORLD) else told(group)

    with ExitStack() as undone:
        undone.enter_context(patch.object(dist, "get_backend_config", config))
        undone.enter_context(patch.object(dist, "new_group", _with_backend(dist.new_group)))
        for name, place in _MOVES.items():
            move = _elsewhere(getattr(dist, name), place)
            undone.enter_context(patch.object(dist, name, move))
        yield


def _with_backend(new_group: Callable[..., Any]) -> Callable[..., Any]:
    def make(*arguments: Any, **settings: Any) -> Any:
        assert settings.get("backend"), "a group would have the default group's backend"
        return new_group(*arguments, **settings)

    return make


def _elsewhere(move: Callable[..., Any], place: int) -> Callable[..., Any]:
    def refuse(*arguments: Any, **settings: Any) -> Any:
        group = settings.get("group", arguments[place] if len(arguments) > place else None)
        assert group not in (None, dist.group.WORLD), "the default group has no backend for CPUs"
        return move(*arguments, **settings)

    return refuse
