"""Say which pipeline lengths a cluster allows, and how many pipelines of one train side by side.

A pipeline stays within a node, or fills whole ones. Where its length leaves a remainder, slots of
each node, or nodes, stay idle as spares.
"""

from __future__ import annotations


def fitting_lengths(num_ranks: int, slots_per_node: int) -> tuple[int, ...]:
    """Return the lengths that leave no slot idle, in ascending order."""
    return tuple(
        length
        for length in range(1, num_ranks + 1)
        if num_ranks % length == 0
        and (slots_per_node % length == 0 or length % slots_per_node == 0)
    )


def length_choices(num_ranks: int, slots_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return the lengths by how many slots train, most first.

    A later choice is for where no length of the ones before it is feasible.
    """
    exact = fitting_lengths(num_ranks, slots_per_node)
    by_slots: dict[int, list[int]] = {}
    for length in range(1, num_ranks + 1):
        replicas = replicas_of(length, num_ranks, slots_per_node)
        if length not in exact and replicas:
            by_slots.setdefault(length * replicas, []).append(length)
    return (exact, *(tuple(by_slots[used]) for used in sorted(by_slots, reverse=True)))


def replicas_of(length: int, num_ranks: int, slots_per_node: int) -> int:
    """Return how many pipelines of a length find room; 0 where none does."""
    if length > slots_per_node and length % slots_per_node:
        return 0
    block = max(length, slots_per_node)
    blocks, rest = divmod(num_ranks, block)
    return blocks * (block // length) + rest // length
