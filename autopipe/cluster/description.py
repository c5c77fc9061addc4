"""Model a profile for a cluster that a small TOML describes, without running on it.

docs/clusters/ has examples; docs/planning.md explains the keys. A kernel takes the longer of its
arithmetic and its memory traffic, plus a fixed overhead:

    seconds = max(FLOPs / flops_per_s, bytes / memory_bytes_per_s) + kernel_overhead_s

FLOPs and bytes of a kernel are linear in the samples, so that two counted batches give all sizes.

Source: the roofline model (Williams, Waterman and Patterson 2009), applied to each kernel.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopipe.cluster.kernel_counts import Kernel, SublayerKernels, count_bytes, count_kernels
from autopipe.profile import (
    MICRO_BATCH_S,
    LinkCost,
    Profile,
    ProfiledSublayer,
    RingCost,
    SublayerCost,
    unshared,
)

if sys.version_info >= (3, 11):
    import tomllib
else:  # The standard library reads TOML from Python 3.11 on.
    import tomli as tomllib

DTYPES = ("float32", "bfloat16", "float16")
_FINITE = sys.float_info.max
_BYTES = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}


@dataclass(frozen=True)
class Cluster:
    """State what a cluster of equal nodes can do, by the keys of its file.

    Numbers are per slot, which is a device or a share of one; only `node_link` is per node, and
    shared by its slots. `flops_per_s` is the rate achieved in large matrix products, by dtype.
    """

    name: str
    nodes: int
    slots_per_node: int
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    link: LinkCost
    node_link: LinkCost
    kernel_overhead_s: float = 0.0
    step_overhead_s: float = 0.0
    read_s: float = 0.0
    cache_bytes_per_s: float | None = None

    @property
    def num_slots(self) -> int:
        return self.nodes * self.slots_per_node

    def kernel_s(self, dtype: str, flops: float, num_bytes: float) -> float:
        arithmetic_s = flops / self.flops_per_s[dtype]
        return max(arithmetic_s, num_bytes / self.memory_bytes_per_s) + self.kernel_overhead_s


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster's TOML.

    Raises:
        ValueError: the file cannot be read or is no TOML; or a key is missing, unknown, or has a
            value that is not allowed.
    """
    try:
        values = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"the cluster's file cannot be read: {error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    allowed = (*(field.name for field in fields(Cluster)), "efficiency")
    table = _Table(str(path), values, allowed)
    nodes, slots = table.count("nodes"), table.count("slots_per_node")
    # A link that no message can use may be missing; if given, it is checked, too.
    unused = LinkCost(0.0, math.inf)
    link = table.link("link") if slots > 1 or "link" in values else unused
    return Cluster(
        name=table.take("name", "a text", lambda name: isinstance(name, str), Path(path).stem),
        nodes=nodes,
        slots_per_node=slots,
        memory_bytes=int(table.number("memory_bytes", least=1)),
        memory_bytes_per_s=table.rate("memory_bytes_per_s"),
        flops_per_s=table.flops_per_s(),
        link=link,
        node_link=table.link("node_link") if nodes > 1 or "node_link" in values else link,
        kernel_overhead_s=table.number("kernel_overhead_s", default=0.0),
        step_overhead_s=table.number("step_overhead_s", default=0.0),
        read_s=table.number("read_s", default=0.0),
        cache_bytes_per_s=table.rate("cache_bytes_per_s")
        if "cache_bytes_per_s" in values
        else None,
    )


@dataclass(frozen=True)
class _Table:
    """Take checked values out of a table; errors name the file and the key."""

    path: str
    values: Mapping[str, Any]
    allowed: Sequence[str]
    prefix: str = ""

    def __post_init__(self) -> None:
        unknown = [self.prefix + key for key in self.values if key not in self.allowed]
        if unknown:
            raise ValueError(
                f"{self.path} has unknown key(s) {', '.join(unknown)}; allowed are "
                f"{', '.join(self.prefix + key for key in self.allowed)}"
            )

    def take(
        self, key: str, wanted: str, is_right: Callable[[Any], bool], default: Any = None
    ) -> Any:
        """Return a value, or the default; without a default the key is required."""
        value = self.values.get(key, default)
        if value is None:
            raise ValueError(f"{self.path} lacks {self.prefix}{key}; give {wanted}")
        if not is_right(value):
            raise ValueError(f"{self.prefix}{key} in {self.path} is {value!r}; give {wanted}")
        return value

    def count(self, key: str) -> int:
        wanted = "a whole number, at least 1"
        # type(), because isinstance takes a boolean for a number.
        return int(self.take(key, wanted, lambda value: type(value) is int and value >= 1))

    def number(
        self, key: str, *, least: float = 0, most: float = _FINITE, default: float | None = None
    ) -> float:
        number: float = self.take(
            key,
            f"a number of at least {least:g}, without a unit, such as 16e9 or 8e-6",
            lambda value: type(value) in (int, float) and least <= value <= most,
            default,
        )
        return float(number)

    def rate(self, key: str) -> float:
        return self.number(key, least=1, most=math.inf)

    def flops_per_s(self) -> dict[str, float]:
        """Return the achieved rates by dtype: the peaks times the efficiency."""
        table = self._table("flops_per_s", DTYPES)
        if not table.values:
            raise ValueError(
                f"flops_per_s in {self.path} is empty; give at least one of {', '.join(DTYPES)}"
            )
        efficiency: float = self.take(
            "efficiency",
            "the share of the peaks of flops_per_s that is achieved, above 0 and at most 1",
            lambda value: type(value) in (int, float) and 0 < value <= 1,
            1.0,
        )
        return {dtype: efficiency * table.rate(dtype) for dtype in table.values}

    def link(self, key: str) -> LinkCost:
        table = self._table(key, ("latency_s", "bytes_per_s"))
        return LinkCost(table.number("latency_s"), table.rate("bytes_per_s"))

    def _table(self, key: str, allowed: Sequence[str]) -> _Table:
        wanted = f"a table [{key}] with keys out of {', '.join(allowed)}"
        values = self.take(key, wanted, lambda value: isinstance(value, dict))
        return _Table(self.path, values, allowed, f"{key}.")


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as "16 GiB" states; a ValueError if it is no size."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?) *([A-Za-z]*)", text)
    size = float(match[1]) * _BYTES.get(match[2], 0) if match else 0
    if not 1 <= size <= _FINITE:
        raise ValueError(
            f"{text!r} is no size; give bytes as a number, or with one of "
            f"{', '.join(filter(None, _BYTES))}, such as 16 GiB"
        )
    return int(size)


BATCH_SIZES = tuple(1 << exponent for exponent in range(11))
"""Micro-batch sizes of a modelled profile."""
# Not 1: a single sample may start other kernels, as its tensors are always contiguous.
_COUNTED = (2, 4)
_UPDATE_PASSES = 8
"""The gradient norm reads the gradient. A fused AdamW reads weight, gradient and two moments, and
writes all but the gradient."""
_ADAMW_MOMENTS, _ADAMW_STEP_BYTES = 2, 4
_KernelTime = Callable[[float, float], float]


def modelled_profile(
    sublayers: Sequence[ProfiledSublayer], sample: Mapping[str, Tensor], cluster: Cluster
) -> Profile:
    """Model the costs of a model's sublayers, and of the cluster's links.

    Args:
        sublayers: bottom first, on the meta device, in the dtype that they train in (by AdamW).
        sample: tensors of at least one sample; only shapes and dtypes count.
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
        cache_bytes_per_s=cluster.cache_bytes_per_s,
        micro_batch_s=MICRO_BATCH_S,
    )


def _dtype_of(sublayers: Sequence[ProfiledSublayer]) -> str:
    """Return the name of most parameters' dtype."""
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
    # Straight lines through the two counts; below them a line may fall under 0.
    steps = (size - _COUNTED[0]) / (_COUNTED[1] - _COUNTED[0])
    return sum(
        kernel_s(
            max(0.0, few.flops + steps * (more.flops - few.flops)),
            max(0.0, few.num_bytes + steps * (more.num_bytes - few.num_bytes)),
        )
        for few, more in zip(small, large, strict=True)
    )
