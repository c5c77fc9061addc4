"""Prove that files read back as they were written or not at all, and follow nobody's links."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch

from pipetransformer.durable_files import (
    LineFile,
    read_sealed_json,
    read_tensors,
    replace_file,
    replace_tensors,
    sealed_json,
    write_tensors,
)


def test_a_flipped_bit_in_sealed_json_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path, content = tmp_path / "kept.json", {"step": 3, "numbers": [0.1, float("inf"), None]}
    replace_file(path, sealed_json(content))
    assert read_sealed_json(path) == content
    whole = path.read_bytes()
    for offset in range(len(whole)):
        flipped = whole[offset] ^ (1 << offset % 8)
        path.write_bytes(whole[:offset] + bytes([flipped]) + whole[offset + 1 :])
        with pytest.raises(ValueError, match="kept.json (has SHA-256|is not what was written)"):
            read_sealed_json(path)


@pytest.mark.parametrize("size", [0, 4, 60])
def test_tensors_that_are_cut_off_are_an_error_that_names_the_file(
    tmp_path: Path, size: int
) -> None:
    path = tmp_path / "kept.safetensors"
    replace_tensors(path, {"weight": torch.ones(3)})
    os.truncate(path, size)
    with pytest.raises(ValueError, match="kept.safetensors is not what was written"):
        read_tensors(path)


def test_tensors_without_a_seal_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    write_tensors(path, {"weight": torch.ones(3)})
    with pytest.raises(ValueError, match="foreign.safetensors is not what was written: KeyError"):
        read_tensors(path)


def test_a_tensor_under_another_s_name_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "kept.safetensors"
    replace_tensors(path, {"a": torch.zeros(2), "b": torch.ones(2)})
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"a"', b'"c"').replace(b'"b"', b'"a"').replace(b'"c"', b'"b"'))
    with pytest.raises(ValueError, match="kept.safetensors has SHA-256 .*; expected"):
        read_tensors(path)


def test_a_link_in_a_temporary_file_s_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    for name in ("kept.json", "kept.safetensors"):
        (tmp_path / f"{name}.tmp").symlink_to(victim)
    replace_file(tmp_path / "kept.json", b"ours")
    replace_tensors(tmp_path / "kept.safetensors", {"weight": torch.ones(3)})
    assert victim.read_text() == "theirs"
    assert (tmp_path / "kept.json").read_bytes() == b"ours"
    assert sorted(os.listdir(tmp_path)) == ["kept.json", "kept.safetensors", "victim"]
    assert not any(path.is_symlink() for path in tmp_path.iterdir())


@pytest.mark.parametrize("is_there", [True, False])
def test_lines_are_appended_through_no_link(tmp_path: Path, is_there: bool) -> None:
    victim, path = tmp_path / "victim", tmp_path / "lines"
    if is_there:
        victim.write_text("theirs, torn")
    path.symlink_to(victim)
    with pytest.raises(ValueError, match=r"lines is a symbolic link to .*victim, .*; remove the"):
        LineFile(path)
    assert victim.exists() is is_there
    assert not is_there or victim.read_text() == "theirs, torn"


def test_files_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "kept.json", b"")
        replace_tensors(tmp_path / "kept.safetensors", {"weight": torch.ones(3)})
        LineFile(tmp_path / "lines").close()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}


def test_an_error_of_a_full_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lines = LineFile(tmp_path / "lines")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: '.*kept.json'"):
        replace_file(tmp_path / "kept.json", b"ours")
    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: '.*lines'"):
        lines.append(b"one\n", durable=True)
    lines.close()
    assert os.listdir(tmp_path) == ["lines"] and (tmp_path / "lines").read_bytes() == b""
