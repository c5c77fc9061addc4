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

Source: PipeDream (Narayanan et al. 2019), section 3.3; PipeDream-2BW (2021), section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StagePlace:
    """Say where a stage is, and how micro-batches become batches.

    Args:
        stage: from 0.
        num_stages: of the pipeline (K).
        num_micro_batches: of a batch (M).
    """

    stage: int
    num_stages: int
    num_micro_batches: int

    def batch_of(self, micro_batch: int) -> int:
        """Return the batch that a micro-batch of the stream belongs to."""
        return micro_batch // self.num_micro_batches

    @property
    def warm_up(self) -> int:
        """Return how many forwards of this stage run ahead of its first backward."""
        return self.num_stages - 1 - self.stage


VERSION_RULES: dict[str, Callable[[StagePlace, int], int]] = {
    "stashed": lambda place, i: place.batch_of(max(0, i - place.warm_up)),
    "vertical_sync": lambda place, i: place.batch_of(max(0, i - place.num_stages + 1)),
    "double_buffered": lambda place, i: max(0, place.batch_of(i) - (place.num_stages > 1)),
}


def check_versions(name: str, *, num_stages: int, num_micro_batches: int) -> None:
    """Raise ValueError for an unknown rule, or one that these counts do not allow."""
    if name not in VERSION_RULES:
        raise ValueError(f"versions are {name!r}; choose one of {', '.join(VERSION_RULES)}")
    if name == "double_buffered" and num_micro_batches < num_stages - 1:
        raise ValueError(
            f"double_buffered keeps two versions, which takes at least {num_stages - 1} "
            f"micro-batches a batch on {num_stages} stages; there are {num_micro_batches}"
        )
