"""Start processes, let them meet, and raise errors on all of them.

launcher    starts this machine's processes, and restarts them
world       a process's rank, device and memory; the group of all ranks
freed_...   what a run frees stays with its process
meeting     how the ranks find each other
agreement   one rank's error is raised on all
"""

from pipetransformer.processes.agreement import agree, on_rank_0, told_by_rank_0
from pipetransformer.processes.freed_memory import FreedMemory, give_back_free_pages
from pipetransformer.processes.launcher import is_restarted, launch, launcher_name
from pipetransformer.processes.world import (
    World,
    connect,
    cpu_name,
    free_bytes,
    likely_device,
    plannable_bytes,
    slots_of_a_node,
    tightest,
    world_size,
)

__all__ = [
    "FreedMemory", "World", "agree", "connect", "cpu_name", "free_bytes",
    "give_back_free_pages", "is_restarted", "launch", "launcher_name", "likely_device",
    "on_rank_0", "plannable_bytes", "slots_of_a_node", "tightest", "told_by_rank_0", "world_size",
]  # fmt: skip
