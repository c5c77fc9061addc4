"""Run stages as threads of one process: queues between them, and random numbers of their own."""

from autopipe.threads.randomness import Randomness
from autopipe.threads.thread_pipeline import CallerSettings, ThreadPipeline, run_together

__all__ = [
    "CallerSettings", "Randomness", "ThreadPipeline", "run_together",
]  # fmt: skip
