"""Run one stage's program of micro-batches; a link reaches each neighbour.

schedule ─► executor ─► graph_cut: a local autograd graph for every micro-batch
               └─► links (to other processes) ◄─ stream_watchdog
"""

from autopipe.engine.current_micro_batch import (
    ForwardPass,
    current_forward_pass,
    is_checkpointing,
    is_recomputing,
    running,
)
from autopipe.engine.executor import (
    StageLinks,
    StageReport,
    StageRun,
    StageWork,
    run_chunks,
)
from autopipe.engine.graph_cut import Starts, cut, total_bytes
from autopipe.engine.links import (
    Gradients,
    Link,
    Payload,
    Peer,
    ProcessLinkAbove,
    ProcessLinkBelow,
    Receiver,
    RoutedLink,
    Sender,
    TensorSpec,
)
from autopipe.engine.stream_watchdog import Milestone, Watchdog

__all__ = [
    "ForwardPass", "Gradients", "Link", "Milestone", "Payload", "Peer", "ProcessLinkAbove",
    "ProcessLinkBelow", "Receiver", "RoutedLink", "Sender", "StageLinks", "StageReport",
    "StageRun", "StageWork", "Starts", "TensorSpec", "Watchdog", "current_forward_pass", "cut",
    "is_checkpointing", "is_recomputing", "run_chunks", "running", "total_bytes",
]  # fmt: skip
