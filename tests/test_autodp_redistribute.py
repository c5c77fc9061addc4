"""Prove that what a rank needs comes once, from the nearest holder, bit for bit."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autodp import Move, Shard, execute_moves, plan_moves
from tests.pool import Pool

Holders = dict[str, frozenset[int]]
CPU = torch.device("cpu")


def random_plan(seed: int, num_ranks: int) -> tuple[Holders, Holders]:
    """Give up to 12 shards random holders; each is held somewhere and may be needed nowhere."""
    rng = random.Random(seed)
    names = [f"layers.{i}/weights" for i in range(rng.randrange(1, 13))]
    ranks = range(num_ranks)
    before = {name: frozenset(rng.sample(ranks, rng.randint(1, num_ranks))) for name in names}
    after = {name: frozenset(rng.sample(ranks, rng.randint(0, num_ranks))) for name in names}
    return before, after


@pytest.mark.parametrize("slots_per_node", [1, 2, 4, 8])
def test_every_missing_shard_comes_once_and_from_its_own_node_where_it_can(
        slots_per_node: int) -> None:
    for seed in range(200):
        before, after = random_plan(seed, 8)
        moves = plan_moves(before, after, slots_per_node=slots_per_node)
        missing = Counter((name, rank) for name in after for rank in after[name] - before[name])
        assert Counter((move.shard, move.destination) for move in moves) == missing
        for move in moves:
            holders = before[move.shard]
            assert move.source in holders
            node = move.destination // slots_per_node
            if any(rank // slots_per_node == node for rank in holders):
                assert move.source // slots_per_node == node


def test_nothing_moves_where_nothing_changes() -> None:
    for seed in range(50):
        before, _ = random_plan(seed, 8)
        assert plan_moves(before, before, slots_per_node=4) == ()
        fewer = {name: frozenset([min(ranks)]) for name, ranks in before.items()}
        assert plan_moves(before, fewer, slots_per_node=4) == ()


def test_equally_near_holders_share_the_work() -> None:
    names = [f"shard {i}" for i in range(12)]
    before = {name: frozenset([0, 1, 2]) for name in names}
    moves = plan_moves(before, {name: frozenset([3]) for name in names}, slots_per_node=4)
    assert Counter(move.source for move in moves) == {0: 4, 1: 4, 2: 4}


def test_nodes_are_served_from_within_even_where_others_are_idle() -> None:
    before = {f"shard {i}": frozenset([0, 4, 5, 6]) for i in range(9)}
    moves = plan_moves(before, {name: frozenset([1]) for name in before}, slots_per_node=4)
    assert {move.source for move in moves} == {0}


def test_halving_a_pipeline_moves_each_half_to_the_other_rank_only() -> None:
    before = {"low": frozenset([0]), "high": frozenset([1])}
    after = {"low": frozenset([0, 1]), "high": frozenset([0, 1])}
    assert plan_moves(before, after, slots_per_node=2) == (Move("low", 0, 1), Move("high", 1, 0))


@pytest.mark.parametrize("before", [{}, {"head/weights": frozenset[int]()}])
def test_a_shard_that_nobody_holds_is_an_error(before: Holders) -> None:
    with pytest.raises(ValueError, match="no rank holds 'head/weights', which rank 2 needs"):
        plan_moves(before, {"head/weights": frozenset([2])}, slots_per_node=4)


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
    }
    return {key: tensor for i, (key, tensor) in enumerate(shard.items()) if (i + kind) % 4}


def differences(ours: Shard, theirs: Shard) -> list[str]:
    """Name the tensors that differ in dtype, shape, device or any bit."""
    if list(ours) != list(theirs):
        return [f"names {list(ours)} instead of {list(theirs)}"]
    return [key for key, tensor in ours.items()
            if tensor.dtype != theirs[key].dtype or tensor.shape != theirs[key].shape
            or not tensor.is_cpu or raw(tensor) != raw(theirs[key])]


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def execute_random_plans(seeds: range) -> list[str]:
    """Carry out random plans one after the other; return what arrived wrong on this rank."""
    rank, wrong = dist.get_rank(), list[str]()
    for seed in seeds:
        before, after = random_plan(seed, dist.get_world_size())
        moves = plan_moves(before, after, slots_per_node=2)
        reads: list[str] = []

        def read(name: str, reads: list[str] = reads) -> Shard:
            reads.append(name)
            return awkward_shard(name)

        received = execute_moves(moves, read, group=dist.group.WORLD, device=CPU)
        if sorted(reads) != sorted({move.shard for move in moves if move.source == rank}):
            wrong.append(f"plan {seed}: read {reads}")
        if received.keys() != {name for name in after if rank in after[name] - before[name]}:
            wrong.append(f"plan {seed}: received {list(received)}")
        wrong += [f"plan {seed}, {name}: {what}" for name, shard in received.items()
                  for what in differences(shard, awkward_shard(name))]
    return wrong


def test_random_plans_deliver_every_tensor_bit_for_bit(four_ranks: Pool) -> None:
    for wrong in four_ranks.run(execute_random_plans, range(25)):
        assert wrong == []


def exchange_large_shards() -> list[str]:
    """Send more than a socket buffers, from every rank to every other at once."""
    ranks = range(dist.get_world_size())
    moves = [Move(f"{s} to {d}", s, d) for s in ranks for d in ranks if s != d]

    def read(name: str) -> Shard:
        return {"w": torch.full((1 << 19,), float(sum(name.encode())))}

    received = execute_moves(moves, read, group=dist.group.WORLD, device=CPU)
    return [name for name, shard in received.items() if differences(shard, read(name))]


def test_all_ranks_send_large_shards_to_all_at_once(four_ranks: Pool) -> None:
    assert four_ranks.run(exchange_large_shards) == [[]] * 4


def alter_after_receiving() -> float:
    """Check that the received shard is the receiver's own memory."""
    live = torch.ones(4)
    moves = [Move("w", 0, 1)]
    received = execute_moves(moves, lambda _: {"w": live}, group=dist.group.WORLD, device=CPU)
    for shard in received.values():
        shard["w"].zero_()
    dist.barrier()
    return float(live.sum())


def test_a_received_shard_is_a_copy(two_ranks: Pool) -> None:
    assert two_ranks.run(alter_after_receiving) == [4.0, 4.0]


def test_one_process_has_nothing_to_move() -> None:
    def read(name: str) -> Shard:
        raise AssertionError(name)

    assert execute_moves((), read, group=None, device=CPU) == {}
