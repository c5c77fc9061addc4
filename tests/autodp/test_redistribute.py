"""Prove that what a rank needs comes bit for bit, in bounded pieces, and never twice in full."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, final
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autodp.messages import PeerError
from autodp.moves import ROUND_BYTES
from autodp.redistribute import Parcel, Piece, PieceTensor, Shard, ShardStore, cut, move_shards
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.pool import Pool

Holders = dict[str, frozenset[int]]


CPU = torch.device("cpu")


@final
class DictStore(ShardStore):
    """Keep shards in a dict, and note what it is asked for."""

    def __init__(self, shards: dict[str, Shard]) -> None:
        self.shards = shards
        self.reads: list[str] = []

    def read(self, shard: str) -> Shard:
        self.reads.append(shard)
        return self.shards[shard]

    def put(self, shard: str, tensors: Shard) -> None:
        own = self.shards.setdefault(shard, {})
        assert not own.keys() & tensors.keys()
        own.update(tensors)

    def drop(self, shard: str, names: Sequence[str]) -> None:
        for name in names:
            del self.shards[shard][name]
        if not self.shards[shard]:
            del self.shards[shard]


def move_all(
    before: Holders, after: Holders, store: ShardStore, *, group: Any = None, slots: int = 2
) -> int:
    """Redistribute over the world of a pool."""
    return move_shards(
        before, after, store, group=group or dist.group.WORLD, device=CPU, slots_per_node=slots
    )


def random_placements(seed: int, num_ranks: int) -> tuple[Holders, Holders]:
    """Give up to 12 shards random holders; each is held somewhere and may be needed nowhere."""
    rng = random.Random(seed)
    names = [f"layers.{i}/weights" for i in range(rng.randrange(1, 13))]
    ranks = range(num_ranks)
    before = {name: frozenset(rng.sample(ranks, rng.randint(1, num_ranks))) for name in names}
    after = {name: frozenset(rng.sample(ranks, rng.randint(0, num_ranks))) for name in names}
    return before, after


def awkward_shard(name: str) -> Shard:
    """Make tensors of every kind that weights, buffers and optimizer state hold; none at times."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    kind = int(torch.randint(0, 4, (), generator=generator))
    if kind == 0:
        return {}
    noise = torch.randn(6, 10, generator=generator)
    shard = {
        "float32": noise, "bfloat16": noise.bfloat16(), "float64": noise.double(),
        "float16": noise.half(), "bool": noise > 0, "int64": (noise * 1e12).long(),
        "uint8": (noise * 40).to(torch.uint8), "complex64": torch.complex(noise, -noise),
        "step": torch.tensor(float(kind)), "count": torch.tensor(2 ** 40 + kind),
        "flag": torch.tensor(True), "empty": torch.empty(0), "no columns": torch.empty(3, 0),
        "transposed": noise.t(), "strided": noise[::2, 1::3], "expanded": noise[:1].expand(4, 10),
        "channels last": noise.view(1, 5, 3, 4).to(memory_format=torch.channels_last),
        "special": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "parameter": torch.nn.Parameter(noise[0]),
        "large": torch.randn(100, 100, generator=generator),
    }  # fmt: skip
    return {key: tensor for i, (key, tensor) in enumerate(shard.items()) if (i + kind) % 4}


def differences(ours: Shard, theirs: Shard) -> list[str]:
    """Name the tensors that differ in dtype, shape, device or any bit."""
    if list(ours) != list(theirs):
        return [f"names {list(ours)} instead of {list(theirs)}"]
    return [
        key
        for key, tensor in ours.items()
        if tensor.dtype != theirs[key].dtype
        or tensor.shape != theirs[key].shape
        or not tensor.is_cpu
        or raw(tensor) != raw(theirs[key])
    ]


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def follow_random_plans(seeds: range, slots: int) -> list[str]:
    """Redistribute one random placement after the other; return what this rank holds wrong."""
    rank, wrong = dist.get_rank(), list[str]()
    for seed in seeds:
        before, after = random_placements(seed, dist.get_world_size())
        store = DictStore({n: awkward_shard(n) for n, ranks in before.items() if rank in ranks})
        num_bytes = move_all(before, after, store, slots=slots)
        expected = {n: awkward_shard(n) for n, ranks in after.items() if rank in ranks}
        filled = {name: shard for name, shard in expected.items() if shard}
        if {name for name, shard in store.shards.items() if shard} != filled.keys():
            wrong.append(f"plan {seed}: holds {list(store.shards)}")
        wrong += [
            f"plan {seed}, {name}: {what}"
            for name, shard in filled.items()
            for what in differences(store.shards.get(name, {}), shard)
        ]
        if num_bytes != sum(
            t.nbytes
            for name, shard in filled.items()
            if rank not in before[name]
            for t in shard.values()
        ):
            wrong.append(f"plan {seed}: reports {num_bytes} bytes")
    return wrong


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_random_plans_deliver_every_tensor_bit_for_bit_and_drop_the_others(
    four_ranks: Pool, slots: int
) -> None:
    for wrong in four_ranks.run(follow_random_plans, range(12 * slots, 12 * slots + 12), slots):
        assert wrong == []


def exchange_large_shards() -> list[str]:
    """Send more than a socket buffers, from every rank to every other at once."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    pairs = {f"{s} to {d}": (s, d) for s in ranks for d in ranks if s != d}

    def shard(name: str) -> Shard:
        return {"w": torch.full((1 << 19,), float(sum(name.encode())))}

    store = DictStore({name: shard(name) for name, (s, _) in pairs.items() if s == rank})
    before = {name: frozenset([s]) for name, (s, _) in pairs.items()}
    move_all(before, {name: frozenset([d]) for name, (_, d) in pairs.items()}, store)
    assert store.shards.keys() == {name for name, (_, d) in pairs.items() if d == rank}
    return [name for name in store.shards if differences(store.shards[name], shard(name))]


def test_all_ranks_send_large_shards_to_all_at_once(four_ranks: Pool) -> None:
    assert four_ranks.run(exchange_large_shards) == [[]] * 4


def swap_everything(num_shards: int, values: int) -> tuple[int, int, int]:
    """Give all of this rank's shards away and get all of the other's."""
    rank = dist.get_rank()
    before = {f"{owner} {i}": frozenset([owner]) for owner in (0, 1) for i in range(num_shards)}
    after = {name: frozenset([1 - owner]) for name, (owner,) in before.items()}
    own = [name for name, ranks in before.items() if rank in ranks]
    store = DictStore({name: {"w": torch.full((values,), float(rank))} for name in own})
    live = LiveBytes([store.shards[name]["w"] for name in own])
    at_first = live.now()
    with live:
        move_all(before, after, store)
    assert store.shards.keys() == before.keys() - set(own)
    assert all(bool((shard["w"] == 1 - rank).all()) for shard in store.shards.values())
    return at_first, live.peak, live.now()


def test_a_rank_that_gives_all_and_gets_all_needs_one_round_more(two_ranks: Pool) -> None:
    # The headers of the exchange are a few kB.
    shard_bytes = ROUND_BYTES // 2 - (8 << 10)
    for at_first, peak, at_last in two_ranks.run(swap_everything, 3, shard_bytes // 4):
        assert at_first == at_last == 3 * shard_bytes
        assert 0 < peak - at_first <= ROUND_BYTES


def test_a_large_tensor_needs_its_own_size_more_and_not_all_of_them(two_ranks: Pool) -> None:
    for at_first, peak, _ in two_ranks.run(swap_everything, 2, ROUND_BYTES // 4 + 1000):
        assert at_first == 2 * (ROUND_BYTES + 4000)
        assert peak - at_first <= ROUND_BYTES + 4000 + 10_000


def alter_after_receiving() -> float:
    """Check that the received shard is the receiver's own memory."""
    live = {"w": torch.ones(4), "large": torch.ones(10_000)}
    rank = dist.get_rank()
    store = DictStore({"s": live} if rank == 0 else {})
    move_all({"s": frozenset([0])}, {"s": frozenset([0, 1])}, store)
    if rank == 1:
        for tensor in store.shards["s"].values():
            tensor.zero_()
    dist.barrier()
    return float(live["w"].sum() + live["large"].sum())


def test_a_received_shard_is_a_copy(two_ranks: Pool) -> None:
    assert two_ranks.run(alter_after_receiving) == [10_004.0, 10_004.0]


def drop_without_moving() -> tuple[list[str], int]:
    """Take shards from a rank where nobody lacks any, with no way to speak to the others."""
    rank = dist.get_rank()
    before = {"all": frozenset([0, 1]), "own": frozenset([rank]), "gone": frozenset([0, 1])}
    after = {"all": frozenset([0, 1]), "own": frozenset([rank])}
    store = DictStore({name: {"w": torch.ones(2)} for name in before})
    refused = AssertionError("ranks must not speak to each other")
    with (
        patch("autodp.redistribute.dist.isend", side_effect=refused),
        patch("autodp.redistribute.gather_json", side_effect=refused),
    ):
        num_bytes = move_all(before, after, store)
    return list(store.shards), num_bytes


def test_where_no_rank_lacks_anything_no_rank_speaks(two_ranks: Pool) -> None:
    assert two_ranks.run(drop_without_moving) == [(["all", "own"], 0)] * 2


def wait_for_a_silent_rank() -> str:
    """Let rank 1 leave before its shard is sent; return what rank 0 is told."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1.0))
    rank = dist.get_rank()
    store = DictStore({"s": {"w": torch.ones(1 << 20)}} if rank == 1 else {})
    try:
        if rank == 1:
            with patch("autodp.redistribute._exchange", side_effect=ConnectionError):
                move_all({"s": frozenset([1])}, {"s": frozenset([0])}, store, group=group)
        else:
            move_all({"s": frozenset([1])}, {"s": frozenset([0])}, store, group=group)
    except (PeerError, ConnectionError) as error:
        return str(error)
    finally:
        dist.barrier()
        dist.destroy_process_group(group)
    return "no error"


def test_a_silent_rank_is_named_with_what_it_owes(two_ranks: Pool) -> None:
    told, _ = two_ranks.run(wait_for_a_silent_rank)
    told_what = "to send s from w on, round 0 of a transition"
    assert told.startswith(f"rank 0 waited for rank 1 ({told_what}): ")


def test_one_process_only_drops() -> None:
    store = DictStore({"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}})
    before = {name: frozenset([0]) for name in ("a", "b")}
    assert (
        move_shards(before, {"a": frozenset([0])}, store, group=None, device=CPU, slots_per_node=1)
        == 0
    )
    assert list(store.shards) == ["a"]


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
