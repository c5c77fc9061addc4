"""Say which pipelines a cluster allows, and over which links their stages sum gradients.

A pipeline stays within a node, or fills whole ones. Where its length leaves a remainder, slots of
each node, or nodes, stay idle as spares. A stage's ring passes its ranks in ascending order, and
so leaves each of its nodes once:

    2 nodes of 4 slots, K = 2:        stage 0   0 2 | 4 6     two rings share each node's link
                                      stage 1   1 3 | 5 7
    likewise, at most 2 pipelines:    stage 0   0 2           none leaves its node
                                      stage 1   1 3
    stages of 3, 2 and 3 workers:     stage 0   0 1 2         stage 1 alone has the link
                                      stage 1       3 | 4
                                      stage 2           5 6 7
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise

from autopipe.profile import Ring


def fitting_lengths(num_ranks: int, slots_per_node: int) -> tuple[int, ...]:
    """Return the lengths that leave no slot idle, in ascending order."""
    return length_choices(num_ranks, slots_per_node)[0]


def length_choices(num_ranks: int, slots_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return the lengths by how many slots train, most first.

    A later choice is for where no length of the ones before it is feasible.
    """
    by_slots = defaultdict(list)
    for length in range(1, num_ranks + 1):
        if replicas := replicas_of(length, num_ranks, slots_per_node):
            by_slots[length * replicas].append(length)
    return tuple(tuple(by_slots[used]) for used in sorted(by_slots, reverse=True))


def replicas_of(length: int, num_ranks: int, slots_per_node: int) -> int:
    """Return how many pipelines of a length find room; 0 where none does."""
    if length > slots_per_node and length % slots_per_node:
        return 0
    block = max(length, slots_per_node)
    blocks, rest = divmod(num_ranks, block)
    return blocks * (block // length) + rest // length


# Kept, because every candidate of a length asks for the same ones.
@lru_cache(maxsize=1024)
def rings_of(
    workers: tuple[int, ...], num_replicas: int, num_ranks: int, slots_per_node: int
) -> tuple[Ring, ...]:
    """Return each stage's ring; pipelines fill one node, or consecutive ones, after the other.

    Args:
        num_replicas: pipelines that train; the ranks of further ones are spares.
    """
    length = sum(workers)
    block = max(length, slots_per_node)
    room = chain.from_iterable(
        range(start, min(start + block, num_ranks) - length + 1, length)
        for start in range(0, num_ranks, block)
    )
    pipelines = list(islice(room, num_replicas))
    nodes = [
        {(begin + rank) // slots_per_node for begin in pipelines for rank in range(first, last)}
        for first, last in pairwise(accumulate(workers, initial=0))
    ]
    leaving = Counter(chain.from_iterable(own for own in nodes if len(own) > 1))
    return tuple(
        Ring(num_replicas * count, max(leaving[node] for node in own) if len(own) > 1 else 0)
        for count, own in zip(workers, nodes, strict=True)
    )
