"""List the places where a layer graph can be cut, in topological order.

An antichain, the nodes computed last, names a place: they and all that they need are below the
cut. A place follows another if a node whose output is still wanted above is replaced by a node
that takes its output. Sets of nodes are the bits of an int here.

Source: PipeDream (SOSP 2019), whose optimizer runs over these states. As in its program, they
start from the first node without inputs; others are computed as soon as something needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopipe.pipedream import CutState
from experiments.pipedream.layer_graph import LayerGraph

_MOST_STATES = 5000


def trimmed(graph: LayerGraph) -> LayerGraph:
    """Leave out inputs, and items that no node takes.

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
    """Return the cuts in topological order.

    The last has all nodes below it, except those unrelated to the first node without inputs, as in
    the published program.

    Raises:
        ValueError: there are too many cuts.
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


class _Bits:
    """Hold a graph's relations as bit sets: all nodes above and below each node."""

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
        # Nodes below each node whose outputs other nodes, above or beside it, take as well.
        self.wanted = [
            sum(
                1 << lower
                for lower in _ones(self.below[index])
                if child_bits[lower] & ~self.below[index] & ~(1 << index)
            )
            for index in range(len(number))
        ]


def _with(antichain: int, related: Sequence[int]) -> int:
    """Return the antichain and the nodes related to each of its nodes."""
    found = antichain
    for index in _ones(antichain):
        found |= related[index]
    return found


def _explore(bits: _Bits) -> tuple[list[int], list[list[int]]]:
    """Return all antichains, and the numbers of those that follow each."""
    first = 1 << bits.first
    antichains, number = [first], {first: 0}
    followers: list[list[int]] = [[]]
    for antichain in antichains:  # The list grows in the loop: breadth first.
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
    """Yield the antichains that follow an antichain."""
    frontier = _with(antichain, bits.wanted)
    for index in _ones(frontier):
        for child in bits.children[index]:
            # A child below a frontier node has been computed.
            if antichain >> child & 1 or bits.above[child] & frontier:
                continue
            grown = frontier & ~(1 << index) | 1 << child
            # Only the topmost nodes name the place.
            yield sum(1 << node for node in _ones(grown) if not bits.above[node] & grown)


def _in_order(followers: list[list[int]]) -> list[int]:
    """Sort topologically, depth first; not recursive, as paths may be thousands of states long."""
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
    nodes = [bits.graph.nodes[index] for index in _ones(_with(antichain, bits.below))]
    wanted = [bits.graph.nodes[index] for index in _ones(_with(antichain, bits.wanted))]
    return CutState(
        tuple(node.name for node in nodes),
        below,
        sum(node.compute_s for node in nodes),
        sum(node.output_bytes for node in nodes),
        sum(node.parameter_bytes for node in nodes),
        sum(node.output_bytes for node in wanted),
        sum(node.forward_s for node in nodes),
    )


def _ones(bits: int) -> Iterator[int]:
    """Yield the positions of set bits, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
