"""Name the parts of the system, and the rows of an ablation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Parts:
    """Say which parts of the system are on."""

    freeze: bool = True
    auto_pipe: bool = False
    auto_dp: bool = False
    auto_cache: bool = False


NOTHING_FROZEN, FREEZE_ONLY, ALL = "nothing frozen", "freeze only", "all four"
ABLATION: Mapping[str, Parts] = {
    NOTHING_FROZEN: Parts(freeze=False),
    FREEZE_ONLY: Parts(),
    "+ AutoPipe": Parts(auto_pipe=True),
    "+ AutoPipe + AutoCache": Parts(auto_pipe=True, auto_cache=True),
    "+ AutoPipe + AutoDP": Parts(auto_pipe=True, auto_dp=True),
    ALL: Parts(auto_pipe=True, auto_dp=True, auto_cache=True),
}
"""The published table's rows, and AutoPipe by itself. Without AutoPipe the pipeline keeps all
devices of a node; without AutoDP there are no more replicas than before, and devices idle."""


@dataclass(frozen=True)
class PartsRow:
    """Hold what came of a row, with one entry for each seed; what is simulated has one.

    Args:
        name: for the table.
        seconds: of training.
        grown: those where the batch grows with the replicas; () where the row was trained.
        metrics: at the end; () where nothing was trained.
        pipelines: K x R by epoch, of the first seed.
        rates: samples/s by epoch, of the first seed.
    """

    name: str
    seconds: tuple[float, ...]
    grown: tuple[float, ...]
    metrics: tuple[float, ...]
    pipelines: tuple[str, ...]
    rates: tuple[float, ...]


def product_of_parts(speed_ups: Mapping[str, float]) -> str:
    """Compare what all parts give with the product of what each gives, as rows stand there."""
    pipe, cache, dp = "+ AutoPipe", "+ AutoPipe + AutoCache", "+ AutoPipe + AutoDP"
    found = speed_ups
    gains = {
        "freezing": found[FREEZE_ONLY],
        "AutoPipe": found[pipe] / found[FREEZE_ONLY],
        "AutoCache": found[cache] / found[pipe],
        "AutoDP": found[dp] / found[pipe],
    }
    product = 1.0
    for gain in gains.values():
        product *= gain
    factors = " x ".join(f"{gain:.2f} ({name})" for name, gain in gains.items())
    return f"{factors} = {product:.2f}; all four together {found[ALL]:.2f}"


def runs_of_equals(values: Sequence[str]) -> str:
    """Write values by epoch, equal neighbours once: "2x1 1x2 (3)" for one and then three."""
    parts: list[tuple[str, int]] = []
    for value in values:
        if parts and parts[-1][0] == value:
            parts[-1] = (value, parts[-1][1] + 1)
        else:
            parts.append((value, 1))
    return " ".join(value if num == 1 else f"{value} ({num})" for value, num in parts)
