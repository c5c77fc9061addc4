"""Measure what sublayers and links cost."""

from autopipe.profile.chain import (
    ProfiledSublayer,
    chain_bytes,
    chain_seconds,
    left_as_found,
    now_s,
    saved_storages,
    storages,
    unshared,
)
from autopipe.profile.layer_graph import LayerGraph, LayerNode, graph_of, read_graph
from autopipe.profile.network import (
    AllReduceCost,
    LinkCost,
    Ring,
    RingCost,
    quartiles,
    uncertainty,
)
from autopipe.profile.profile import (
    MeasuredChain,
    Profile,
    SublayerCost,
    join_chains,
    join_sizes,
    merge,
    profile_sublayers,
    time_rounds,
    with_tuples,
)

__all__ = [
    "AllReduceCost", "LayerGraph", "LayerNode", "LinkCost", "MeasuredChain", "Profile",
    "ProfiledSublayer", "Ring", "RingCost", "SublayerCost", "chain_bytes", "chain_seconds",
    "graph_of", "join_chains", "join_sizes", "left_as_found", "merge", "now_s",
    "profile_sublayers", "quartiles", "read_graph", "saved_storages", "storages",
    "time_rounds", "uncertainty", "unshared", "with_tuples",
]  # fmt: skip
