"""Start processes, let them meet, and agree.

launcher ─► world ◄─ meeting          agreement: what one rank finds wrong is raised on all
"""

from pipetransformer.processes.agreement import agree
from pipetransformer.processes.device_memory import free_bytes, tightest
from pipetransformer.processes.launcher import LAUNCH_VARIABLE, RESTART_VARIABLE, launch
from pipetransformer.processes.world import (
    World,
    connect,
    likely_device,
    slots_of_a_node,
    world_size,
)

__all__ = [
    "LAUNCH_VARIABLE", "RESTART_VARIABLE", "World", "agree", "connect", "free_bytes", "launch",
    "likely_device", "slots_of_a_node", "tightest", "world_size",
]  # fmt: skip
