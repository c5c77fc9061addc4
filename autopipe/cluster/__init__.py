"""Model a profile for a cluster that is only described, from counted kernels."""

from autopipe.cluster.description import load_cluster, modelled_profile, parse_bytes
from autopipe.cluster.full_masks import FullMasks

__all__ = [
    "FullMasks", "load_cluster", "modelled_profile", "parse_bytes",
]  # fmt: skip
