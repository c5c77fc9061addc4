"""Model what a run would take if only its unavoidable work cost anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autopipe.profile import Profile


def ideal_seconds(
    profile: Profile, steps: Iterable[Mapping[str, Any]], *, num_samples: int, read_s: float
) -> float:
    """Add up the active layers' forward and backward, cache fills and reads, and the bubble.

    A step of B samples over K stages x R replicas takes, with perfect balance and free
    communication, B * (cost of the active sublayers a sample) / (K * R) * (M + K - 1) / M. Where
    the frozen prefix grows, every sample passes once through the newly frozen layers, on R
    devices; where it is cached, every sample is read.

    Args:
        profile: measured costs of the sublayers.
        steps: records of kind "step": samples, frozen, length, replicas, micro_batches.
        num_samples: size of the training set; how many samples a fill runs, unless the run ends
            before.
        read_s: seconds to read a cached sample.
    """
    total_s, depth, unfilled, fill_s = 0.0, 0, 0, 0.0
    for step in steps:
        length, replicas, frozen = step["length"], step["replicas"], step["frozen"]
        if frozen != depth:
            # A thaw leaves rows of a depth that is too great, so all layers below run again.
            above, size = depth if frozen > depth else 0, profile.batch_sizes[-1]
            fill_s = profile.prefix_s(frozen, size, above=above) / size
            depth, unfilled = frozen, num_samples
        samples, micro_batches = step["samples"], step["micro_batches"]
        micro_batch = max(1, round(samples / replicas / micro_batches))
        bubble = (micro_batches + length - 1) / micro_batches
        total_s += samples * _active_s(profile, frozen, micro_batch) / (length * replicas) * bubble
        filled = min(samples, unfilled)
        unfilled -= filled
        if frozen:
            total_s += (filled * fill_s + (samples - filled) * read_s) / replicas
    return total_s


def _active_s(profile: Profile, num_frozen: int, micro_batch: int) -> float:
    """Return the seconds a sample costs in the layers that train, at a micro-batch size."""
    return (
        sum(
            profile.forward_s(i, micro_batch) + profile.backward_s(i, micro_batch)
            for i, sublayer in enumerate(profile.sublayers)
            if sublayer.layer >= num_frozen
        )
        / micro_batch
    )
