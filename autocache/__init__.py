"""Cache the frozen prefix's activations, shared by all processes of a node.

prefix_cache: one fetch
  ├─► prefix_rows ─► activation_store: what each of these stores does ─► layout
  │     store            rows in a file, or in memory ─► checksum, rooms
  │     device_store     rows on a GPU ─► write_behind
  │     write_behind     rows of another store, which a thread writes
  │     tiered_store     rows of several stores
  │     kept_store       rows kept between runs ─► row_sets ─► store
  ├─► row_reader: reads ahead ─► tiered_store, row_pool
  ├─► sample_checks ─► row_content: what a row holds ─► digests, int8_tokens
  └─► prefix_chunks ─► uploads
stamp: what rows have passed through
"""

from __future__ import annotations

from autocache.activation_store import ActivationStore, RowRead
from autocache.device_store import DeviceStore, device_bytes
from autocache.kept_store import KeptRows, KeptStore
from autocache.layout import RowField, RowLayout
from autocache.prefix_cache import CacheStats, PrefixCache
from autocache.row_content import DIGEST, HIDDEN, Positions, RowContent, by_position, own_lengths
from autocache.row_pool import RowPool
from autocache.row_sets import OpenSet, RowSets, SetFacts
from autocache.stamp import chain_hash, fingerprint
from autocache.store import NamelessFilesError, RowStore
from autocache.tiered_store import TieredStore, TierPart, spread_rows
from autocache.uploads import Uploader
from autocache.write_behind import WriteBehind

__all__ = [
    "DIGEST", "HIDDEN", "ActivationStore", "CacheStats", "DeviceStore", "KeptRows", "KeptStore",
    "NamelessFilesError", "OpenSet", "Positions", "PrefixCache", "RowContent", "RowField",
    "RowLayout", "RowPool", "RowRead", "RowSets", "RowStore", "SetFacts", "TieredStore",
    "TierPart", "Uploader", "WriteBehind", "by_position", "chain_hash", "device_bytes",
    "fingerprint", "own_lengths", "spread_rows",
]  # fmt: skip
