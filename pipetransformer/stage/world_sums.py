"""Add up what ranks tell of a step: few numbers, on the CPU, within a step's time."""

from __future__ import annotations

from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from autodp import waiting_for
from pipetransformer.processes import World


@final
class WorldSums:
    """Add up all ranks' numbers.

    Args:
        timeout_s: the longest that a rank may take for a step.
        counts: whether this rank speaks for its stage, whose ranks hold equal gradients.
    """

    def __init__(self, world: World, *, timeout_s: float, counts: bool) -> None:
        self._group, self._timeout_s, self._counts = world.group, timeout_s, counts

    def of(self, values: list[float], *, patience: int = 1) -> list[float]:
        """Return the sums of all ranks' values; wait at most for `patience` steps. Collective."""
        if self._group is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        self._all_reduce(total, "their part of the loss", patience=patience)
        return total.tolist()

    def over_stages(self, value: Tensor) -> Tensor:
        """Add up the stages' values, as their first ranks hold them. Collective."""
        if self._group is None:
            return value
        own = value.to("cpu") if self._counts else torch.zeros((), dtype=value.dtype)
        self._all_reduce(own, "their part of the gradient's norm")
        return own.to(value.device)

    def _all_reduce(self, values: Tensor, what: str, *, patience: int = 1) -> None:
        with waiting_for(what, self._group):
            work = dist.all_reduce(values, group=self._group, async_op=True)
            # The world's group itself allows for the longer waits of a transition.
            work.wait(timedelta(seconds=patience * self._timeout_s))
