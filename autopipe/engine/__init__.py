"""Run one stage's program of micro-batches; how a neighbour is reached is a link.

schedule ─► executor ─► graph           a local autograd graph for every micro-batch
               │
               └─► link ◄─ process_link ◄─ channel ◄─ watchdog     between processes
                     ▲
                     └─ threads/                                    within one
"""

from autopipe.engine.channel import Peer, Receiver, Sender, TensorSpec
from autopipe.engine.executor import StageLinks, StageReport, StageRun, StageWork, run_program
from autopipe.engine.forward_pass import Task, current_task, is_checkpointing, is_recomputing
from autopipe.engine.graph import Starts, cut, total_bytes
from autopipe.engine.link import Gradients, Link, LinkAbove, LinkBelow, Payload
from autopipe.engine.process_link import ProcessLinkAbove, ProcessLinkBelow
from autopipe.engine.watchdog import LinkError, Watchdog

__all__ = [
    "Gradients",
    "Link",
    "LinkAbove",
    "LinkBelow",
    "LinkError",
    "Payload",
    "Peer",
    "ProcessLinkAbove",
    "ProcessLinkBelow",
    "Receiver",
    "Sender",
    "StageLinks",
    "StageReport",
    "StageRun",
    "StageWork",
    "Starts",
    "Task",
    "TensorSpec",
    "Watchdog",
    "current_task",
    "cut",
    "is_checkpointing",
    "is_recomputing",
    "run_program",
    "total_bytes",
]
