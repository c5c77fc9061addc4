"""Let weights go on while micro-batches are in flight, each of which keeps those that it met.

version_rules: which update's weights those are
weight_versions ─► stashed_work: a stage's work with versions
"""

from autopipe.stashing.stashed_work import StashedWork
from autopipe.stashing.version_rules import VERSION_RULES, StagePlace, check_versions

__all__ = ["VERSION_RULES", "StagePlace", "StashedWork", "check_versions"]
