"""Cache the frozen prefix's activations, shared by all processes of a node.

stamp ─► prefix_cache ─► store ─► layout of rows in a file
              ├─► row_content, unequal_lengths
              ├─► reader: rows read ahead ─► row_copy
              └─► prefix_chunks: who runs together
"""

from __future__ import annotations

from autocache.layout import RowField, RowLayout
from autocache.prefix_cache import CacheStats, PrefixCache
from autocache.row_content import DIGEST, HIDDEN, RowContent
from autocache.stamp import chain_hash
from autocache.store import NamelessFilesError, RowRead, RowStore
from autocache.unequal_lengths import Positions, by_position, own_lengths

__all__ = [
    "DIGEST", "HIDDEN", "CacheStats", "NamelessFilesError", "Positions", "PrefixCache",
    "RowContent", "RowField", "RowLayout", "RowRead", "RowStore", "by_position", "chain_hash",
    "own_lengths",
]  # fmt: skip
