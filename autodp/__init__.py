"""Decide who trains what: topology, groups, moving state between ranks, sharding the data.

topology ─► groups ─► gradient_reducer ─► rank_sums: messages, or shared memory within a node
    └─────► moves ─► redistribute: in rounds of pieces       sampler: whose samples
"""

from autodp.gradient_reducer import GradientReducer
from autodp.groups import GroupPool, Groups, link_device
from autodp.messages import PeerError, broadcast_json, broadcast_tensor, gather_json, waiting_for
from autodp.moves import ROUND_BYTES, Holders, Move, largest_incoming_bytes, plan_moves
from autodp.rank_sums import MessageSums
from autodp.redistribute import Shard, ShardStore, move_shards
from autodp.sampler import (
    EpochOrder,
    EpochSampler,
    checked_order,
    mix_seed,
    places_in_batches,
    shuffled,
    shuffled_by_length,
    shuffled_in_place,
)
from autodp.topology import Topology

__all__ = [
    "ROUND_BYTES", "EpochOrder", "EpochSampler", "GradientReducer", "GroupPool", "Groups",
    "Holders", "MessageSums", "Move", "PeerError", "Shard", "ShardStore", "Topology",
    "broadcast_json", "broadcast_tensor", "checked_order", "gather_json",
    "largest_incoming_bytes", "link_device", "mix_seed", "move_shards", "places_in_batches",
    "plan_moves", "shuffled", "shuffled_by_length", "shuffled_in_place", "waiting_for",
]  # fmt: skip
