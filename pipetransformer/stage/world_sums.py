"""Add up what ranks tell of a step: few numbers, on the CPU, within a step's time."""

from __future__ import annotations

from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from autodp import waiting_for
from pipetransformer.processes import World


@final
class WorldSums:
    """Add up all ranks' numbers.

    Args:
        timeout_s: the longest that a rank may take for a step.
    """

    def __init__(self, world: World, *, timeout_s: float) -> None:
        self._group, self._timeout_s = world.group, timeout_s

    def of(self, values: list[float], *, patience: int = 1) -> list[float]:
        """Return the sums of all ranks' values; wait at most for `patience` steps. Collective."""
        if self._group is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        with waiting_for("their part of the loss", self._group):
            work = dist.all_reduce(total, group=self._group, async_op=True)
            # The world's group itself allows for the longer waits of a transition.
            work.wait(timedelta(seconds=patience * self._timeout_s))
        return total.tolist()
