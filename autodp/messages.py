"""Send plain values between ranks as JSON bytes.

Nothing that arrives is ever executed, as pickle would be.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autodp.waiting import waiting_for


def broadcast_json(value: Any, *, group: dist.ProcessGroup | None, source: int = 0) -> Any:
    """Give every rank of the group the source's JSON value; the others' argument is ignored.

    Args:
        value: anything JSON holds; floats survive exactly, tuples arrive as lists.
        group: a group with a CPU backend; None where the world is one process.
        source: global rank that publishes.
    Raises:
        PeerError: a rank is gone, or silent for longer than the group's time limit.
    """
    if group is None:
        return json.loads(json.dumps(value))
    payload = _encode(value) if dist.get_rank() == source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([payload.numel()])
    with waiting_for("a decision", group, source=source):
        dist.broadcast(length, source, group=group)
        if dist.get_rank() != source:
            payload = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(payload, source, group=group)
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
        padded = nn.functional.pad(payload, (0, int(max(lengths)) - payload.numel()))
        gathered = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(gathered, padded, group=group)
    return [_decode(data[:length]) for data, length in zip(gathered, lengths, strict=True)]


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(payload: Tensor) -> Any:
    return json.loads(payload.numpy().tobytes())
