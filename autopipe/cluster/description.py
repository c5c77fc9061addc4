"""Describe a cluster in a few numbers, read from a small TOML, so that it need not be at hand.

    nodes = 2
    slots_per_node = 8
    memory_bytes = "16 GB"              # of a slot
    memory_bytes_per_s = "448 GB/s"
    efficiency = 0.5                    # of the peaks below, reached by large matrix products
    kernel_overhead_s = "8 us"

    [flops_per_s]
    float32 = "11.2 TFLOP/s"

    [link]                              # between slots of a node
    latency_s = "10 us"
    bytes_per_s = "10 GB/s"

    [node_link]                         # between nodes; all of a node's slots share it
    latency_s = "20 us"
    bytes_per_s = "11 GB/s"

A number stands in the unit of its key's name; a text may give another one.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from autopipe.profile import AllReduceCost, LinkCost

if sys.version_info >= (3, 11):
    import tomllib
else:  # The standard library reads TOML from Python 3.11 on.
    import tomli as tomllib

_BYTES = {
    "B": 1.0,
    **{f"{letter}B": 1e3**power for power, letter in enumerate("kMGT", start=1)},
    **{f"{letter}iB": 1024.0**power for power, letter in enumerate("KMGT", start=1)},
}
_BITS = {f"{letter}bit": 1e3**power / 8 for power, letter in enumerate("MGT", start=2)}
_BYTE_RATES = {f"{unit}/s": size for unit, size in {**_BYTES, **_BITS}.items()}
_FLOP_RATES = {
    "FLOP/s": 1.0,
    **{f"{letter}FLOP/s": 1e3**power for power, letter in enumerate("MGTP", start=2)},
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}

_QUANTITY = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?) *(?P<unit>[A-Za-z/]+)")
_KEYS = (
    "name",
    "nodes",
    "slots_per_node",
    "memory_bytes",
    "memory_bytes_per_s",
    "flops_per_s",
    "efficiency",
    "link",
    "node_link",
    "kernel_overhead_s",
    "step_overhead_s",
    "read_s",
    "cache_bytes_per_s",
)
DTYPES = ("float32", "bfloat16", "float16")
_LARGEST_SUM_BYTES = 1 << 40


@dataclass(frozen=True)
class Cluster:
    """State what a cluster of equal nodes can do.

    Args:
        name: for people.
        nodes, slots_per_node: a slot is a device, or a share of one.
        memory_bytes: of a slot.
        memory_bytes_per_s: at which a slot reads and writes its memory.
        flops_per_s: achieved by a slot in large matrix products, by dtype.
        link: from a slot to another one of its node.
        node_link: from a node to another; its slots share the rate.
        kernel_overhead_s: what every kernel takes besides its arithmetic and its memory.
        step_overhead_s: a step's time outside of all else.
        read_s: what a slot takes to read a sample of the dataset.
        cache_bytes_per_s: at which a slot reads cached activations; None where not said.
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
        """Return the slots of all nodes."""
        return self.nodes * self.slots_per_node

    def all_reduce_costs(self) -> tuple[AllReduceCost, ...]:
        """Return the cost of a sum for every number of replicas that divides the slots."""
        counts = (n for n in range(2, self.num_slots + 1) if self.num_slots % n == 0)
        return tuple(self._all_reduce(count) for count in counts)

    def _all_reduce(self, num_replicas: int) -> AllReduceCost:
        """Price a ring in which each of R ranks sends 2 (R - 1) messages of 1 / R of the bytes.

        Pipelines are consecutive ranks, so with several nodes every ring leaves its node. The
        stages of a pipeline sum at the same time: as many rings as a node has stages share its
        link. A ring is as slow as its slowest edge.
        """
        latency_s, bytes_per_s = self.link.latency_s, self.link.bytes_per_s
        if self.nodes > 1:
            num_rings = min(self.num_slots // num_replicas, self.slots_per_node)
            latency_s = max(latency_s, self.node_link.latency_s)
            bytes_per_s = min(bytes_per_s, self.node_link.bytes_per_s / num_rings)
        edge, sizes = LinkCost(latency_s, bytes_per_s), (1, _LARGEST_SUM_BYTES)
        return AllReduceCost(
            num_replicas,
            sizes,
            tuple(2 * (num_replicas - 1) * edge.seconds(size / num_replicas) for size in sizes),
        )


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster's TOML; the module's docstring shows one.

    Raises:
        ValueError: the file cannot be read, is no TOML, lacks a key, has an unknown one, or gives
            a value of another kind or unit.
    """
    try:
        values = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"the cluster's file cannot be read: {error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    table = _Table(str(path), "", values)
    table.check_keys(_KEYS)
    nodes, slots = table.count("nodes"), table.count("slots_per_node")
    link = table.link("link") if slots > 1 else LinkCost(0.0, math.inf)
    has_cache = "cache_bytes_per_s" in values
    return Cluster(
        name=table.text("name", default=Path(path).stem),
        nodes=nodes,
        slots_per_node=slots,
        memory_bytes=int(table.quantity("memory_bytes", _BYTES, finite=True)),
        memory_bytes_per_s=table.quantity("memory_bytes_per_s", _BYTE_RATES),
        flops_per_s=table.flops_per_s(),
        link=link,
        node_link=table.link("node_link") if nodes > 1 else link,
        kernel_overhead_s=table.seconds("kernel_overhead_s", default=0.0),
        step_overhead_s=table.seconds("step_overhead_s", default=0.0),
        read_s=table.seconds("read_s", default=0.0),
        cache_bytes_per_s=table.quantity("cache_bytes_per_s", _BYTE_RATES) if has_cache else None,
    )


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as "16 GiB" or "65536" states.

    Raises:
        ValueError: it states none.
    """
    size = _size(f"{text} B" if text.isdigit() else text, _BYTES)
    if size is None or size < 1:
        raise ValueError(
            f"{text!r} is no size; give bytes as a number, or with one of "
            f"{', '.join(_BYTES)}, such as 16 GiB"
        )
    return int(size)


def _size(given: object, units: Mapping[str, float]) -> float | None:
    """Return a number in the first unit, given in it or as a text; None where it is neither."""
    if isinstance(given, str):
        match = _QUANTITY.fullmatch(given)
        if match is None or match["unit"] not in units:
            return None
        return float(match["number"]) * units[match["unit"]]
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        return None
    return float(given)


class _Table:
    """Take checked values out of a table, naming file and key where they are wrong."""

    def __init__(self, path: str, prefix: str, values: Mapping[str, Any]) -> None:
        self._path, self._prefix, self._values = path, prefix, values

    def check_keys(self, allowed: Sequence[str]) -> None:
        """Refuse a key that is not allowed."""
        unknown = [self._prefix + key for key in self._values if key not in allowed]
        if unknown:
            raise ValueError(
                f"{self._path} has unknown key(s) {', '.join(unknown)}; allowed are "
                f"{', '.join(self._prefix + key for key in allowed)}"
            )

    def count(self, key: str) -> int:
        """Return a whole number from 1 on."""
        value = self._required(key, "a whole number, at least 1")
        if type(value) is not int or value < 1:
            self._refuse(key, value, "a whole number, at least 1")
        return value

    def text(self, key: str, *, default: str) -> str:
        """Return a text."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            self._refuse(key, value, "a text")
        return value

    def seconds(self, key: str, *, default: float | None = None) -> float:
        """Return a finite time, at least 0."""
        return self.quantity(key, _SECONDS, default=default, least=0.0, finite=True)

    def quantity(
        self,
        key: str,
        units: Mapping[str, float],
        *,
        default: float | None = None,
        least: float = 1.0,
        finite: bool = False,
    ) -> float:
        """Return a number in the first unit, given in it or as a text with any of the units."""
        wanted = (
            f"a number of {next(iter(units))} from {least:g} on, or a text such as "
            f'"4 {list(units)[-1]}" with one of {", ".join(units)}'
        )
        given = self._values.get(key, default)
        if given is None:
            given = self._required(key, wanted)
        size = _size(given, units)
        if size is None or not size >= least or (finite and size == math.inf):
            self._refuse(key, given, wanted)
        return size

    def flops_per_s(self) -> dict[str, float]:
        """Return the achieved rates by dtype: the peaks times the efficiency."""
        table = self._table("flops_per_s", DTYPES)
        if not table._values:
            raise ValueError(
                f"flops_per_s in {self._path} is empty; give at least one of {', '.join(DTYPES)}"
            )
        efficiency = self._values.get("efficiency", 1.0)
        number = isinstance(efficiency, (int, float)) and not isinstance(efficiency, bool)
        if not number or not 0 < efficiency <= 1:
            self._refuse(
                "efficiency",
                efficiency,
                "the share of the peaks of flops_per_s that is achieved, above 0 and at most 1",
            )
        return {dtype: efficiency * table.quantity(dtype, _FLOP_RATES) for dtype in table._values}

    def link(self, key: str) -> LinkCost:
        """Return a link from a table of its own."""
        table = self._table(key, ("latency_s", "bytes_per_s"))
        return LinkCost(table.seconds("latency_s"), table.quantity("bytes_per_s", _BYTE_RATES))

    def _table(self, key: str, allowed: Sequence[str]) -> _Table:
        wanted = f"a table [{key}] with keys out of {', '.join(allowed)}"
        value = self._required(key, wanted)
        if not isinstance(value, dict):
            self._refuse(key, value, wanted)
        table = _Table(self._path, f"{key}.", value)
        table.check_keys(allowed)
        return table

    def _required(self, key: str, wanted: str) -> Any:
        if key not in self._values:
            raise ValueError(f"{self._path} lacks {self._prefix}{key}; give {wanted}")
        return self._values[key]

    def _refuse(self, key: str, value: object, wanted: str) -> NoReturn:
        raise ValueError(f"{self._prefix}{key} in {self._path} is {value!r}; give {wanted}")
