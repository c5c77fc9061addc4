"""Measure what every sublayer costs, in seconds and bytes, at a few micro-batch sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from operator import add, sub
from typing import Any

import numpy as np
from torch import Tensor, nn

from autopipe.profile.chain import (
    ProfiledSublayer,
    chain_bytes,
    device_of,
    input_backward_shares,
    left_as_found,
    time_chain,
)
from autopipe.profile.network import (
    EXACT,
    AllReduceCost,
    LinkCost,
    Ring,
    RingCost,
    fitted,
    quartiles,
)


@dataclass(frozen=True)
class SublayerCost:
    """State a sublayer's cost; times have one entry per `Profile.batch_sizes`.

    Args:
        layer: the layer that it freezes with; the number of layers for the head.
        forward_s: forward in train mode with gradients recorded.
        input_backward_s: the part of the backward that the input's gradient takes.
        weight_backward_s: the rest, for the parameters' gradients, added to existing ones.
        frozen_s: forward in eval mode without gradients.
        parameter_bytes, buffer_bytes: a tensor that several sublayers share counts in the first.
        gradient_bytes, optimizer_bytes: of its trainable parameters.
        saved_bytes: a sample's tensors, but no parameters, that autograd keeps until backward.
        output_bytes: a sample's output.
        copy_bytes: parameters in another dtype, that autograd keeps for each micro-batch.
        untouched_bytes: of the gradient's, those that replicas need not sum.
        spread: quartiles of its measured times, as shares of the medians, which the times are.
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

    @property
    def backward_s(self) -> tuple[float, ...]:
        return tuple(map(add, self.input_backward_s, self.weight_backward_s))

    def with_times(self, change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> SublayerCost:
        """Return a cost with each kind of its times changed."""
        times: dict[str, Any] = {name: change(getattr(self, name)) for name in _TIMES}
        return replace(self, **times)


_TIMES = ("forward_s", "input_backward_s", "weight_backward_s", "frozen_s")


@dataclass(frozen=True)
class Profile:
    """State what a training step is made of.

    Args:
        batch_sizes: measured micro-batch sizes, ascending.
        sublayers: bottom first.
        read_s: reading a sample of the dataset, beside what a step costs at any size.
        step_overhead_s: a step's time outside of all else here.
        link: a message between neighbouring stages on one node.
        node_link: a message between neighbouring stages on two nodes.
        all_reduce: sums over replicas: one measured entry for each number of them, or what any
            ring costs where links are described.
        fetch_s: fetching a step's samples, whatever their number.
        cached_fetch_s: likewise, where the frozen layers' activations are read in their stead.
        idle_node_share: what computing takes while other slots are idle, as a share of what the
            times here say, which are those of slots that all compute and wait for the slowest.
        uncertainty: standard error of the times, as a share of them.
        slowness: how many times longer than the fastest each rank computes; () for equal ranks.
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

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"a profile needs ascending micro-batch sizes from 1 on, got {sizes}")
        for cost in self.sublayers:
            if {len(getattr(cost, name)) for name in _TIMES} != {len(sizes)}:
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
        """Return the index of the first sublayer above so many frozen layers."""
        return sum(cost.layer < num_frozen for cost in self.sublayers)

    def prefix_s(self, num_frozen: int, num_samples: int, *, above: int = 0) -> float:
        """Return the seconds of so many samples through frozen layers above .. num_frozen - 1."""
        indices = range(self.first_active(above), self.first_active(num_frozen))
        return sum(self.frozen_s(index, num_samples) for index in indices)

    def prefix_bytes(self, num_frozen: int) -> float:
        """Return the bytes of a sample's activations behind so many frozen layers."""
        first = self.first_active(num_frozen)
        return self.sublayers[first - 1].output_bytes if first else 0.0

    def all_reduce_s(self, ring: Ring, num_bytes: float) -> float:
        """Return the seconds of a sum over a ring's ranks.

        Measured sums are told by their number of ranks. One that was not measured, as spares leave
        it, costs what the next larger one does.

        Raises:
            ValueError: no sum over so many replicas was measured.
        """
        num_replicas = ring.num_ranks
        if num_replicas == 1:
            return 0.0
        if isinstance(self.all_reduce, RingCost):
            return self.all_reduce.seconds(ring, num_bytes)
        measured = {cost.num_replicas: cost for cost in self.all_reduce}
        enough = [n for n in measured if n >= num_replicas]
        if not enough:
            raise ValueError(
                f"the profile has sums over {list(measured)} replicas, none over "
                f"{num_replicas}; profile the cluster that is planned for"
            )
        return measured[min(enough)].at(num_bytes)

    def lengthened(self, factor: float) -> Profile:
        """Return a profile whose computing takes longer by a factor."""
        longer = self._with_times(partial(_scaled, factor))
        return replace(longer, optimizer_s_per_byte=factor * self.optimizer_s_per_byte)

    def quartiles(self) -> tuple[Profile, Profile]:
        """Return what computing, messages and sums cost at their lower and upper quartiles."""
        return self._at_quartile(0), self._at_quartile(1)

    def _at_quartile(self, which: int) -> Profile:
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
        """Return a profile whose times lie on a line over the sizes, a sublayer and kind."""
        return self._with_times(partial(fitted, self.batch_sizes))

    def _with_times(self, change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> Profile:
        """Return a profile with each kind of each sublayer's times changed."""
        return replace(self, sublayers=tuple(cost.with_times(change) for cost in self.sublayers))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Profile:
        rebuilt = {
            "batch_sizes": tuple(values["batch_sizes"]),
            "sublayers": tuple(SublayerCost(**with_tuples(one)) for one in values["sublayers"]),
            "link": LinkCost(**with_tuples(values["link"])),
            "node_link": LinkCost(**with_tuples(values["node_link"])),
            "all_reduce": _rebuilt_sums(values["all_reduce"]),
        }
        return Profile(**{**with_tuples(values), **rebuilt})


def _rebuilt_sums(
    values: Mapping[str, Any] | Sequence[Mapping[str, Any]],
) -> tuple[AllReduceCost, ...] | RingCost:
    """Rebuild measured sums from their list, or described links from their two entries."""
    if isinstance(values, Mapping):
        return RingCost(**{name: LinkCost(**with_tuples(link)) for name, link in values.items()})
    return tuple(AllReduceCost(**with_tuples(one)) for one in values)


def _scaled(factor: float, seconds: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(factor * one for one in seconds)


def with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Undo that JSON turns tuples into lists."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}


def merge(profiles: Sequence[Profile]) -> Profile:
    """Combine the ranks' profiles of one model: the median of every measurement.

    Raises:
        ValueError: they describe different models or sizes.
    """
    return Profile.from_json(_median([profile.to_json() for profile in profiles]))


def _median(values: Sequence[Any]) -> Any:
    first = values[0]
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
    """Interpolate; outside follow the outer segment, or the origin where one size was measured.

    Outside, noise must not make more samples cheaper, or fewer cheaper than in proportion.
    """
    if len(sizes) == 1:
        return seconds[0] * batch / sizes[0]
    right = next((n for n in range(1, len(sizes)) if batch <= sizes[n]), len(sizes) - 1)
    (x0, x1), (y0, y1) = sizes[right - 1 : right + 1], seconds[right - 1 : right + 1]
    value = y0 + (y1 - y0) * (batch - x0) / (x1 - x0)
    if batch < x0:
        return min(max(value, y0 * batch / x0), y0)
    return max(value, y1) if batch > x1 else value


@dataclass(frozen=True)
class MeasuredChain:
    """Hold what measuring a chain of sublayers gave, bottom first; times are medians of rounds.

    `rounds_s` has a row a batch: in each round the sum of all the sublayers' times.
    """

    costs: tuple[SublayerCost, ...]
    rounds_s: tuple[tuple[float, ...], ...]


def profile_sublayers(
    sublayers: Sequence[ProfiledSublayer],
    batches: Sequence[Mapping[str, Tensor]],
    *,
    repeats: int = 3,
) -> MeasuredChain:
    """Measure every sublayer on its real input; the modules are left as they were.

    Sizes take turns, so that a disturbed moment spoils one round, which the median drops. Measure
    before anything is frozen: a frozen parameter has no backward. How a backward divides between
    input and weights is measured at the middle size. Optimizer state is left at 0 bytes.

    Args:
        sublayers: bottom first; each one's output is the next one's input.
        batches: one a micro-batch size, on the device to measure; (B, ...) tensors.
        repeats: measured rounds, after one to warm up.
    Raises:
        TypeError: a sublayer returns something else than one tensor.
    """
    middle = batches[len(batches) // 2]
    with left_as_found([one.module for one in sublayers], device_of(middle)) as modules:
        sizes = chain_bytes(sublayers, batches[-1])
        rounds = _time_rounds(sublayers, modules, batches, repeats)
        shares = input_backward_shares(sublayers, modules, middle, rounds=min(repeats, 2))
    # By size, kind (forward, backward, frozen) and sublayer.
    medians_s = np.median(rounds, axis=0)
    spreads = _spreads(np.sum(rounds, axis=2))
    costs = []
    for index, sublayer in enumerate(sublayers):
        forward_s, backward_s, frozen_s = map(tuple, medians_s[:, :, index].T.tolist())
        input_s = tuple(shares[index] * seconds for seconds in backward_s)
        times = forward_s, input_s, tuple(map(sub, backward_s, input_s)), frozen_s
        costs.append(
            SublayerCost(
                sublayer.name,
                sublayer.layer,
                *times,
                optimizer_bytes=0,
                **sizes[index],
                spread=spreads[index],
            )
        )
    return MeasuredChain(tuple(costs), _totals(rounds))


def _spreads(rounds_s: np.ndarray[Any, Any]) -> list[tuple[float, float]]:
    """Return every sublayer's quartiles, means over the sizes; times are by round and size."""
    by_size = [[quartiles(repeats) for repeats in each.T] for each in np.moveaxis(rounds_s, 1, 0)]
    return [(low, high) for low, high in np.mean(by_size, axis=0).tolist()]


def join_chains(chains: Sequence[MeasuredChain]) -> MeasuredChain:
    """Put together what measuring the parts of a chain gave, bottom first, of equal rounds."""
    parts = [chain.rounds_s for chain in chains]
    return MeasuredChain(
        tuple(cost for chain in chains for cost in chain.costs),
        tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*parts, strict=True)),
    )


def join_sizes(chains: Sequence[MeasuredChain]) -> MeasuredChain:
    """Put together what measuring one chain at different sizes gave, smaller sizes first.

    Bytes are those of the last.
    """
    costs = []
    for same in zip(*(chain.costs for chain in chains), strict=True):
        times: dict[str, Any] = {
            name: tuple(second for cost in same for second in getattr(cost, name))
            for name in _TIMES
        }
        low, high = np.mean([cost.spread for cost in same], axis=0).tolist()
        costs.append(replace(same[-1], **times, spread=(low, high)))
    return MeasuredChain(tuple(costs), tuple(row for chain in chains for row in chain.rounds_s))


def time_rounds(
    sublayers: Sequence[ProfiledSublayer], batches: Sequence[Mapping[str, Tensor]], *, repeats: int
) -> tuple[tuple[float, ...], ...]:
    """Time the chain alone, as `MeasuredChain.rounds_s`; the modules are left as they were."""
    with left_as_found([one.module for one in sublayers], device_of(batches[-1])) as modules:
        return _totals(_time_rounds(sublayers, modules, batches, repeats))


def _time_rounds(
    sublayers: Sequence[ProfiledSublayer],
    modules: nn.ModuleList,
    batches: Sequence[Mapping[str, Tensor]],
    repeats: int,
) -> list[list[list[list[float]]]]:
    """Time every batch in every round, as `time_chain` does, after a round to warm up."""
    return [
        [time_chain(sublayers, modules, batch) for batch in batches] for _ in range(repeats + 1)
    ][1:]


def _totals(rounds: list[list[list[list[float]]]]) -> tuple[tuple[float, ...], ...]:
    return tuple(
        tuple(sum(map(sum, chain)) for chain in chains) for chains in zip(*rounds, strict=True)
    )
