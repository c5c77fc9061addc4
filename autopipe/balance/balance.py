"""Choose how many layers each partition of a pipeline gets, by measuring the layers."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.utils._pytree import tree_map

from autopipe.balance.layer_costs import Tensors, are_tensors, layer_bytes, layer_seconds, members
from autopipe.partition import best_split, greedy_partition

ALGORITHMS = ("exact", "greedy", "block")


def balance_by_time(  # noqa: PLR0913 - the documented interface
    partitions: int,
    module: nn.Sequential,
    sample: Tensors,
    *,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
    algorithm: str = "exact",
    memory_limit_bytes: int | Sequence[int] | None = None,
) -> list[int]:
    """Balance partitions by the time that their layers' forward and backward take.

    The module is measured in train mode and left as it was.

    Args:
        partitions: number of partitions, from 1 to the number of layers.
        module: its layers take and return a tensor or a tuple of tensors; they may stash and pop
            skips.
        sample: input of any batch size.
        timeout: seconds; passes over the layers repeat until they are over, once at least.
        device: where module and sample must be; None for any device.
        algorithm: "exact" makes the dearest partition as cheap as possible; "block" makes
            partitions differ by at most the dearest layer; "greedy" is PipeTransformer's
            Algorithm 1, which depends on the unit (here seconds) and may fail.
        memory_limit_bytes: most bytes of a partition, one number for all or one for each, counted
            by `balance_by_size` with its defaults; only for "exact".
    Returns:
        number of layers in each partition, for `GPipe`.
    Raises:
        TypeError: the module is no nn.Sequential, or an input or output is neither a tensor nor a
            tuple of tensors.
        ValueError: module, sample and device do not agree; an argument is out of range; no split
            fits the limits; or "greedy" leaves a partition empty.
    Source: torchgpipe's documentation, 2.3.4. Its default device is CUDA, its algorithm "block".
    """
    limits = _check_choice(partitions, module, algorithm, memory_limit_bytes)
    _check_placement(module, sample, device)
    # 2: parameters and gradients.
    sizes = layer_bytes(module, sample, param_scale=2.0) if limits else []
    seconds = layer_seconds(module, sample, timeout_s=timeout)
    return _split(seconds, partitions, algorithm, sizes=sizes, limits=limits)


def balance_by_size(  # noqa: PLR0913
    partitions: int,
    module: nn.Sequential,
    input: Tensors,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | None = None,
    algorithm: str = "exact",
    memory_limit_bytes: int | Sequence[int] | None = None,
) -> list[int]:
    """Balance partitions by the memory that their layers need in training.

    A layer needs what one micro-batch keeps until its backward, plus `param_scale` times its
    parameters: the parameters, their gradients, and the optimizer's state.

        optimizer   param_scale   state per parameter
        SGD         2 or 3        none; momentum_buffer with momentum
        Adam        4 or 5        exp_avg, exp_avg_sq; max_exp_avg_sq with amsgrad
        Adadelta    4             square_avg, acc_delta
        Adagrad     3             sum
        RMSprop     3 to 5        square_avg; momentum_buffer with momentum; grad_avg if centered

    Args:
        partitions, module, device, algorithm: as for `balance_by_time`; the unit of "greedy" is a
            million bytes.
        input: mini-batch of the size to train with; (B, ...) tensors.
        chunks: number of micro-batches to train with; the largest has ceil(B / chunks) samples.
        param_scale: tensors in memory per parameter, itself included.
        memory_limit_bytes: most bytes of a partition, as counted here; only for "exact".
    Returns, Raises, Source: as for `balance_by_time`.
    """
    limits = _check_choice(partitions, module, algorithm, memory_limit_bytes)
    _check_placement(module, input, device)
    if not 0 <= param_scale < math.inf:
        raise ValueError(
            f"param_scale must be at least 0, got {param_scale}; 2 counts parameters and gradients"
        )
    sizes = layer_bytes(module, _micro_batch(input, chunks), param_scale=param_scale)
    # "greedy" depends on the unit: in bytes, its variance would swamp the mean.
    millions = [size / 1e6 for size in sizes]
    return _split(millions, partitions, algorithm, sizes=sizes, limits=limits)


def _check_choice(
    partitions: int,
    module: nn.Sequential,
    algorithm: str,
    memory_limit_bytes: int | Sequence[int] | None,
) -> list[int]:
    """Check what needs no sample; return one limit a partition, if any."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be nn.Sequential to be partitioned, got a {type(module).__name__}"
        )
    if not 1 <= partitions <= len(module):
        raise ValueError(
            f"{len(module)} layers cannot fill {partitions} partitions; choose from "
            f"1 to {len(module)} partitions"
        )
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    if memory_limit_bytes is None:
        return []
    if algorithm != "exact":
        raise ValueError(
            f"memory_limit_bytes needs algorithm 'exact', got {algorithm!r}, which ignores memory"
        )
    limits = (
        list(memory_limit_bytes)
        if isinstance(memory_limit_bytes, Sequence)
        else [memory_limit_bytes] * partitions
    )
    if len(limits) != partitions or not all(limit > 0 for limit in limits):
        raise ValueError(
            f"memory_limit_bytes must be one positive number, or one for each of the "
            f"{partitions} partitions, got {memory_limit_bytes}"
        )
    return limits


def _check_placement(
    module: nn.Sequential, sample: Tensors, device: torch.device | str | None
) -> None:
    if not are_tensors(sample):
        raise TypeError(
            f"the sample must be a tensor or a tuple of tensors, got a {type(sample).__name__}"
        )
    placed = (*members(sample), *module.parameters(), *module.buffers())
    devices = {tensor.device for tensor in placed}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"module and sample must be on one device, got {names}; move them")
    found = devices.pop()
    if found.type == "meta":
        raise ValueError("nothing can be measured on the meta device; move module and sample")
    if device is None:
        return
    wanted = torch.device(device)
    # A device without an index, such as "cuda", stands for any one of its type.
    indices = {wanted.index, found.index} - {None}
    if wanted.type != found.type or len(indices) > 1:
        raise ValueError(
            f"module and sample are on {found}, but device is {wanted}; move them there, or "
            f"leave device out"
        )


def _micro_batch(batch: Tensors, chunks: int) -> Tensors:
    if any(tensor.dim() == 0 for tensor in members(batch)):
        raise ValueError(
            "a tensor without dimensions cannot be split into micro-batches; its "
            "first dimension must be the sample"
        )
    lengths = {len(tensor) for tensor in members(batch)}
    if len(lengths) > 1:
        found = ", ".join(map(str, sorted(lengths)))
        raise ValueError(f"the input's tensors must hold equally many samples, got {found}")
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    num_samples = math.ceil(lengths.pop() / chunks)
    return tree_map(lambda tensor: tensor[:num_samples], batch)


def _split(
    costs: Sequence[float],
    partitions: int,
    algorithm: str,
    *,
    sizes: Sequence[float],
    limits: Sequence[int],
) -> list[int]:
    costs_below, bytes_below = ([0.0, *accumulate(values)] for values in (costs, sizes))

    def part_cost(part: int, first: int, last: int) -> float:
        return costs_below[last] - costs_below[first]

    def fits(part: int, first: int, last: int) -> bool:
        return bytes_below[last] - bytes_below[first] <= limits[part]

    boundaries: tuple[int, ...] | None
    if algorithm == "block":
        boundaries = block_partition(costs, partitions)
    elif algorithm == "greedy":
        boundaries = greedy_partition(costs, partitions)
    else:
        feasible = fits if limits else None
        boundaries = best_split(len(costs), partitions, part_cost, feasible=feasible)
    if boundaries is None:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        raise ValueError(
            f"no split of {len(costs)} layers into {partitions} partitions keeps "
            f"within memory_limit_bytes {list(limits)}: the layers need "
            f"{sum(sizes):.0f} bytes together, layer {largest} alone "
            f"{sizes[largest]:.0f}; raise the limits or use more partitions"
        )
    balance = [last - first for first, last in pairwise(boundaries)]
    if 0 in balance:
        raise ValueError(
            f"algorithm 'greedy' leaves partition {balance.index(0)} empty, its "
            f"balance is {balance}; choose 'exact' or 'block', which fill all"
        )
    return balance


def block_partition(costs: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Split costs into parts, none of them empty, whose sums differ by at most the largest cost.

    No split has a larger smallest part. The largest part is at most twice the best split's.

    Legend: M is the largest cost; c is the largest smallest sum of any split into num_parts.

    1. From the right, start every part as late as its sum still reaches c: `latest`. No such part
       has a sum above c + M, as one unit less would not reach c.
    2. From the left, end every part as late as its sum stays within c + M, but no later than the
       next start in `latest`, so that the rest can still reach c.

    A part that ends at a start in `latest` is followed by parts of `latest`, within c + M by step
    1. If none does, all but the last ended before a unit that did not fit, so their sums exceed c.
    Then the last cannot exceed c + M, or all would exceed c, the largest smallest sum.

    Returns:
        num_parts + 1 boundaries.
    Source: Barany and Grinberg, Block partitions of sequences (2015), whose theorem this keeps.
    They move boundaries one by one; ours builds the parts in two passes, and fills them all.
    """
    # Exact sums, because float sums depend on their order and would break the guarantee.
    exact = [Fraction(cost) for cost in costs]
    total = [Fraction(0), *accumulate(exact)]
    smallest, latest = _largest_smallest_part(total, num_parts)
    boundaries = [0]
    for next_start in latest[1:]:
        limit = total[boundaries[-1]] + smallest + max(exact)
        boundaries.append(min(next_start, bisect_right(total, limit) - 1))
    return tuple(boundaries)


def _largest_smallest_part(
    total: list[Fraction], num_parts: int
) -> tuple[Fraction, tuple[int, ...]]:
    smallest = Fraction(0)
    # Each round asks for parts that all exceed the smallest so far, until no split has them.
    while (better := _latest_starts(total, num_parts, smallest, strict=True)) is not None:
        smallest = min(total[last] - total[first] for first, last in pairwise(better))
    latest = _latest_starts(total, num_parts, smallest, strict=False)
    assert latest is not None
    return smallest, latest


def _latest_starts(
    total: list[Fraction], num_parts: int, smallest: Fraction, *, strict: bool
) -> tuple[int, ...] | None:
    """Start every part as late as its sum reaches (strict: exceeds) `smallest`.

    The first part takes the rest; None if that is too little.
    """
    find = bisect_left if strict else bisect_right
    starts = [len(total) - 1]
    for part in reversed(range(num_parts)):
        # The -1 gives a part at least one unit, even if units cost nothing.
        start = min(find(total, total[starts[-1]] - smallest), starts[-1]) - 1
        if start < part:
            return None
        starts.append(start)
    return (0, *reversed(starts[:-1]))
