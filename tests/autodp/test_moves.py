"""Prove that what a rank lacks comes once, over the shortest way, and fits into its memory."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from autodp.moves import Move, largest_incoming_bytes, plan_moves
from autodp.topology import Topology
from autopipe.plan.request import fitting_lengths
from pipetransformer.elastic.shards import OPTIMIZER, Ownership
from tests.helpers.pool import Pool

Holders = dict[str, frozenset[int]]
Sizes = dict[str, int]


def random_problem(seed: int, num_ranks: int) -> tuple[Holders, Holders, Sizes]:
    """Give up to 24 pieces random sizes and holders; a piece may be needed nowhere."""
    rng = random.Random(seed)
    most = rng.choice([1, 2, num_ranks])
    names = [f"layers.{i}/weights" for i in range(rng.randrange(1, 25))]
    ranks = range(num_ranks)
    before = {name: frozenset(rng.sample(ranks, rng.randint(1, most))) for name in names}
    after = {name: frozenset(rng.sample(ranks, rng.randint(0, most))) for name in names}
    return before, after, {name: rng.choice([0, 1, 5, 30, 97, 100]) for name in names}


def pipeline_problems(num_problems: int) -> Iterator[tuple[Holders, Holders, Sizes, int]]:
    """Yield changes from one random pipeline to another, and the slots of a node."""
    rng = random.Random(0)
    names = [f"blocks.{i}" for i in range(14)]

    def placement(topology: Topology) -> Holders:
        length = topology.length
        frozen = rng.randint(0, len(names) - length)
        cuts = sorted(rng.sample(range(frozen + 1, len(names)), length - 1))
        return Ownership(tuple(names), topology, (frozen, *cuts, len(names))).shards()

    for _ in range(num_problems):
        num_ranks, slots = rng.choice([(2, 2), (4, 4), (4, 2), (6, 3), (8, 4), (12, 4)])
        before, after = (
            placement(Topology(num_ranks, slots, rng.choice(fitting_lengths(num_ranks, slots))))
            for _ in range(2)
        )
        sizes = {shard: rng.choice([9, 18, 30]) * (1 + (OPTIMIZER in shard)) for shard in before}
        yield before, after, sizes, slots


def excess_bytes(
    before: Holders, after: Holders, sizes: Sizes, moves: Sequence[Move]
) -> Iterator[int]:
    """Yield for each round and rank by how much it exceeds what it had at first or has at last."""
    held = {name: set(ranks) for name, ranks in before.items()}
    last_sent = {(move.piece, move.source): move.round for move in moves}

    def size(holders: dict[str, set[int]] | Holders, rank: int) -> int:
        return sum(sizes[name] for name, ranks in holders.items() if rank in ranks)

    def drop(number: int) -> None:
        for name, ranks in held.items():
            for rank in ranks - after[name]:
                if last_sent.get((name, rank), -1) <= number:
                    ranks.remove(rank)

    drop(-1)
    for number, together in itertools.groupby(moves, key=lambda move: move.round):
        for move in together:
            held[move.piece].add(move.destination)
        for rank in range(12):
            yield size(held, rank) - max(size(before, rank), size(after, rank))
        drop(number)
    assert held == {name: set(ranks) for name, ranks in after.items()}


@pytest.mark.parametrize("slots_per_node", [1, 2, 4, 8])
def test_every_lacking_piece_comes_once_from_a_rank_that_has_it_by_then(
    slots_per_node: int,
) -> None:
    for seed in range(200):
        before, after, sizes = random_problem(seed, 8)
        moves = plan_moves(before, after, sizes, slots_per_node=slots_per_node, round_bytes=60)
        lacking = Counter((name, rank) for name in after for rank in after[name] - before[name])
        assert Counter((move.piece, move.destination) for move in moves) == lacking
        assert [move.round for move in moves] == sorted(move.round for move in moves)
        arrived = {(name, rank): -1 for name, ranks in before.items() for rank in ranks}
        for move in moves:
            assert arrived[move.piece, move.source] < move.round
            arrived[move.piece, move.destination] = move.round


@pytest.mark.parametrize("slots_per_node", [1, 2, 4, 8])
def test_a_piece_crosses_the_network_once_for_each_node_that_has_none_of_it(
    slots_per_node: int,
) -> None:
    def node_of(rank: int) -> int:
        return rank // slots_per_node

    for seed in range(200):
        before, after, sizes = random_problem(seed, 8)
        moves = plan_moves(before, after, sizes, slots_per_node=slots_per_node)
        crossing = Counter(
            (move.piece, node_of(move.destination))
            for move in moves
            if node_of(move.source) != node_of(move.destination)
        )
        lacking = {
            (name, node_of(rank))
            for name, ranks in after.items()
            for rank in ranks
            if not any(node_of(holder) == node_of(rank) for holder in before[name])
        }
        assert crossing == Counter(lacking)
        for move in moves:  # Whatever crosses comes straight from a first holder.
            if node_of(move.source) != node_of(move.destination):
                assert move.source in before[move.piece]


def test_nothing_moves_where_no_rank_lacks_anything() -> None:
    for seed in range(50):
        before, _, sizes = random_problem(seed, 8)
        assert plan_moves(before, before, sizes, slots_per_node=4) == ()
        fewer = {name: frozenset([min(ranks)]) for name, ranks in before.items()}
        assert plan_moves(before, fewer, sizes, slots_per_node=4) == ()


def test_equally_near_holders_share_the_bytes_and_not_the_count() -> None:
    sizes = {"large": 12} | {f"small {i}": 3 for i in range(8)}
    before = dict.fromkeys(sizes, frozenset([0, 1, 2]))
    moves = plan_moves(before, dict.fromkeys(sizes, frozenset([3])), sizes, slots_per_node=4)
    sent = Counter[int]()
    for move in moves:
        sent[move.source] += sizes[move.piece]
    assert sent == {0: 12, 1: 12, 2: 12}
    assert Counter(move.source for move in moves) == {0: 1, 1: 4, 2: 4}


def test_ranks_of_a_node_share_what_they_pass_on() -> None:
    sizes = {f"piece {i}": 10 for i in range(8)}
    before = dict.fromkeys(sizes, frozenset([0]))
    moves = plan_moves(
        before, dict.fromkeys(sizes, frozenset([4, 5, 6, 7])), sizes, slots_per_node=4
    )
    assert Counter((m.source, m.destination) for m in moves if m.source == 0) == {
        (0, rank): 2 for rank in (4, 5, 6, 7)
    }
    assert Counter(m.source for m in moves if m.source != 0) == dict.fromkeys((4, 5, 6, 7), 6)


def test_nodes_are_served_from_within_even_where_others_are_idle() -> None:
    sizes = {f"piece {i}": 1 for i in range(9)}
    before = dict.fromkeys(sizes, frozenset([0, 4, 5, 6]))
    moves = plan_moves(before, dict.fromkeys(sizes, frozenset([1])), sizes, slots_per_node=4)
    assert {move.source for move in moves} == {0}


def test_halving_a_pipeline_moves_each_half_to_the_other_rank_only() -> None:
    before = {"low": frozenset([0]), "high": frozenset([1])}
    moves = plan_moves(
        before, dict.fromkeys(before, frozenset([0, 1])), {"low": 3, "high": 4}, slots_per_node=2
    )
    assert moves == (Move("low", 0, 1, 0), Move("high", 1, 0, 0))


def test_moves_are_those_of_the_modules_drawing() -> None:
    before = {"a": frozenset([0]), "b": frozenset([0])}
    moves = plan_moves(
        before, dict.fromkeys(before, frozenset(range(4))), {"a": 1, "b": 1}, slots_per_node=2
    )
    assert sorted((m.round, m.source, m.destination, m.piece) for m in moves) == [
        (0, 0, 1, "a"), (0, 0, 1, "b"), (0, 0, 2, "a"), (0, 0, 3, "b"),
        (1, 2, 3, "a"), (1, 3, 2, "b"),
    ]  # fmt: skip


def test_a_rank_receives_a_rounds_bytes_or_one_larger_piece() -> None:
    for seed in range(200):
        before, after, sizes = random_problem(seed, 8)
        moves = plan_moves(before, after, sizes, slots_per_node=4, round_bytes=60)
        by_round: dict[tuple[int, int], list[int]] = {}
        for move in moves:
            by_round.setdefault((move.round, move.destination), []).append(sizes[move.piece])
        for together in by_round.values():
            assert sum(together) <= 60 or [s for s in together if s] == [max(together)]


def test_no_rank_exceeds_what_it_had_or_will_have_by_more_than_a_round() -> None:
    problems = [(*random_problem(seed, 8), 4) for seed in range(300)]
    problems += list(pipeline_problems(300))
    num_moving = 0
    for before, after, sizes, slots in problems:
        moves = plan_moves(before, after, sizes, slots_per_node=slots, round_bytes=64)
        moving = [sizes[move.piece] for move in moves]
        spare = max([64, *moving])
        assert max(excess_bytes(before, after, sizes, moves), default=0) <= spare
        num_moving += bool(moves)
    assert num_moving > 400


def test_a_rank_that_gives_all_and_gets_all_never_holds_both() -> None:
    sizes = {f"{side} {i}": 10 for side in ("low", "high") for i in range(20)}
    before = {name: frozenset([int(name.startswith("high"))]) for name in sizes}
    after = {name: frozenset([1 - rank for rank in ranks]) for name, ranks in before.items()}
    moves = plan_moves(before, after, sizes, slots_per_node=2, round_bytes=30)
    assert max(excess_bytes(before, after, sizes, moves)) == 30
    assert moves[-1].round == 6


@pytest.mark.parametrize("before", [{}, {"head/weights": frozenset[int]()}])
def test_a_piece_that_nobody_holds_is_an_error(before: Holders) -> None:
    with pytest.raises(ValueError, match="no rank holds 'head/weights', which rank 2 needs"):
        plan_moves(before, {"head/weights": frozenset([2])}, {}, slots_per_node=4)


def test_the_largest_incoming_bytes_are_those_of_one_rank() -> None:
    moves = (Move("a", 0, 1, 0), Move("b", 0, 2, 0), Move("c", 0, 1, 1))
    assert largest_incoming_bytes(moves, {"a": 3, "b": 6, "c": 4}) == 7
    assert largest_incoming_bytes((), {}) == 0


def some_plans() -> list[tuple[Move, ...]]:
    """Plan in this process; strings hash differently in each."""
    problems = [random_problem(seed, 8) for seed in range(20)]
    return [plan_moves(*problem, slots_per_node=4, round_bytes=60) for problem in problems]


def test_all_processes_plan_the_same(two_ranks: Pool) -> None:
    assert two_ranks.run(some_plans) == [some_plans()] * 2
