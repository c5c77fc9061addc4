"""End in the same way on all ranks: what one finds wrong is raised on every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from autodp import gather_json
from pipetransformer.errors import CorruptCheckpointError

T = TypeVar("T")


def agree(action: Callable[[], T], *, group: dist.ProcessGroup | None) -> T:
    """Return the action's value if it succeeds on every rank. Collective.

    Raises:
        CorruptCheckpointError, ValueError: on every rank, that of the first rank on which the
            action raised it; the message names the rank.
    """
    value, failure = None, None
    try:
        value = action()
    except (CorruptCheckpointError, ValueError) as error:
        failure = [isinstance(error, CorruptCheckpointError), str(error)]
    for rank, found in enumerate(gather_json(failure, group=group)):
        if found is not None:
            is_corrupt, text = found
            kind = CorruptCheckpointError if is_corrupt else ValueError
            raise kind(text if group is None else f"rank {rank}: {text}")
    return value  # type: ignore[return-value]
