"""Wrap a sequential module as a pipeline in one process: torchgpipe's documented interface.

module ─► batch_run ─► partition_work ─► engine/
             └─ micro_batch: cut, join     └─ batch_norm, skip/
"""

from autopipe.gpipe.batch_norm import (
    DeferredBatchNorm,
    convert_deferred_batch_norm,
    restore_batch_norm,
)
from autopipe.gpipe.module import GPipe
from autopipe.gpipe.partition_checks import flatten_sequential

__all__ = [
    "DeferredBatchNorm", "GPipe", "convert_deferred_batch_norm", "flatten_sequential",
    "restore_batch_norm",
]  # fmt: skip
