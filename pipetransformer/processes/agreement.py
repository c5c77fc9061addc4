"""Raise one rank's error on every rank, so that none is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from autodp import broadcast_json, gather_json
from pipetransformer.errors import CorruptCheckpointError

T = TypeVar("T")

_KINDS = (CorruptCheckpointError, ValueError, OSError)


def agree(action: Callable[[], T], *, group: dist.ProcessGroup | None) -> T:
    """Return the action's value if it succeeds on every rank. Collective.

    Raises:
        CorruptCheckpointError, ValueError, OSError: on every rank, the first failed rank's; the
            message names the rank.
        Exception: another one is raised unchanged on its rank, and as a RuntimeError elsewhere.
    """
    value, failure, caught = None, None, None
    try:
        value = action()
    except Exception as error:
        caught = error
        # A number, as JSON carries no classes.
        number = next((i for i, kind in enumerate(_KINDS) if isinstance(error, kind)), None)
        failure = [number, str(error) if number is not None else repr(error)]
    for rank, told in enumerate(gather_json(failure, group=group)):
        if told is not None:
            number, text = told
            if number is None and caught is not None:
                raise caught
            kind = RuntimeError if number is None else _KINDS[number]
            raise kind(text if group is None else f"rank {rank}: {text}") from caught
    return value  # type: ignore[return-value]


def on_rank_0(action: Callable[[], T], *, group: dist.ProcessGroup | None) -> T | None:
    """Return the value of rank 0's action there, None elsewhere; errors as `agree`. Collective."""
    is_rank_0 = group is None or dist.get_rank() == 0
    return agree(lambda: action() if is_rank_0 else None, group=group)


def told_by_rank_0(action: Callable[[], T], *, group: dist.ProcessGroup | None) -> T:
    """Return the JSON value of rank 0's action on every rank; errors as `agree`. Collective."""
    value: T = broadcast_json(on_rank_0(action, group=group), group=group)
    return value
