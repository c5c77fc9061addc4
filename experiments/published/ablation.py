"""Simulate the published ablation, and say by how much the prediction differs.

Run it as `python -m experiments.published.ablation`; the last line is JSON. It takes seconds on
any CPU: nothing is trained. `experiments/results/ablation` says why figures differ, and
`experiments.ablation simulate` what our planner does on the same machines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from autopipe.plan import best_first
from experiments.ablation.parts import ALL
from experiments.published.runs import (
    ABLATION,
    BASELINE,
    Epoch,
    PublishedSystem,
    published_system,
    total_s,
)
from experiments.published.setting import (
    BATCH,
    CLUSTER,
    SPEED_UPS,
    THROUGHPUTS,
    published_profile,
)


def speed_ups(system: PublishedSystem) -> dict[str, float]:
    """Return the ablation's speed-ups over no freezing."""
    baseline_s = total_s(system.run(BASELINE))
    return {name: baseline_s / total_s(system.run(parts)) for name, parts in ABLATION.items()}


def variants(system: PublishedSystem) -> dict[str, dict[str, float]]:
    """Return the ablation under other readings of what was published."""
    row_bytes = system.profile.sublayers[0].output_bytes
    return {
        "lambda = 1/6 (longer K)": speed_ups(replace(system, frozen_cost=1 / 6)),
        "a process a device (no lock)": speed_ups(published_system(system.profile, host_s=0.0)),
        "cache read at the rate of PCIe": speed_ups(
            replace(system, cache_read_s=row_bytes / CLUSTER.link.bytes_per_s)
        ),
    }


def main() -> None:
    """Print tables and, last, one JSON line."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    system = published_system(published_profile())
    predicted, others = speed_ups(system), variants(system)
    print(_throughputs(system))
    print(_ablation(predicted, others))
    print(_epochs(system.run(ABLATION[ALL])))
    print(json.dumps(_summary(predicted, others)))


def _throughputs(system: PublishedSystem) -> str:
    rates = ", ".join(f"{rate}" for rate in THROUGHPUTS.values())
    return (
        f"{CLUSTER.name}, ViT-B/16, 224 px, float32, batch {BATCH} a pipeline; modelled\n"
        f"{_table_text(system.tables)}\npublished at K = 8: {rates}\n"
    )


def _ablation(predicted: Mapping[str, float], others: Mapping[str, Mapping[str, float]]) -> str:
    rows = [f"{'speed-up over no freezing':36}{'predicted':>10}{'published':>10}{'ratio':>8}"]
    rows.append(f"{'no freezing (GPipe + DDP, K = 8)':36}{1:10.2f}{1:10.2f}{1:8.2f}")
    rows += [
        f"{name:36}{predicted[name]:10.2f}{published:10.2f}{predicted[name] / published:8.2f}"
        for name, published in SPEED_UPS.items()
    ]
    rows += ["", f"{'read otherwise':36}" + "".join(f"{name:>24}" for name in SPEED_UPS)]
    rows += [
        f"{name:36}" + "".join(f"{found[part]:24.2f}" for part in SPEED_UPS)
        for name, found in others.items()
    ]
    return "\n".join(rows) + "\n"


def _epochs(epochs: list[Epoch]) -> str:
    rows = ["all four, by epoch: frozen  K  R   M  frozen part (s)  step (s)  samples/s  minutes"]
    rows += [
        f"{number:18}{epoch.num_frozen:8}{epoch.length:3}{epoch.replicas:3}"
        f"{epoch.num_micro_batches:4}{epoch.prefix_s:17.2f}{epoch.step_s:10.2f}"
        f"{BATCH * epoch.replicas / epoch.step_s:11.0f}{epoch.seconds / 60:9.1f}"
        for number, epoch in enumerate(epochs)
    ]
    return "\n".join(rows) + "\n"


def _summary(
    predicted: Mapping[str, float], others: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Return what the last line says."""
    return {
        "benchmark": "published_ablation",
        "predicted": predicted,
        "published": SPEED_UPS,
        "ratio": {name: predicted[name] / SPEED_UPS[name] for name in SPEED_UPS},
        "ranked_as_published": ranked_as_published(predicted),
        "read_otherwise": others,
        "read_otherwise_ranked": {name: ranked_as_published(one) for name, one in others.items()},
    }


def ranked_as_published(found: Mapping[str, float]) -> bool:
    """Return whether speed-ups ascend in the published order."""
    ascending = [found[name] for name in sorted(SPEED_UPS, key=lambda name: SPEED_UPS[name])]
    return all(a < b for a, b in pairwise(ascending))


def _table_text(tables: Mapping[int, Mapping[int, float]]) -> str:
    """Return throughput tables as text, one row per K; the best M has a star."""
    rows = []
    for length, table in tables.items():
        best = best_first(table)[0]
        cells = [f"{f'{rate:.4g}' + '*' * (m == best):>8}" for m, rate in table.items()]
        rows.append(f"K = {length:<3} M = {', '.join(map(str, table)):<28}{''.join(cells)}")
    return "\n".join(["samples/s by pipeline length K and micro-batches M, simulated", *rows])


if __name__ == "__main__":
    main()
