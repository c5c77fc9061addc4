"""Send skip connections straight from the partition that stashes to the partition that pops."""

from autopipe.skip.routes import (
    Namespace,
    SkipEdge,
    SkipKey,
    Skippable,
    skip_edges,
    verify_skippables,
)
from autopipe.skip.skip_layers import SkipStore, pop, skippable, stash, using

__all__ = [
    "Namespace", "SkipEdge", "SkipKey", "SkipStore", "Skippable", "pop", "skip_edges",
    "skippable", "stash", "using", "verify_skippables",
]  # fmt: skip
