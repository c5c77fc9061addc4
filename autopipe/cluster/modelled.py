"""Model a profile for a described cluster, from FLOPs and bytes instead of a stopwatch.

A kernel takes the longer of its arithmetic and its memory traffic, plus a fixed overhead:

    seconds = max(FLOPs / flops_per_s, bytes / memory_bytes_per_s) + kernel_overhead_s

FLOPs and bytes of a kernel grow in proportion to the samples, beside a constant part (weights),
so that counting two batches gives every other.

Source: the roofline model (Williams, Waterman and Patterson 2009), here kernel by kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopipe.cluster.description import Cluster
from autopipe.cluster.kernel_counts import Kernel, SublayerKernels, count_bytes, count_kernels
from autopipe.profile import Profile, ProfiledSublayer, RingCost, SublayerCost, unshared

BATCH_SIZES = tuple(1 << exponent for exponent in range(11))
"""Micro-batch sizes of a modelled profile; between them its times are interpolated."""
# A single sample may take another path: its tensors are contiguous where others' are not.
_COUNTED = (2, 4)
_UPDATE_PASSES = 8
"""The norm reads the gradient; a fused AdamW reads weight, gradient and two moments, and writes
all but the gradient."""
_ADAMW_MOMENTS, _ADAMW_STEP_BYTES = 2, 4
_KernelTime = Callable[[float, float], float]


def modelled_profile(
    sublayers: Sequence[ProfiledSublayer], sample: Mapping[str, Tensor], cluster: Cluster
) -> Profile:
    """Model the costs of a model's sublayers, and of the cluster's links.

    Args:
        sublayers: bottom first, on the meta device, in the dtype that they train in.
        sample: tensors of at least one sample; only shapes and dtypes count.
        cluster: where it would train, by AdamW.
    Raises:
        ValueError: the cluster states no FLOP/s for the dtype, or the sublayers cannot be counted
            without data.
    """
    dtype = _dtype_of(sublayers)
    if dtype not in cluster.flops_per_s:
        raise ValueError(
            f"the cluster {cluster.name!r} states no flops_per_s.{dtype}, only "
            f"{', '.join(cluster.flops_per_s)}; add it, or choose another dtype"
        )
    small, large = (_batch(sample, size) for size in _COUNTED)
    counts = count_kernels(sublayers, small), count_kernels(sublayers, large)
    sizes = count_bytes(sublayers, large)
    parameters_of = unshared(sublayer.module.parameters() for sublayer in sublayers)
    for sublayer_bytes, parameters in zip(sizes, parameters_of, strict=True):
        sublayer_bytes["optimizer_bytes"] = sum(
            _ADAMW_MOMENTS * p.nbytes + _ADAMW_STEP_BYTES for p in parameters if p.requires_grad
        )
    kernel_s = partial(cluster.kernel_s, dtype)
    return Profile(
        batch_sizes=BATCH_SIZES,
        sublayers=tuple(
            _cost(sublayer, counts, kernel_s, sublayer_bytes)
            for sublayer, sublayer_bytes, *counts in zip(sublayers, sizes, *counts, strict=True)
        ),
        read_s=cluster.read_s,
        optimizer_s_per_byte=_UPDATE_PASSES / cluster.memory_bytes_per_s,
        step_overhead_s=cluster.step_overhead_s,
        link=cluster.link,
        node_link=cluster.node_link,
        all_reduce=RingCost(cluster.link, cluster.node_link),
    )


def _dtype_of(sublayers: Sequence[ProfiledSublayer]) -> str:
    """Return the dtype of most parameters, by its name."""
    sizes = Counter[torch.dtype]()
    for sublayer in sublayers:
        for parameter in sublayer.module.parameters():
            sizes[parameter.dtype] += parameter.numel()
    if not sizes:
        raise ValueError("the sublayers have no parameters; there is nothing to train")
    ((dtype, _),) = sizes.most_common(1)
    return str(dtype).removeprefix("torch.")


def _batch(sample: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    return {
        name: torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        for name, tensor in sample.items()
    }


def _cost(
    sublayer: ProfiledSublayer,
    counts: Sequence[SublayerKernels],
    kernel_s: _KernelTime,
    sizes: Mapping[str, Any],
) -> SublayerCost:
    times: dict[str, tuple[float, ...]] = {}
    for kind in ("forward", "input_backward", "backward", "frozen"):
        small, large = (getattr(count, kind) for count in counts)
        if len(small) != len(large):
            raise ValueError(
                f"the {kind} of sublayer {sublayer.name!r} starts {len(small)} kernels for "
                f"{_COUNTED[0]} samples and {len(large)} for {_COUNTED[1]}, so that other "
                "sizes cannot be told from these; measure it on a machine instead"
            )
        times[kind] = tuple(_seconds(small, large, size, kernel_s) for size in BATCH_SIZES)
    forward_s, input_s, backward_s, frozen_s = times.values()
    weight_s = tuple(max(0.0, b - i) for b, i in zip(backward_s, input_s, strict=True))
    return SublayerCost(
        sublayer.name, sublayer.layer, forward_s, input_s, weight_s, frozen_s, **sizes
    )


def _seconds(
    small: Sequence[Kernel], large: Sequence[Kernel], size: int, kernel_s: _KernelTime
) -> float:
    steps = (size - _COUNTED[0]) / (_COUNTED[1] - _COUNTED[0])
    return sum(
        kernel_s(
            max(0.0, few.flops + steps * (more.flops - few.flops)),
            max(0.0, few.num_bytes + steps * (more.num_bytes - few.num_bytes)),
        )
        for few, more in zip(small, large, strict=True)
    )
