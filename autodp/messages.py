"""Send plain values between ranks, and name the ranks waited for when a wait fails.

Values travel as JSON, not pickle: nothing that arrives is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_MOST_NAMED = 8
_MESSAGE_BYTES = 64 << 20
"""Largest message of a tensor; gloo keeps a copy of a message under way."""


class PeerError(RuntimeError):
    """Say who waited for whom, and why it failed: a time limit, or a rank that is gone."""


@contextmanager
def waiting_for(
    what: str, group: dist.ProcessGroup | None, *, source: int | None = None
) -> Iterator[None]:
    """Turn a failed wait inside it into an error that names the ranks waited for.

    Args:
        source: global rank, if the wait is for one rank of the group.
    Raises:
        PeerError: the wait failed; it ends with torch's own message, which names no rank.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"{wait_text(what, group, source=source)}: {error}") from error


def wait_text(what: str, group: dist.ProcessGroup | None, *, source: int | None = None) -> str:
    """Say for whom this rank waits; see `waiting_for`."""
    here = dist.get_rank()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    others = [rank for rank in ranks if rank != here]
    if source in others:
        others = [source]
    return f"rank {here} waited for {_name(others)} ({what})"


def _name(ranks: list[int]) -> str:
    if len(ranks) > _MOST_NAMED:
        return f"the {len(ranks)} ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def broadcast_json(value: Any, *, group: dist.ProcessGroup | None) -> Any:
    """Give every rank of the group rank 0's JSON value; the others' argument is ignored.

    Args:
        value: anything JSON holds; floats survive exactly, tuples arrive as lists.
        group: with a CPU backend; None for a world of one process.
    Raises:
        PeerError: a rank is gone, or silent for longer than the group's time limit.
    """
    if group is None:
        # Through JSON here, too, so that one process gets what several would get.
        return json.loads(json.dumps(value))
    payload = _encode(value if dist.get_rank() == 0 else None)
    length = torch.tensor([payload.numel()])
    with waiting_for("a decision", group, source=0):
        dist.broadcast(length, 0, group=group)
        if dist.get_rank() != 0:
            payload = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(payload, 0, group=group)
    return _decode(payload)


def gather_json(value: Any, *, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's JSON value, in rank order, on every rank of the group.

    Raises:
        PeerError: a rank is gone, or silent for longer than the group's time limit.
    """
    if group is None:
        return [json.loads(json.dumps(value))]
    payload = _encode(value)
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    with waiting_for("answers", group):
        dist.all_gather(lengths, torch.tensor([payload.numel()]), group=group)
        # all_gather needs equal sizes.
        padded = nn.functional.pad(payload, (0, int(max(lengths)) - payload.numel()))
        gathered = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(gathered, padded, group=group)
    return [_decode(data[:length]) for data, length in zip(gathered, lengths, strict=True)]


def broadcast_tensor(
    tensor: Tensor, source: int, *, group: dist.ProcessGroup | None, what: str
) -> None:
    """Overwrite every rank's tensor with that of `source`, a global rank, in bounded messages.

    Args:
        tensor: contiguous, on the CPU, of one shape and dtype on all ranks.
        group: with a CPU backend; None for a world of one process.
        what: named in the error.
    Raises:
        PeerError: a rank is gone, or silent for longer than the group's time limit.
    """
    if group is None or tensor.numel() == 0:
        return
    with waiting_for(what, group, source=source):
        for message in tensor.view(-1).view(torch.uint8).split(_MESSAGE_BYTES):
            dist.broadcast(message, source, group=group)


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(payload: Tensor) -> Any:
    return json.loads(payload.numpy().tobytes())
