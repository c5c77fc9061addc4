"""Run pipelines of micro-batches, and choose them.

gpipe/     the drop-in module       engine/    one stage's program    trace/   what ran when
balance/   layers over partitions   plan/      predict and choose     profile/ what layers cost
skip/      skip connections         cluster/   a described machine    threads/ stages as threads
stashing   versions of weights      pipedream/ replicated stages      schedule what runs in order
partition  split a chain            loss/      joined from parts      random_state compare states
"""

from autopipe import balance, skip
from autopipe.engine import is_checkpointing, is_recomputing
from autopipe.gpipe import (
    DeferredBatchNorm,
    GPipe,
    StashedPipeline,
    convert_deferred_batch_norm,
    flatten_sequential,
    restore_batch_norm,
)
from autopipe.trace import Recorder, Span, Summary, Trace

__all__ = [
    "DeferredBatchNorm", "GPipe", "Recorder", "Span", "StashedPipeline", "Summary", "Trace",
    "balance", "convert_deferred_batch_norm", "flatten_sequential", "is_checkpointing",
    "is_recomputing", "restore_batch_norm", "skip",
]  # fmt: skip
