"""Prove that pieces and messages hold every tensor, once, in bounded parts."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from autodp.moves import ROUND_BYTES
from autodp.shard_pieces import Parcel, Piece, PieceTensor, cut


def spec(name: str, num_values: int) -> PieceTensor:
    return PieceTensor(name, "float32", [num_values], True)


def test_pieces_hold_all_tensors_in_order_and_no_more_than_the_limit() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        specs = [spec(f"t{i}", rng.choice([0, 1, 3, 8, 30])) for i in range(rng.randrange(20))]
        pieces = list(cut("shard", specs, most_bytes=40))
        assert [tensor for piece in pieces for tensor in piece.tensors] == specs
        assert {piece.shard for piece in pieces} <= {"shard"}
        for piece in pieces:
            assert piece.tensors
            filled = [t for t in piece.tensors if t.num_bytes]
            assert piece.num_bytes <= 40 or len(filled) == 1


def test_a_tensor_beyond_the_limit_is_a_piece_by_itself() -> None:
    specs = [spec("weight", 5), spec("bias", 1), spec("table", 20), spec("last", 1)]
    assert [piece.tensors for piece in cut("shard", specs, most_bytes=40)] == [
        tuple(specs[:2]),
        (specs[2],),
        (specs[3],),
    ]
    assert Piece("shard", tuple(specs)).num_bytes == 4 * 27


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_description_survives_json_and_gives_memory_of_its_size(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype)
    described = PieceTensor.of("w", tensor)
    again = PieceTensor(**json.loads(json.dumps(asdict(described))))
    assert again == described
    empty = again.empty(torch.device("cpu"))
    assert (empty.shape, empty.dtype, empty.is_cpu) == (tensor.shape, dtype, True)
    assert again.num_bytes == tensor.nbytes


def test_small_tensors_share_a_message_and_large_ones_travel_from_their_own_memory() -> None:
    large, small = torch.randn(10_000), [torch.randn(i) for i in range(5)]
    messages = Parcel([small[1], large, *small[2:], small[0]]).messages
    assert [len(message) for message in messages] == [40_000, 4 * (1 + 2 + 3 + 4)]
    assert messages[0].data_ptr() == large.data_ptr()


def test_a_tensor_larger_than_a_round_travels_in_slices() -> None:
    # Memory that is never touched costs nothing.
    messages = Parcel([torch.empty(2 * ROUND_BYTES + 5, dtype=torch.uint8)]).messages
    assert [len(message) for message in messages] == [ROUND_BYTES, ROUND_BYTES, 5]


def mixed_tensors() -> list[Tensor]:
    """Make large and small tensors of any dtype and stride."""
    noise = torch.randn(120, 60)
    return [
        noise, noise.t(), noise.double(), noise > 0, torch.tensor(7.0), torch.tensor(True),
        torch.empty(3, 0), noise[::2, 1::3], noise[:1].expand(4, 60), noise[0].bfloat16(),
        torch.tensor(2**40), torch.tensor([float("nan"), -0.0, 1e-45]),
        torch.nn.Parameter(noise[0]), torch.complex(noise, -noise),
    ]  # fmt: skip


def test_what_is_unpacked_is_what_was_packed_bit_for_bit() -> None:
    sent = mixed_tensors()
    received = [PieceTensor.of("t", t).empty(torch.device("cpu")) for t in sent]
    parcel = Parcel(received)
    outgoing = Parcel(sent).messages
    assert [len(message) for message in parcel.messages] == [len(message) for message in outgoing]
    for target, source in zip(parcel.messages, outgoing, strict=True):
        target.copy_(source)
    parcel.unpack()
    for ours, theirs in zip(received, sent, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert raw(ours) == raw(theirs)


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
