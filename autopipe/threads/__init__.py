"""Run stages as threads of one process: queues between them, and random numbers of their own."""

from autopipe.threads.partition_threads import CallerSettings, run_together
from autopipe.threads.randomness import Randomness
from autopipe.threads.thread_pipeline import ThreadPipeline

__all__ = [
    "CallerSettings", "Randomness", "ThreadPipeline", "run_together",
]  # fmt: skip
