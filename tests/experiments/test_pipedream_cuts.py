"""Prove PipeDream's text of a graph, and the cuts of graphs that a hand can enumerate."""

from __future__ import annotations

import pytest

from autopipe.pipedream import Machines, optimize
from experiments.pipedream.cuts import cut_states, trimmed
from experiments.pipedream.layer_graph import LayerGraph, LayerNode, read_graph

TEXT = """\
node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, {out}=0.000, \
{size}=0.000
node2 -- LSTM(4, 4) -- forward_compute_time=1.500, backward_compute_time=2.250, \
{out}=[8.000; 4.000], {size}=64.000
node3 -- __getitem__(1) -- forward_compute_time=0.000, backward_compute_time=0.000, {out}=4.000, \
{size}=0.000
node4 -- Linear(4, 2) -- forward_compute_time=0.500, backward_compute_time=1.000, {out}=2.000, \
{size}=32.000 -- stage_id=1
\tnode1 -- node2
\tnode2 -- node3
\tnode2 -- node4
""".format(out="activation_size", size="parameter_size")


def node(name: str, seconds: float = 1.0, out: float = 1.0, weights: float = 0.0) -> LayerNode:
    return LayerNode(name, name, seconds, 0.0, (out,), weights)


def graph(nodes: str, *edges: str) -> LayerGraph:
    """Build a graph of nodes of one letter; the n-th takes 2^n s and has 10^n bytes."""
    return LayerGraph(
        tuple(node(name, 2.0**i, 10.0**i) for i, name in enumerate(nodes)),
        tuple((edge[0], edge[1]) for edge in edges),
    )


def cuts(found: LayerGraph) -> list[tuple[str, float]]:
    """Return what is below each cut, and the bytes across."""
    return [("".join(state.nodes), state.crossing_bytes) for state in cut_states(found)]


def test_the_profilers_text_is_read() -> None:
    found = read_graph(TEXT)
    assert found.nodes == (
        LayerNode("node1", "Input0", 0.0, 0.0, (0.0,), 0.0),
        LayerNode("node2", "LSTM(4, 4)", 0.0015, 0.00225, (8.0, 4.0), 64.0),
        LayerNode("node3", "__getitem__(1)", 0.0, 0.0, (4.0,), 0.0),
        LayerNode("node4", "Linear(4, 2)", 0.0005, 0.001, (2.0,), 32.0),
    )
    assert found.edges == (("node1", "node2"), ("node2", "node3"), ("node2", "node4"))
    assert found.children["node2"] == ("node3", "node4")


def test_inputs_and_items_that_nobody_takes_are_left_out() -> None:
    assert [one.name for one in trimmed(read_graph(TEXT)).nodes] == ["node2", "node4"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("node3 -- __getitem__", "node2 -- __getitem__", "several nodes called 'node2'"),
        ("\tnode2 -- node4", "\tnode2 -- node9", "leads to 'node9', which is no node"),
        ("\tnode2 -- node4", "\tnode2", "line 7, 'node2', is neither"),
        ("\tnode2 -- node4", "\tnode4 -- node2\n\tnode2 -- node4", "form a cycle"),
        ("backward_compute_time=2.250", "backwards=2.250", "line 2, .*is neither"),
        ("backward_compute_time=2.250", "backward_compute_time=-2", "costs -0.002"),
        ("backward_compute_time=2.250", "backward_compute_time=nan", "costs nan"),
        ("[8.000; 4.000]", "[8.000; x]", "line 2, .*is neither"),
        ("stage_id=1", "stage=1", "and maybe stage_id"),
        (TEXT, "", "the graph has no nodes"),
    ],
)
def test_what_is_no_profile_is_refused_with_its_line(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ValueError, match=message):
        read_graph(TEXT.replace(old, new))


def test_a_chain_can_be_cut_behind_every_node() -> None:
    found = graph("abcd", "ab", "bc", "cd")
    assert cuts(found) == [("a", 1), ("ab", 10), ("abc", 100), ("abcd", 1000)]
    states = cut_states(found)
    assert [state.below for state in states] == [(), (0,), (0, 1), (0, 1, 2)]
    assert [state.compute_s for state in states] == [1, 3, 7, 15]


def test_an_output_that_is_wanted_later_crosses_all_cuts_between() -> None:
    # c takes from a as well: a skip connection.
    assert cuts(graph("abcd", "ab", "bc", "ac", "cd")) == [
        ("a", 1), ("ab", 11), ("abc", 100), ("abcd", 1000),
    ]  # fmt: skip


def test_branches_are_cut_in_every_combination() -> None:
    # a -> b -> e and a -> c -> d -> e.
    found = dict(cuts(graph("abcde", "ab", "ac", "cd", "be", "de")))
    assert found == {
        "a": 1, "ab": 11, "ac": 101, "acd": 1001, "abc": 111, "abcd": 1011, "abcde": 10000,
    }  # fmt: skip


def test_states_are_in_topological_order_and_know_all_that_is_below_them() -> None:
    states = cut_states(graph("abcdefg", "ab", "ac", "cd", "be", "de", "ef", "af", "fg", "bg"))
    for number, state in enumerate(states):
        assert all(below < number for below in state.below)
        inside = set(state.nodes)
        for other in state.below:
            assert set(states[other].nodes) < inside


def test_a_second_source_is_computed_when_it_is_needed() -> None:
    assert [name for name, _ in cuts(graph("abcd", "ac", "bc", "cd"))] == ["a", "abc", "abcd"]


def test_what_has_nothing_to_do_with_the_first_node_is_left_out() -> None:
    two = graph("abcd", "ab", "cd")
    assert [state.nodes for state in cut_states(two)] == [("a",), ("a", "b")]


def test_a_branching_graph_is_cut_as_its_line_of_cuts() -> None:
    costs = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 2.0}
    nodes = [LayerNode(name, name, s, 0.0, (0.0,), 0.0) for name, s in costs.items()]
    edges = (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))
    states = cut_states(LayerGraph(tuple(nodes), edges))
    plan = optimize(states, [Machines(2, 1e9)], straight=True)
    assert plan.seconds == 3.0
    first = plan.stages[0]
    assert set(states[first.end - 1].nodes) == {"a", "b"}
