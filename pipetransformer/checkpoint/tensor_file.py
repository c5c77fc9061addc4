"""Read a safetensors file into tensors that are there already, a piece at a time.

A model that resumes has weights. A file of the largest layer, read whole, lies beside them twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipetransformer.errors import CorruptCheckpointError

_PIECE_BYTES = 8 << 20
_HEADER_BYTES = 8
"""Bytes at the start of a file that hold the length of its JSON header."""


def describe(path: Path) -> dict[str, Tensor]:
    """Return meta tensors of a file's names, shapes and dtypes.

    Raises:
        OSError, CorruptCheckpointError: it cannot be read, or its header was changed.
    """
    try:
        with safe_open(path, framework="pt") as file:  # Maps the file, and reads no values.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CorruptCheckpointError(f"{path} is not what was written: {error}") from error
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}


def fill(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a file's values into tensors that are as `describe` says; return its SHA-256.

    The caller compares that, so what was checked is what was used. Values that are there already
    are not written again: pages that a model shares with other processes stay shared.

    Args:
        tensors: by name, on any devices.
    Raises:
        OSError, CorruptCheckpointError: it cannot be read, or its header was changed.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file, torch.no_grad():

        def read(num_bytes: int) -> bytearray:
            data = bytearray(file.read(num_bytes))
            digest.update(data)
            if len(data) < num_bytes:
                raise CorruptCheckpointError(f"{path} ends before its tensors do")
            return data

        length = int.from_bytes(read(_HEADER_BYTES), "little")
        for name in _names_in_order(path, read(length)):
            for part in _parts(tensors[name].detach()):
                _put(part, read(part.nbytes))
    return digest.hexdigest()


def _names_in_order(path: Path, header: bytearray) -> list[str]:
    """Return the names of tensors in the order of their values."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        return sorted(entries, key=lambda name: entries[name]["data_offsets"])
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path} is not what was written: {error!r}") from error


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of some rows each, in the order of values in a file."""
    rows = tensor if tensor.ndim else tensor.unsqueeze(0)
    if rows.numel():
        yield from rows.split(max(1, _PIECE_BYTES * len(rows) // rows.nbytes))


def _put(part: Tensor, data: bytearray) -> None:
    values = torch.frombuffer(data, dtype=torch.uint8)
    on_host = part.device.type == "cpu"
    if on_host and torch.equal(part.contiguous().view(-1).view(torch.uint8), values):
        return
    part.copy_(values.view(part.dtype).view(part.shape))
