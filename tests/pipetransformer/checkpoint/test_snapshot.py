"""Prove that a copy of shards holds every bit, makes a valid file, and keeps its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from pipetransformer.checkpoint.saver import Snapshot, num_bytes_of
from tests.helpers.stand_in_gpu import MarkedStream

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy a shard, and read it as anybody would read its file."""
    return read(Snapshot().take({"s": tensors})["s"])


def read(copy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read a copy as anybody would read its file."""
    return safetensors.torch.load(safetensors.torch.save(dict(copy)))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare names, dtypes, shapes and every bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        cpu = tensor.detach().cpu().contiguous()
        assert found[name].dtype == cpu.dtype and found[name].shape == cpu.shape, name
        mine, other = (t.reshape(-1).view(torch.uint8) for t in (found[name], cpu))
        assert torch.equal(mine, other), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_tensor_is_copied_in_full(dtype: torch.dtype) -> None:
    base = torch.arange(24).reshape(4, 6).to(dtype)
    tensors = {
        "plain": base.clone(),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": base[:1].expand(5, 6),
        "shared": base[1:],
        "scalar": base[2, 3],
        "empty": base[:0],
        "parameter": base.clone().requires_grad_(dtype.is_floating_point),
    }
    assert_same(copied(tensors), tensors)


def test_special_values_keep_their_bits() -> None:
    values = {"w": torch.tensor([math.nan, -0.0, math.inf, 5e-324], dtype=torch.float64)}
    assert_same(copied(values), values)


def test_dtypes_of_any_size_lie_side_by_side_in_shards_of_any_size() -> None:
    shards = {
        f"shard {length}": {
            f"{dtype} {length}": torch.arange(length).to(dtype) for dtype in reversed(DTYPES)
        }
        for length in (3, 1, 0, 7)
    }
    taken = Snapshot().take(shards | {"nothing": {}})
    assert list(taken) == [*shards, "nothing"]
    for name, tensors in shards.items():
        assert_same(read(taken[name]), tensors)
    assert read(taken["nothing"]) == {}


def test_a_copy_does_not_follow_its_tensors() -> None:
    tensor = torch.arange(5.0)
    copy = Snapshot().take({"s": {"w": tensor}})["s"]
    tensor.zero_()
    assert copy["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_memory_is_kept_from_save_to_save_and_may_be_reserved_ahead() -> None:
    snapshot = Snapshot()
    large = {"s": {"w": torch.ones(1000)}, "t": {"n": torch.ones(3)}}
    snapshot.reserve(num_bytes_of(large))
    first = snapshot.take(large)
    second = snapshot.take({"other": {"w": torch.zeros(500)}})
    third = snapshot.take(large)
    starts = {one.data_ptr() for one in (first["s"]["w"], second["other"]["w"], third["s"]["w"])}
    assert len(starts) == 1
    assert first["t"]["n"].data_ptr() == third["t"]["n"].data_ptr()
    assert_same(read(third["t"]), large["t"])


def test_memory_grows_with_what_a_rank_owns() -> None:
    snapshot = Snapshot()
    snapshot.take({"s": {"w": torch.ones(10)}})
    grown = {"s": {"w": torch.arange(10_000.0)}}
    assert_same(read(snapshot.take(grown)["s"]), grown["s"])


@pytest.mark.parametrize("kind", ["pinned", "on_gpu"])
def test_a_thread_waits_for_copies_on_the_gpu_that_makes_them(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    stream, empty = MarkedStream(monkeypatch, device=1), torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **kind: empty(*size, **kind)
    )
    snapshot = Snapshot(**{kind: True})
    snapshot.finish()  # Nothing was taken.
    snapshot.take({"s": {"w": torch.ones(3)}})
    stream.current = 0  # With which a thread begins.
    snapshot.finish()
    assert stream.calls == ["synchronize on 1"]


def refuse_to_pin(patch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def unpinned(*size: int, pin_memory: bool = False, **kind: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **kind)

    patch.setattr(torch, "empty", unpinned)


def test_other_memory_takes_the_place_of_pinned_memory_and_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # It had raised in the saver's thread, and once more in the training loop, which ended the run.
    MarkedStream(monkeypatch, device=0)
    refuse_to_pin(monkeypatch)
    snapshot = Snapshot(pinned=True)
    for num in (3, 1000):
        tensors = {"w": torch.arange(float(num))}
        copy = snapshot.take({"s": tensors})["s"]
        snapshot.finish()
        assert_same(read(copy), tensors)
    (told,) = caplog.messages
    assert told.startswith("no 64 bytes of pinned memory for checkpoints: CUDA error")


@pytest.mark.cuda
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_gpu_s_tensors_are_copied_before_the_work_queued_after_the_save(
    monkeypatch: pytest.MonkeyPatch, is_pinned: bool
) -> None:
    if not is_pinned:
        refuse_to_pin(monkeypatch)
    weights, count = torch.randn(2000, 3000, device="cuda"), torch.tensor(3, device="cuda")
    expected = {"w": weights.t().clone(), "n": count.clone()}
    snapshot = Snapshot(pinned=True)
    copy = snapshot.take({"s": {"w": weights.t(), "n": count}})["s"]
    weights.zero_()
    count.zero_()
    snapshot.finish()
    assert_same(read(copy), expected)
