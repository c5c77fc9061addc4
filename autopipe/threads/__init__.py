"""Run stages as threads of one process: queues between them, and random numbers of their own."""

from autopipe.threads.partition_threads import CallerSettings, run_together
from autopipe.threads.randomness import Randomness, may_draw
from autopipe.threads.thread_link import Crossing, ThreadLink

__all__ = [
    "CallerSettings", "Crossing", "Randomness", "ThreadLink", "may_draw", "run_together",
]  # fmt: skip
