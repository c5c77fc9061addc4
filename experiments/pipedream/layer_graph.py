"""State what a model's layers cost, as a graph, and read such a graph from PipeDream's text.

    node3 -- Conv2d(64, 64) -- forward_compute_time=1.9, backward_compute_time=4.1, \\
        activation_size=1024.0, parameter_size=36928.0
    node4 -- ReLU -- ...
    \tnode3 -- node4

Times are ms and sizes bytes, of a whole minibatch; a tuple's sizes are [8.0; 4.0]. A node may end
in " -- stage_id=1", which is ignored. Edges begin with a tab.

Source: PipeDream (SOSP 2019), whose profiler writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True)
class LayerNode:
    """State what a layer costs for a minibatch.

    Args:
        description: the layer in words; "Input..." for an input.
        activation_bytes: one entry for each output.
    Raises:
        ValueError: a cost is negative, or no number.
    """

    name: str
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: tuple[float, ...]
    parameter_bytes: float

    def __post_init__(self) -> None:
        seconds, sizes = (self.forward_s, self.backward_s), self.activation_bytes
        for value in (*seconds, *sizes, self.parameter_bytes):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"node {self.name!r} costs {value}; give numbers of 0 or more")

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def output_bytes(self) -> float:
        return sum(self.activation_bytes)


@dataclass(frozen=True)
class LayerGraph:
    """Hold nodes, and edges from a node to a node that takes its output.

    Raises:
        ValueError: there are no nodes, a name comes twice or is not known, or edges form a cycle.
    """

    nodes: tuple[LayerNode, ...]
    edges: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not names:
            raise ValueError("the graph has no nodes")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"the graph has several nodes called {twice[0]!r}")
        known = set(names)
        for edge in self.edges:
            if missing := [name for name in edge if name not in known]:
                raise ValueError(f"an edge leads to {missing[0]!r}, which is no node of the graph")
        # Sorting detects cycles; the result is cached.
        try:
            _ = self.in_order
        except CycleError as error:
            raise ValueError(
                "the graph's edges form a cycle, so that no layer can be the first"
            ) from error

    @cached_property
    def children(self) -> Mapping[str, tuple[str, ...]]:
        """Return the nodes that take each node's output, in the order of the edges."""
        found: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for begin, end in self.edges:
            found[begin].append(end)
        return {name: tuple(own) for name, own in found.items()}

    @cached_property
    def in_order(self) -> tuple[str, ...]:
        """Return the names in topological order."""
        sorter = TopologicalSorter[str]({node.name: () for node in self.nodes})
        for begin, end in self.edges:
            sorter.add(end, begin)
        return tuple(sorter.static_order())

    def without(self, names: set[str]) -> LayerGraph:
        """Return the graph less some nodes and their edges."""
        return LayerGraph(
            tuple(node for node in self.nodes if node.name not in names),
            tuple(edge for edge in self.edges if not names & set(edge)),
        )


def read_graph(text: str) -> LayerGraph:
    """Read PipeDream's text.

    Raises:
        ValueError: a line is neither a node nor an edge, or the graph cannot be.
    """
    nodes, edges = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        # A node's description may hold commas and brackets, but no " -- ".
        parts = line.strip().split(" -- ")
        try:
            if line.startswith("\t"):
                begin, end = parts
                edges.append((begin, end))
            else:
                nodes.append(_read_node(parts))
        except ValueError as error:
            raise ValueError(
                f"line {number}, {line.strip()[:60]!r}, is neither a node nor an edge of a "
                f"profile ({error})"
            ) from error
    return LayerGraph(tuple(nodes), tuple(edges))


def _read_node(parts: Sequence[str]) -> LayerNode:
    name, description, costs, *others = parts
    values = dict(one.split("=", 1) for one in costs.split(", "))
    if tuple(values) != _FIELDS or not all(one.startswith("stage_id=") for one in others):
        raise ValueError(f"a node has {', '.join(_FIELDS)}, and maybe stage_id")
    forward, backward, activations, parameters = (values[name] for name in _FIELDS)
    return LayerNode(
        name,
        description,
        float(forward) / 1000,
        float(backward) / 1000,
        tuple(float(one) for one in activations.strip("[]").split(";")),
        float(parameters),
    )
