"""Bring a layer graph into a line: the places where it can be cut, in topological order.

A place is named by the antichain of the nodes computed last: with all that they need they are
below the cut. One place follows another where one of the nodes whose outputs are still wanted
gives way to a node that takes its output. Nodes are bits of an int here.

Source: PipeDream (SOSP 2019), whose optimizer runs over these states; as its program enumerates
them: from the first node without inputs, others being computed as soon as something needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopipe.profile import LayerGraph

_MOST_STATES = 5000


@dataclass(frozen=True)
class CutState:
    """Describe a cut.

    Args:
        nodes: names of those below it, in the graph's order.
        below: indices of the states that some path of cuts passes before this one.
        compute_s, saved_bytes, parameter_bytes: of all nodes below it.
        crossing_bytes: outputs that are still wanted above it.
    """

    nodes: tuple[str, ...]
    below: tuple[int, ...]
    compute_s: float
    saved_bytes: float
    parameter_bytes: float
    crossing_bytes: float


def trimmed(graph: LayerGraph) -> LayerGraph:
    """Leave out what no stage can be given a choice of: inputs, and items that nobody takes.

    Raises:
        ValueError: nothing is left.
    """
    inner = graph.without(
        {
            node.name
            for node in graph.nodes
            if node.description.startswith("Input")
            and all(node.name != end for _, end in graph.edges)
        }
    )
    unused = {
        node.name
        for node in inner.nodes
        if node.description.startswith("__getitem__") and not inner.children[node.name]
    }
    return inner.without(unused)


def cut_states(graph: LayerGraph) -> tuple[CutState, ...]:
    """Return the cuts in topological order; the last has all nodes below it.

    All but those that have nothing to do with what follows the first node without inputs: the
    published program leaves them out. `left_out` names them.

    Raises:
        ValueError: there are too many.
    """
    bits = _Bits(graph)
    found, followers = _explore(bits)
    order = _in_order(followers)
    rank = {old: new for new, old in enumerate(order)}
    below: list[set[int]] = [set() for _ in order]
    for new, old in enumerate(order):
        for following in followers[old]:
            below[rank[following]] |= {new, *below[new]}
    return tuple(_state(bits, found[old], tuple(sorted(below[rank[old]]))) for old in order)


def left_out(graph: LayerGraph, states: Sequence[CutState]) -> list[str]:
    """Name a graph's nodes that none of its cuts has below it."""
    placed = set(states[-1].nodes)
    return [node.name for node in graph.nodes if node.name not in placed]


class _Bits:
    def __init__(self, graph: LayerGraph) -> None:
        self.graph = graph
        number = {node.name: index for index, node in enumerate(graph.nodes)}
        self.children = [
            [number[child] for child in graph.children[node.name]] for node in graph.nodes
        ]
        self.first = next(
            index
            for index in range(len(number))
            if all(index not in children for children in self.children)
        )
        self.above, self.below = [0] * len(number), [0] * len(number)
        order = [number[name] for name in graph.in_order]
        for index in order:
            for child in self.children[index]:
                self.below[child] |= self.below[index] | 1 << index
        for index in reversed(order):
            for child in self.children[index]:
                self.above[index] |= self.above[child] | 1 << child
        child_bits = [sum(1 << child for child in set(children)) for children in self.children]
        # Nodes below each node whose outputs go elsewhere, too.
        self.wanted = [
            sum(
                1 << lower
                for lower in _ones(self.below[index])
                if child_bits[lower] & ~self.below[index] & ~(1 << index)
            )
            for index in range(len(number))
        ]

    def frontier(self, antichain: int) -> int:
        """Return the antichain with the nodes below it that something else takes from, too."""
        wanted = antichain
        for index in _ones(antichain):
            wanted |= self.wanted[index]
        return wanted

    def all_below(self, antichain: int) -> int:
        """Return the antichain with all that it needs."""
        found = antichain
        for index in _ones(antichain):
            found |= self.below[index]
        return found


def _explore(bits: _Bits) -> tuple[list[int], list[list[int]]]:
    """Return the antichains in the order in which they are found, and which follow each."""
    first = 1 << bits.first
    antichains, number = [first], {first: 0}
    followers: list[list[int]] = [[]]
    for antichain in antichains:  # It grows meanwhile.
        nexts = followers[number[antichain]]
        for following in dict.fromkeys(_next(bits, antichain)):
            if following not in number:
                if len(antichains) == _MOST_STATES:
                    raise ValueError(
                        f"the graph can be cut in more than {_MOST_STATES} places; join nodes of "
                        "parallel branches"
                    )
                number[following] = len(antichains)
                antichains.append(following)
                followers.append([])
            nexts.append(number[following])
    return antichains, followers


def _next(bits: _Bits, antichain: int) -> Iterator[int]:
    """Yield the antichains that follow one."""
    frontier = bits.frontier(antichain)
    for index in _ones(frontier):
        for child in bits.children[index]:
            if antichain >> child & 1 or bits.above[child] & frontier:
                continue
            grown = frontier & ~(1 << index) | 1 << child
            yield sum(1 << node for node in _ones(grown) if not bits.above[node] & grown)


def _in_order(followers: list[list[int]]) -> list[int]:
    """Sort topologically, depth first."""
    order: list[int] = []
    seen = {0}
    path = [(0, iter(followers[0]))]
    while path:
        state, left = path[-1]
        following = next((follower for follower in left if follower not in seen), None)
        if following is None:
            order.append(state)
            path.pop()
        else:
            seen.add(following)
            path.append((following, iter(followers[following])))
    return order[::-1]


def _state(bits: _Bits, antichain: int, below: tuple[int, ...]) -> CutState:
    nodes = [bits.graph.nodes[index] for index in _ones(bits.all_below(antichain))]
    wanted = [bits.graph.nodes[index] for index in _ones(bits.frontier(antichain))]
    return CutState(
        tuple(node.name for node in nodes),
        below,
        sum(node.compute_s for node in nodes),
        sum(node.output_bytes for node in nodes),
        sum(node.parameter_bytes for node in nodes),
        sum(node.output_bytes for node in wanted),
    )


def _ones(bits: int) -> Iterator[int]:
    """Yield the positions of the bits that are set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
