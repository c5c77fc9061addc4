"""Say which version of its weights a stage uses for a micro-batch, forward and backward.

Version v of a stage's weights is what they are after v updates. Legend: K stages, the first is
s = 0; M micro-batches a batch; micro-batch i belongs to batch i // M; w(s) = K - 1 - s forwards
run ahead of a backward in 1F1B. Each batch t updates once, by the mean of its gradients; in terms
of batches of one micro-batch:

    "stashed"          the newest: max(0, i - w(s)) // M
                       w(t+1) = w(t) - nu grad f(w_0(t-K+1), ..., w_K-1(t))
    "vertical_sync"    what stage 0 used: max(0, i - (K - 1)) // M
                       w(t+1) = w(t) - nu grad f(w(t-K+1), ..., w(t-K+1))
    "double_buffered"  the one before the batch's: max(0, i // M - 1), with M >= K - 1
                       w(t+1) = w(t) - nu grad f(w(t-1))

With K = 1 all three are ordinary training.

Where stages have several workers, n(s) of them, N in all and b(s) in the stages below s,
micro-batch i is worker i % n(s)'s. It runs (N - 1 - b(s)) // n(s) of its own forwards ahead: then

    w(s) = n(s) * ((N - 1 - b(s)) // n(s))      and w(0) takes the place of K - 1

Source: PipeDream (Narayanan et al. 2019), section 3.3; PipeDream-2BW (2021), section 3.1. There a
stage of n workers updates every n micro-batches, each stage at its own pace; here all do once a
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from autopipe.schedule import StageWorkers


@dataclass(frozen=True)
class StagePlace:
    """Say where a stage is, and how micro-batches become batches.

    Args:
        stage: from 0.
        num_stages: of the pipeline (K).
        num_micro_batches: of a batch (M).
        workers: of each stage; () for one each.
    """

    stage: int
    num_stages: int
    num_micro_batches: int
    workers: tuple[int, ...] = ()

    def batch_of(self, micro_batch: int) -> int:
        """Return the batch that a micro-batch of the stream belongs to."""
        return micro_batch // self.num_micro_batches

    @cached_property
    def warm_up(self) -> int:
        """Return by how many micro-batches a forward of this stage is ahead of its backwards."""
        return self._warm_up_of(self.stage)

    @cached_property
    def longest_warm_up(self) -> int:
        """Return that of the first stage."""
        return self._warm_up_of(0)

    def _warm_up_of(self, stage: int) -> int:
        workers = StageWorkers(self.workers or (1,) * self.num_stages)
        return workers.replicas[stage] * workers.warm_up(stage)


VERSION_RULES: dict[str, Callable[[StagePlace, int], int]] = {
    "stashed": lambda place, i: place.batch_of(max(0, i - place.warm_up)),
    "vertical_sync": lambda place, i: place.batch_of(max(0, i - place.longest_warm_up)),
    "double_buffered": lambda place, i: max(0, place.batch_of(i) - (place.num_stages > 1)),
}


def check_versions(name: str, place: StagePlace) -> None:
    """Raise ValueError for an unknown rule, or one that a stage's batches do not allow."""
    if name not in VERSION_RULES:
        raise ValueError(f"versions are {name!r}; choose one of {', '.join(VERSION_RULES)}")
    least, given = place.longest_warm_up, place.num_micro_batches
    if name == "double_buffered" and given < least:
        raise ValueError(
            f"double_buffered keeps two versions, which takes at least {least} micro-batches a "
            f"batch on {place.num_stages} stages; there are {given}"
        )
