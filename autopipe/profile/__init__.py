"""Measure what sublayers and links cost."""

from autopipe.profile.chain import (
    MeasuredChain,
    ProfiledSublayer,
    chain_bytes,
    chain_seconds,
    graph_leaves,
    join_chains,
    join_sizes,
    left_as_found,
    now_s,
    profile_sublayers,
    quartiles,
    recomputes_itself,
    saved_storages,
    storages,
    time_rounds,
    uncertainty,
    unshared,
)
from autopipe.profile.network import AllReduceCost, LinkCost, Ring, RingCost
from autopipe.profile.profile import (
    MICRO_BATCH_S,
    Profile,
    SublayerCost,
    merge,
    with_tuples,
)

__all__ = [
    "AllReduceCost", "LinkCost", "MICRO_BATCH_S", "MeasuredChain", "Profile",
    "ProfiledSublayer", "Ring", "RingCost", "SublayerCost", "chain_bytes", "chain_seconds",
    "graph_leaves", "join_chains", "join_sizes", "left_as_found", "merge", "now_s",
    "profile_sublayers", "quartiles", "recomputes_itself", "saved_storages", "storages",
    "time_rounds", "uncertainty", "unshared", "with_tuples",
]  # fmt: skip
