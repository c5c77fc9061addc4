"""Cache the frozen prefix's activations, shared by all processes of a node."""

from __future__ import annotations

from autocache.content import HIDDEN, RowContent
from autocache.layout import RowField, RowLayout
from autocache.prefix import CacheStats, PrefixCache, RunLayers
from autocache.stamp import PrefixStamps, chain_hash
from autocache.store import NamelessFilesError, RowRead, RowStore, StoreCounts

__all__ = [
    "HIDDEN",
    "CacheStats",
    "NamelessFilesError",
    "PrefixCache",
    "PrefixStamps",
    "RowContent",
    "RowField",
    "RowLayout",
    "RowRead",
    "RowStore",
    "RunLayers",
    "StoreCounts",
    "chain_hash",
]
