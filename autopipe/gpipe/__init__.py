"""Wrap a sequential module as a pipeline in one process, with torchgpipe's documented interface.

module ─► batch_run ─► partition_work ─► engine/
   │         └─ micro_batch: split, join     └─ batch_norm, skip/
   ├─► step_loss: joined from micro-batches by loss/
   └─► stashed_pipeline: batches as one stream, without flushes ─► stashing
"""

from autopipe.gpipe.batch_norm import (
    DeferredBatchNorm,
    convert_deferred_batch_norm,
    restore_batch_norm,
)
from autopipe.gpipe.module import GPipe
from autopipe.gpipe.partition_checks import flatten_sequential
from autopipe.gpipe.stashed_pipeline import StashedPipeline

__all__ = [
    "DeferredBatchNorm", "GPipe", "StashedPipeline", "convert_deferred_batch_norm",
    "flatten_sequential", "restore_batch_norm",
]  # fmt: skip
