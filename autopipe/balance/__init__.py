"""Balance layers over partitions by time or size: torchgpipe's interface."""

from autopipe.balance.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
