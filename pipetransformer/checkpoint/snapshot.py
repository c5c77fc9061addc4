"""Copy this rank's shards into host memory, laid out as their files will be.

    memory |  blocks.0/weights         |  blocks.0/optimizer        |  ...  |  unused  |
            float64, float32, ..., bytes

The copy is all that training waits for. Fresh memory is several times slower to fill than memory
that was used before, so it is reserved ahead and kept from save to save; it grows to the most that
this rank ever owned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Shards = Mapping[str, Mapping[str, Tensor]]

# The names of the safetensors format.
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class HostShard:
    """Hold a shard as the two parts of its safetensors file.

    Args:
        name: of the shard, as "blocks.0/weights".
        header: says which tensor is where in the data.
        data: the tensors, one behind the other.
    """

    name: str
    header: bytes
    data: memoryview


class Snapshot:
    """Keep the host memory that shards are copied into.

    Args:
        pinned: whether the shards are on a GPU, which copies faster into locked memory.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def reserve(self, num_bytes: int) -> None:
        """Make sure that so much memory is there; what was taken before is lost if it was not."""
        if num_bytes > len(self._memory):
            self._memory = torch.empty(0, dtype=torch.uint8)  # NeverFreeze two of them at once.
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._memory.zero_()  # A page becomes memory when it is first written.

    def take(self, shards: Shards) -> tuple[HostShard, ...]:
        """Copy the shards; what an earlier call returned is overwritten.

        Tensors may be on any device, of any strides, and share memory; each is copied in full.
        Copies from a GPU are queued behind the work of its current stream: call `finish` before
        the data is read, and not before training goes on.

        Raises:
            ValueError: a meta tensor, whose values this rank does not hold, or a dtype that the
                format lacks.
        """
        ordered = {name: _in_file_order(name, tensors) for name, tensors in shards.items()}
        self.reserve(num_bytes_of(shards))
        taken, start = [], 0
        for name, tensors in ordered.items():
            taken.append(self._copy(name, tensors, start))
            start += _aligned_bytes(tensors)
        if self._pinned:
            self._copied = torch.cuda.current_stream().record_event()
        return tuple(taken)

    def finish(self) -> None:
        """Wait until a GPU's copies have arrived."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, name: str, tensors: Mapping[str, Tensor], start: int) -> HostShard:
        entries, end = {}, start
        for key, tensor in tensors.items():
            begin, end = end, end + tensor.nbytes
            if tensor.numel():
                target = self._memory[begin:end].view(tensor.dtype).view(tensor.shape)
                target.copy_(tensor.detach(), non_blocking=True)
            entries[key] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin - start, end - start],
            }
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        data = memoryview(self._memory.numpy().data)[start:end]
        return HostShard(name, len(header).to_bytes(8, "little") + header, data)


def num_bytes_of(shards: Shards) -> int:
    """Return the memory that a snapshot of the shards takes."""
    return sum(_aligned_bytes(tensors) for tensors in shards.values())


def _aligned_bytes(tensors: Mapping[str, Tensor]) -> int:
    size = sum(tensor.nbytes for tensor in tensors.values())
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _in_file_order(shard: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sort tensors by the size of their elements, so that each is aligned without gaps."""
    for key, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(
                f"{shard}: {key} is a meta tensor, so this rank does not hold its values; "
                "let the owner of the sublayer write its shards"
            )
        if tensor.dtype not in _DTYPE_NAMES:
            raise ValueError(
                f"{shard}: {key} is {tensor.dtype}, which a safetensors file cannot hold; "
                f"convert it to one of {', '.join(map(str, _DTYPE_NAMES))}"
            )
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
