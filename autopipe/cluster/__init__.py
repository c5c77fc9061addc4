"""Model a profile for a cluster that is only described, from counted kernels."""

from autopipe.cluster.description import load_cluster, modelled_profile, parse_bytes

__all__ = [
    "load_cluster", "modelled_profile", "parse_bytes",
]  # fmt: skip
