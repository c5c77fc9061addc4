"""Run stages as threads of one process: queues between them, and random numbers of their own."""

from autopipe.threads.partition_threads import CallerSettings, run_together
from autopipe.threads.randomness import Randomness, may_draw, randomness_of
from autopipe.threads.thread_link import Crossing, ThreadLink
from autopipe.threads.thread_pipeline import ThreadPipeline

__all__ = [
    "CallerSettings", "Crossing", "Randomness", "ThreadLink", "ThreadPipeline", "may_draw",
    "randomness_of", "run_together",
]  # fmt: skip
