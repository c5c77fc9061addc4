"""Say who waited for whom, and for what, where a wait between ranks fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_MOST_NAMED = 8


class PeerError(RuntimeError):
    """Say who waited for whom, and why it failed: a time limit, or a rank that is gone."""


@contextmanager
def waiting_for(
    what: str, group: dist.ProcessGroup | None, *, source: int | None = None
) -> Iterator[None]:
    """Turn the failure of a wait inside it into one that names the ranks waited for.

    Args:
        what: is waited for.
        group: whose ranks are waited for, but for this one.
        source: global rank of the one of them that is, where it is one.
    Raises:
        PeerError: the wait failed; torch's own message, which names nobody, is its end.
    """
    try:
        yield
    except RuntimeError as error:
        own = dist.get_rank()
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        others = [rank for rank in ranks if rank != own]
        if source in others:
            others = [source]
        raise PeerError(f"rank {own} waited for {_name(others)} ({what}): {error}") from error


def _name(ranks: list[int]) -> str:
    if len(ranks) > _MOST_NAMED:
        return f"the {len(ranks)} ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
