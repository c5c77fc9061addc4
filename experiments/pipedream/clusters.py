"""Describe the machines of PipeDream's experiments, and what they gave there.

Bandwidths are of one direction. Those within a server are what such machines usually reach; the
paper names the kind alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.pipedream import Machines

GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Published:
    """Hold a row of the paper's table 1: the configuration, and speed-ups over data parallelism.

    Args:
        plan: replicas of the stages.
        epoch: speed-up of an epoch's time.
        accuracy: speed-up to the same accuracy; None where none is given.
    """

    plan: str
    epoch: float
    accuracy: float | None = None

    @property
    def replicas(self) -> tuple[int, ...]:
        """Return those of the stages; () where the paper gives no numbers."""
        numbers = self.plan.split("-")
        return tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else ()


CLUSTERS = {
    "A": (Machines(4, 12e9), Machines(4, 10 * GIGABIT)),
    "B": (Machines(8, 25e9), Machines(2, 25 * GIGABIT)),
}
"""By name, levels innermost first: 4 servers of 4 V100 on PCIe and 10 Gb/s; 2 servers of 8 V100
on NVLink and 25 Gb/s."""

PUBLISHED = {
    ("vgg16", "A"): Published("15-1", 5.28, 5.28),
    ("vgg16", "B"): Published("15-1", 2.98, 2.46),
    ("alexnet", "A"): Published("15-1", 4.92),
    ("alexnet", "B"): Published("15-1", 2.04),
    ("resnet50", "A"): Published("16", 1.0, 1.0),
    ("resnet50", "B"): Published("16", 1.0, 1.0),
    ("gnmt8", "A"): Published("straight", 2.95),
    ("gnmt16", "A"): Published("straight", 2.34, 2.92),
    ("gnmt16", "B"): Published("straight", 3.14),
}
"""By profile (its file's name) and cluster. GNMT-8's is of 3 servers of A. Source: PipeDream (SOSP
2019), table 1."""
