"""End a benchmark: one JSON line, and whether the figures are what they must be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from experiments.benchmarks.measuring.rounds import num_cores


@dataclass(frozen=True)
class Bars:
    """Hold the least and the most that figures may be, by their names."""

    least: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)

    def missed_by(self, found: Mapping[str, Any]) -> list[str]:
        """Name the figures that are too low, or too high."""
        low = [name for name, least in self.least.items() if found[name] < least]
        return low + [name for name, most in self.most.items() if found[name] > most]


def conclude(found: Mapping[str, Any], bars: Bars) -> int:
    """Print the JSON line; return the exit status, 1 where a bar is missed."""
    missed = bars.missed_by(found)
    where = {"torch": torch.__version__, "cores": num_cores()}
    print(json.dumps({**found, "least": bars.least, "most": bars.most, "missed": missed, **where}))
    return 1 if missed else 0
