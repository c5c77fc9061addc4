"""State what a training step costs: sublayers, messages and everything else.

Times are known at a few micro-batch sizes, and interpolated between them.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from operator import add
from typing import Any

import numpy as np

from autopipe.profile.network import EXACT, AllReduceCost, LinkCost, Ring, RingCost


@dataclass(frozen=True)
class SublayerCost:
    """State a sublayer's cost; times have one entry for each of `Profile.batch_sizes`.

    Args:
        layer: the layer that it freezes with; the number of layers for the head.
        forward_s: in train mode, with gradients recorded.
        input_backward_s: the backward's part for the input's gradient.
        weight_backward_s: the rest, for the parameters' gradients, added to existing ones.
        frozen_s: forward in eval mode without gradients.
        parameter_bytes, buffer_bytes: a tensor that sublayers share counts in the first.
        gradient_bytes, optimizer_bytes: of its trainable parameters.
        saved_bytes: per sample, tensors that autograd keeps until backward, parameters excluded.
        output_bytes: per sample.
        copy_bytes: parameters cast to another dtype, which autograd keeps per micro-batch.
        untouched_bytes: gradient bytes that replicas need not sum.
        spread: quartiles of its measured times, as shares of the medians (the times here).
        recomputes: whether it keeps its input alone by itself. Then its backward's time contains
            a forward, and its bytes are those while it runs backward.
    """

    name: str
    layer: int
    forward_s: tuple[float, ...]
    input_backward_s: tuple[float, ...]
    weight_backward_s: tuple[float, ...]
    frozen_s: tuple[float, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    saved_bytes: float
    output_bytes: float
    copy_bytes: int = 0
    untouched_bytes: float = 0.0
    spread: tuple[float, float] = EXACT
    recomputes: bool = False

    @property
    def backward_s(self) -> tuple[float, ...]:
        return tuple(map(add, self.input_backward_s, self.weight_backward_s))

    def with_times(self, change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> SublayerCost:
        """Return the cost with each kind of its times changed."""
        # As `replace` would, in a fifth of its time: an epoch may begin with hundreds of these.
        changed = copy.copy(self)
        vars(changed).update((name, change(getattr(self, name))) for name in TIMES)
        return changed


TIMES = ("forward_s", "input_backward_s", "weight_backward_s", "frozen_s")


MICRO_BATCH_S = 0.43e-3
"""A stage's Python for a micro-batch: its instructions, seeds, scale and graph.

Source: CPU time of a step with 1 to 48 micro-batches beside that of a plain loop over as many, a
ViT of width 16 on one core (`experiments/results/2026-11-28-cpu.md`, M by measuring).
"""


@dataclass(frozen=True)
class Profile:
    """State what a training step costs.

    Args:
        batch_sizes: measured micro-batch sizes, ascending.
        sublayers: bottom first.
        read_s: reading one sample of the dataset.
        step_overhead_s: a step's time outside of everything else here.
        micro_batch_s: a stage's time for each micro-batch outside of its sublayers and messages.
        link: a message between neighbouring stages on one node.
        node_link: a message between neighbouring stages on two nodes.
        all_reduce: sums over replicas, measured for some numbers of replicas, or priced by
            described links.
        fetch_s: fetching a step's samples, whatever their number.
        cached_fetch_s: the same, when the frozen layers' activations are read instead.
        idle_node_share: time to compute while other slots are idle, as a share of the times here,
            which are those of slots that all compute and wait for the slowest.
        uncertainty: standard error of the times, as a share of them.
        slowness: how many times longer than the fastest each rank computes; () for equal ranks.
        cache_bytes_per_s: reading cached rows from the node's store to the device; on a GPU, by a
            thread beside the step. None if it is not known.
        cache_write_bytes_per_s: writing rows there for the first time; None if not known.
        cache_device_bytes_per_s: reading rows in a GPU's memory; None without a GPU.
    Raises:
        ValueError: sizes do not ascend, or a sublayer lacks a time for one of them.
    """

    batch_sizes: tuple[int, ...]
    sublayers: tuple[SublayerCost, ...]
    read_s: float
    optimizer_s_per_byte: float
    step_overhead_s: float
    link: LinkCost
    node_link: LinkCost
    all_reduce: tuple[AllReduceCost, ...] | RingCost = ()
    fetch_s: float = 0.0
    cached_fetch_s: float = 0.0
    idle_node_share: float = 1.0
    uncertainty: float = 0.0
    slowness: tuple[float, ...] = ()
    cache_bytes_per_s: float | None = None
    cache_write_bytes_per_s: float | None = None
    cache_device_bytes_per_s: float | None = None
    micro_batch_s: float = 0.0

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"a profile needs ascending micro-batch sizes from 1 on, got {sizes}")
        for cost in self.sublayers:
            if {len(getattr(cost, name)) for name in TIMES} != {len(sizes)}:
                raise ValueError(
                    f"sublayer {cost.name!r} lacks times, or has too many; give one "
                    f"of each kind for every micro-batch size of {sizes}"
                )

    def forward_s(self, index: int, batch: int) -> float:
        return _at(self.batch_sizes, self.sublayers[index].forward_s, batch)

    def backward_s(self, index: int, batch: int) -> float:
        return _at(self.batch_sizes, self.sublayers[index].backward_s, batch)

    def frozen_s(self, index: int, batch: int) -> float:
        return _at(self.batch_sizes, self.sublayers[index].frozen_s, batch)

    def first_active(self, num_frozen: int) -> int:
        """Return the index of the first sublayer above the frozen layers."""
        return sum(cost.layer < num_frozen for cost in self.sublayers)

    def prefix_s(self, num_frozen: int, num_samples: int, *, above: int = 0) -> float:
        """Return the seconds of the samples through frozen layers above .. num_frozen - 1."""
        indices = range(self.first_active(above), self.first_active(num_frozen))
        return sum(self.frozen_s(index, num_samples) for index in indices)

    def prefix_bytes(self, num_frozen: int) -> float:
        """Return the bytes of a sample's activations behind the frozen layers."""
        first = self.first_active(num_frozen)
        return self.sublayers[first - 1].output_bytes if first else 0.0

    def all_reduce_s(self, ring: Ring, num_bytes: float) -> float:
        """Return the seconds of a sum over a ring's ranks.

        Raises:
            ValueError: no sum over that many replicas, or more, was measured.
        """
        num_replicas = ring.num_ranks
        if num_replicas == 1:
            return 0.0
        if isinstance(self.all_reduce, RingCost):
            return self.all_reduce.seconds(ring, num_bytes)
        measured = {cost.num_replicas: cost for cost in self.all_reduce}
        # Spares leave odd numbers of replicas, which cost as much as the next measured number.
        enough = [n for n in measured if n >= num_replicas]
        if not enough:
            raise ValueError(
                f"the profile has sums over {list(measured)} replicas, none over "
                f"{num_replicas}; profile the cluster that is planned for"
            )
        return measured[min(enough)].at(num_bytes)

    def lengthened(self, factor: float) -> Profile:
        """Return the profile with computing times multiplied by a factor."""
        longer = self._with_times(partial(_scaled, factor))
        return replace(longer, optimizer_s_per_byte=factor * self.optimizer_s_per_byte)

    def quartiles(self) -> tuple[Profile, Profile]:
        """Return the profiles at the lower and the upper quartiles of what was measured."""
        return self._at_quartile(0), self._at_quartile(1)

    def _at_quartile(self, which: int) -> Profile:
        # Described links have no spread.
        sums = self.all_reduce
        return replace(
            self,
            sublayers=tuple(
                replace(cost.with_times(partial(_scaled, cost.spread[which])), spread=EXACT)
                for cost in self.sublayers
            ),
            link=self.link.at_quartile(which),
            node_link=self.node_link.at_quartile(which),
            all_reduce=sums
            if isinstance(sums, RingCost)
            else tuple(cost.at_quartile(which) for cost in sums),
        )

    def smoothed(self) -> Profile:
        """Return the profile with each sublayer's times of each kind on a line over the sizes."""
        return self._with_times(partial(fitted, self.batch_sizes))

    def _with_times(self, change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> Profile:
        return replace(self, sublayers=tuple(cost.with_times(change) for cost in self.sublayers))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Profile:
        def link(fields: Mapping[str, Any]) -> LinkCost:
            return LinkCost(**with_tuples(fields))

        sums = values["all_reduce"]
        rebuilt = {
            "sublayers": tuple(SublayerCost(**with_tuples(one)) for one in values["sublayers"]),
            "link": link(values["link"]),
            "node_link": link(values["node_link"]),
            # Described links are a table, measured sums a list.
            "all_reduce": RingCost(**{name: link(fields) for name, fields in sums.items()})
            if isinstance(sums, Mapping)
            else tuple(AllReduceCost(**with_tuples(one)) for one in sums),
        }
        return Profile(**{**with_tuples(values), **rebuilt})


def _scaled(factor: float, seconds: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(factor * one for one in seconds)


def with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Undo that JSON turns tuples into lists."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}


def merge(profiles: Sequence[Profile]) -> Profile:
    """Combine the ranks' profiles of one model: take the median of every measurement.

    Raises:
        ValueError: they describe different models or sizes.
    """
    return Profile.from_json(_median([profile.to_json() for profile in profiles]))


def _median(values: Sequence[Any]) -> Any:
    first = values[0]
    # Names and sizes must agree on all ranks; only measurements may differ.
    if all(value == first for value in values):
        return first
    if isinstance(first, dict):
        return {key: _median([value[key] for value in values]) for key in first}
    if isinstance(first, tuple) and len({len(value) for value in values}) == 1:
        return tuple(_median(entries) for entries in zip(*values, strict=True))
    if any(isinstance(value, float) for value in values):
        return statistics.median(values)
    raise ValueError(
        f"the ranks' profiles differ in more than measurements, for instance "
        f"{values}; profile one model at the same sizes on all"
    )


def _at(sizes: tuple[int, ...], seconds: tuple[float, ...], batch: int) -> float:
    """Interpolate the seconds of a batch; outside the sizes, follow the outer segment."""
    if len(sizes) == 1:
        return seconds[0] * batch / sizes[0]
    right = next((n for n in range(1, len(sizes)) if batch <= sizes[n]), len(sizes) - 1)
    (x0, x1), (y0, y1) = sizes[right - 1 : right + 1], seconds[right - 1 : right + 1]
    value = y0 + (y1 - y0) * (batch - x0) / (x1 - x0)
    # Outside, noise must not make more samples cheaper, or fewer cheaper than in proportion.
    if batch < x0:
        return min(max(value, y0 * batch / x0), y0)
    return max(value, y1) if batch > x1 else value


def fitted(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the times on the line a + b n that fits them best, with a and b at least 0.

    So noise cannot make more samples cheaper, or few samples cheaper than their share.
    """
    if len(sizes) == 1 or min(seconds) <= 0:
        return tuple(seconds)
    # Relative deviations count, or the largest size would decide alone.
    weights = 1 / np.array(seconds)
    slope, start = np.polyfit(sizes, seconds, 1, w=weights).tolist()
    if slope < 0:
        slope, start = 0.0, float(np.average(seconds, weights=weights**2))
    elif start < 0:  # Then the best line goes through the origin.
        rates = np.divide(sizes, seconds)
        slope, start = float(rates.sum() / (rates @ rates)), 0.0
    return tuple(start + slope * size for size in sizes)
