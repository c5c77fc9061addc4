"""Decide who trains what: topology, groups, moving state between ranks, sharding the data."""

from autodp.groups import Groups, build_groups
from autodp.messages import broadcast_json, gather_json
from autodp.redistribute import Move, Shard, execute_moves, plan_moves
from autodp.reduce import GradientReducer
from autodp.sampler import EpochSampler, mix_seed, split_evenly
from autodp.topology import Topology, allowed_lengths

__all__ = [
    "EpochSampler",
    "GradientReducer",
    "Groups",
    "Move",
    "Shard",
    "Topology",
    "allowed_lengths",
    "broadcast_json",
    "build_groups",
    "execute_moves",
    "gather_json",
    "mix_seed",
    "plan_moves",
    "split_evenly",
]
