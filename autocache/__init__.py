"""Cache the frozen prefix's activations, shared by all processes of a node.

prefix_cache: one fetch
  ├─► prefix_rows ─► device_store ─► behind ─► store ─► layout
  │                                    └─► kept_store ─► row_sets: rows kept between runs
  ├─► sample_checks ─► row_content ─► digests
  └─► prefix_chunks ─► uploads
stamp: what rows have passed through
"""

from __future__ import annotations

from autocache.behind import WrittenBehind
from autocache.device_store import ActivationStore, DeviceStore, device_bytes
from autocache.kept_store import KeptRows, KeptStore
from autocache.layout import RowField, RowLayout
from autocache.prefix_cache import CacheStats, PrefixCache
from autocache.row_content import (
    DIGEST,
    HIDDEN,
    Positions,
    RowContent,
    by_position,
    own_lengths,
)
from autocache.row_sets import OpenSet, RowSets, SetFacts
from autocache.stamp import chain_hash, fingerprint
from autocache.store import NamelessFilesError, RowRead, RowStore
from autocache.uploads import Uploader

__all__ = [
    "DIGEST", "HIDDEN", "ActivationStore", "CacheStats", "DeviceStore", "KeptRows", "KeptStore",
    "NamelessFilesError", "OpenSet", "Positions", "PrefixCache", "RowContent", "RowField",
    "RowLayout", "RowRead", "RowSets", "RowStore", "SetFacts", "Uploader", "WrittenBehind",
    "by_position", "chain_hash", "device_bytes", "fingerprint", "own_lengths",
]  # fmt: skip
