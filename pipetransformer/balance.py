"""Offer torchgpipe's names of balancing: `from pipetransformer.balance import balance_by_time`."""

from autopipe.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
