"""Prove that tensors are filled from a file in place, bit by bit, whatever their layout."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipetransformer.checkpoint import tensor_file
from pipetransformer.checkpoint.tensor_file import describe, fill
from pipetransformer.errors import CorruptCheckpointError


def saved_at(path: Path) -> dict[str, Tensor]:
    """Write a file of tensors of many kinds, and return them."""
    torch.manual_seed(0)
    tensors = {
        "matrix": torch.randn(300, 7),
        "bfloat16": torch.randn(65, 3, dtype=torch.bfloat16),
        "float8": torch.randn(40).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(-0.0),
        "count": torch.arange(9),
        "mask": torch.tensor([True, False, True]),
        "image": torch.randn(2, 3, 5, 5),
        "empty": torch.empty(0, 3),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


def bits(tensor: Tensor) -> list[int]:
    values: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return values


def test_a_file_fills_tensors_of_any_dtype_and_layout_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", 64)
    path = tmp_path / "file.safetensors"
    saved = saved_at(path)
    empty = {name: torch.zeros_like(one, device="cpu") for name, one in describe(path).items()}
    empty["image"] = empty["image"].to(memory_format=torch.channels_last)
    empty["matrix"] = torch.zeros(7, 300).t()
    assert fill(path, empty) == hashlib.sha256(path.read_bytes()).hexdigest()
    for name, expected in saved.items():
        assert empty[name].dtype == expected.dtype
        assert bits(empty[name]) == bits(expected), name


def test_values_that_are_there_already_are_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    held = {name: one.clone() for name, one in saved_at(path).items()}
    held["count"][3] = 7
    versions = {name: one._version for name, one in held.items()}
    fill(path, held)
    written = {name for name, one in held.items() if one._version != versions[name]}
    assert written == {"count"} and held["count"][3] == 3


@pytest.mark.parametrize(("place", "what"), [(9, "is not what"), (-1, "ends before")])
def test_a_file_whose_header_or_end_is_lost_is_refused(
    tmp_path: Path, place: int, what: str
) -> None:
    path = tmp_path / "file.safetensors"
    held = saved_at(path)
    data = path.read_bytes()
    path.write_bytes(data[:place] + (b"" if place == -1 else b"\0" + data[place + 1 :]))
    with pytest.raises(CorruptCheckpointError, match=what):
        fill(path, held)
    with pytest.raises(CorruptCheckpointError, match="is not what"):
        describe(path)
