"""Make profiles for tests of planning, from costs that are easy to add up by hand."""

from __future__ import annotations

import math
from typing import Any

from autopipe.plan.request import PlanRequest
from autopipe.profile.network import AllReduceCost, LinkCost
from autopipe.profile.profile import Profile, SublayerCost

FREE = LinkCost(0.0, math.inf)


def sums(latency_s: float = 0.0, bytes_per_s: float = math.inf) -> tuple[AllReduceCost, ...]:
    """Cost rings of 2..64 replicas: each rank passes on 2 (R - 1) / R times the bytes."""
    sizes = (1 << 10, 1 << 20)
    return tuple(
        AllReduceCost(
            replicas,
            (0, *sizes),
            tuple(
                latency_s + 2 * (replicas - 1) / replicas * size / bytes_per_s
                for size in (0, *sizes)
            ),
        )
        for replicas in range(2, 65)
    )


def sublayer(layer: int, *, forward_s: float = 1.0, **changes: Any) -> SublayerCost:
    """Cost 1 s forward, 2 s backward and 1/2 s frozen a sample; 100 parameter bytes, AdamW's."""
    size = changes.get("parameter_bytes", 100)
    values = {
        "parameter_bytes": size,
        "gradient_bytes": size,
        "optimizer_bytes": 2 * size,
        "buffer_bytes": 0,
        "saved_bytes": 10.0,
        "output_bytes": 0.0,
    }
    return SublayerCost(
        f"layer{layer}",
        layer,
        (forward_s,),
        (forward_s,),
        (forward_s,),
        (forward_s / 2,),
        **{**values, **changes},
    )


def profile(*sublayers: SublayerCost, **changes: Any) -> Profile:
    values = {
        "read_s": 0.0,
        "optimizer_s_per_byte": 0.0,
        "step_overhead_s": 0.0,
        "link": FREE,
        "node_link": FREE,
        "all_reduce": sums(),
    }
    return Profile((1,), sublayers, **{**values, **changes})


def uniform(num_layers: int, **changes: Any) -> Profile:
    """Make every layer one sublayer, the head the last of them."""
    return profile(*map(sublayer, range(num_layers)), **changes)


def request(num_ranks: int = 2, **changes: Any) -> PlanRequest:
    values = {"slots_per_node": 8, "global_batch": 16, "num_frozen": 0}
    return PlanRequest(num_ranks, **{**values, **changes})
