"""Balance layers over partitions by time or size, with torchgpipe's interface."""

from autopipe.balance.balance import balance_by_size, balance_by_time
from autopipe.balance.layer_costs import layer_seconds

__all__ = [
    "balance_by_size", "balance_by_time", "layer_seconds",
]  # fmt: skip
