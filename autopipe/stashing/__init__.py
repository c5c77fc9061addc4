"""Let weights go on while micro-batches are in flight, each of which keeps those that it met.

version_rules: which update's weights those are
weight_versions ─► stashed_work: a stage's work with versions
"""

from autopipe.stashing.stashed_weights import (
    VERSION_RULES,
    StagePlace,
    StashedWork,
    check_versions,
)

__all__ = [
    "StagePlace", "StashedWork", "VERSION_RULES", "check_versions",
]  # fmt: skip
