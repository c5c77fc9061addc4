"""Balance layers over partitions by time or size: torchgpipe's interface."""

from autopipe.balance.balance import balance_by_size, balance_by_time
from autopipe.balance.blocks import block_partition

__all__ = [
    "balance_by_size", "balance_by_time", "block_partition",
]  # fmt: skip
