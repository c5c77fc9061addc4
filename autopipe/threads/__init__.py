"""Run stages as threads of one process, linked by mailboxes, each with its own random numbers."""

from autopipe.threads.randomness import Randomness
from autopipe.threads.thread_pipeline import CallerSettings, ThreadPipeline, run_together

__all__ = [
    "CallerSettings", "Randomness", "ThreadPipeline", "run_together",
]  # fmt: skip
