"""Say what a step came to on a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from autocache import CacheStats


@dataclass(frozen=True)
class StepNumbers:
    """Hold what a step computed, and what all ranks told of it; see `StepResult`."""

    loss: float
    gradient_norm: float
    skipped: bool
    sums: StepSums


@final
class LateNumbers:
    """Hold a step's numbers, which the GPU is still to compute.

    Args:
        values: (n,) float64 on the GPU: the loss, the gradient's norm, whether the step was
            skipped, this rank's part of the loss, and the squared norms of the gradient's parts;
            then all ranks' sums and one number more, where `own` is None.
        own: what this rank told, where it is alone.
        arrived: raises an error if the GPU has not computed them, but was let go on.
        judge: is given values and numbers when they are checked, and may raise.
    """

    def __init__(
        self,
        values: Tensor,
        own: StepSums | None,
        arrived: Callable[[], None],
        judge: Callable[[list[float], StepNumbers], None],
    ) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        # A blocking event lets this thread sleep, while another writes the cache's rows.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()
        self._own, self._arrived = own, arrived
        self._judge: Callable[[list[float], StepNumbers], None] | None = judge
        self._values: list[float] = []

    def wait(self) -> list[float]:
        """Return the values once the GPU has computed them."""
        if not self._values:
            self._event.synchronize()
            self._arrived()
            self._values = self._host.tolist()
        return self._values

    def known(self) -> StepNumbers:
        """Return the numbers once the GPU has computed them."""
        loss, norm, skipped, *rest = self.wait()
        sums = self._own or StepSums(*rest[-len(vars(StepSums())) - 1 : -1])
        return StepNumbers(loss, norm, bool(skipped), sums)

    def check(self) -> None:
        """Raise an error, on all ranks alike, if no step may follow. Collective."""
        judge, self._judge = self._judge, None
        if judge is not None:
            judge(self.wait(), self.known())


@dataclass(frozen=True)
class StepResult:
    """Report a training step.

    Args:
        numbers: what it computed.
        seconds, spent_s: this rank's time, in all and what is known of it; see `breakdown`.
        stats: of this rank's cache.
    """

    numbers: StepNumbers | LateNumbers
    seconds: float
    spent_s: Mapping[str, float]
    stats: CacheStats

    @property
    def breakdown(self) -> dict[str, float]:
        """Return this rank's seconds by what they were spent on."""
        return {**self.spent_s, "other": self.seconds - sum(self.spent_s.values())}

    def check(self) -> None:
        """Raise an error, on all ranks alike, if no step may follow this one. Collective."""
        if not isinstance(self.numbers, StepNumbers):
            self.numbers.check()

    @property
    def is_known(self) -> bool:
        """Return whether the numbers are here, and need not be waited for."""
        return isinstance(self.numbers, StepNumbers)

    @property
    def loss(self) -> float:
        """Return the mean over the global batch."""
        return self._known.loss

    @property
    def gradient_norm(self) -> float:
        """Return the whole model's, before clipping."""
        return self._known.gradient_norm

    @property
    def skipped(self) -> bool:
        """Return whether a non-finite number made every rank leave its weights as they were."""
        return self._known.skipped

    @property
    def stops(self) -> bool:
        """Return whether a rank has asked to end the run."""
        return self._known.sums.stops > 0

    @property
    def cache_hits(self) -> int:
        """Return of how many samples, of all replicas, activations were read."""
        return int(self._known.sums.hits)

    @property
    def cache_misses(self) -> int:
        """Return of how many samples, of all replicas, activations were computed."""
        return int(self._known.sums.misses)

    @property
    def cache_upgrades(self) -> int:
        """Return of how many of these a lower layer's activations were read."""
        return int(self._known.sums.upgrades)

    @property
    def cache_ahead(self) -> int:
        """Return how many samples were computed for steps to come, which count them as hits."""
        return int(self._known.sums.ahead)

    @property
    def _known(self) -> StepNumbers:
        return self.numbers if isinstance(self.numbers, StepNumbers) else self.numbers.known()


@dataclass(frozen=True)
class StepSums:
    """Hold what a rank tells of a step, or what all do, added up.

    Args:
        loss, count: the losses' sum, and what their mean divides it by.
        squares: the gradient's squared norm.
        split: ranks whose loss depends on how the batch is split.
        early: ranks whose gradients were summed before they were complete.
        wrong: ranks that found something wrong.
        trained: micro-batches whose loss had a gradient.
        stops: ranks that ask to end the run.
        hits, misses, upgrades, ahead: samples; see `StepResult`.
    """

    loss: float = 0.0
    count: float = 0.0
    squares: float = 0.0
    split: float = 0.0
    early: float = 0.0
    wrong: float = 0.0
    trained: float = 0.0
    stops: float = 0.0
    hits: float = 0.0
    misses: float = 0.0
    upgrades: float = 0.0
    ahead: float = 0.0

    def as_list(self) -> list[float]:
        return [*map(float, vars(self).values())]
