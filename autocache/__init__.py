"""Cache the frozen prefix's activations, shared by all processes of a node.

stamp ─► prefix_cache ─► activation_store: device_store ─► behind ─► store ─► layout of a file
              ├─► sample_checks, row_content, digests, unequal_lengths
              ├─► reader: rows read ahead ─► row_copy
              └─► prefix_chunks: who runs together ─► uploads
"""

from __future__ import annotations

from autocache.activation_store import ActivationStore, RowRead
from autocache.behind import WrittenBehind
from autocache.device_store import DeviceStore, device_bytes
from autocache.layout import RowField, RowLayout
from autocache.prefix_cache import CacheStats, PrefixCache
from autocache.row_content import DIGEST, HIDDEN, RowContent
from autocache.stamp import chain_hash, fingerprint
from autocache.store import NamelessFilesError, RowStore
from autocache.unequal_lengths import Positions, by_position, own_lengths
from autocache.uploads import Uploader

__all__ = [
    "DIGEST", "HIDDEN", "ActivationStore", "CacheStats", "DeviceStore", "NamelessFilesError",
    "Positions", "PrefixCache", "RowContent", "RowField", "RowLayout", "RowRead", "RowStore",
    "Uploader", "WrittenBehind", "by_position", "chain_hash", "device_bytes", "fingerprint",
    "own_lengths",
]  # fmt: skip
