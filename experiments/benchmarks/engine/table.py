"""Print comparisons as a table, hold them against their bars, and write them as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.benchmarks.measuring.bars import Bars
from experiments.benchmarks.measuring.rounds import Comparison

BARS = Bars(
    least={
        "vs_torchgpipe": 1.5,
        "vs_torchgpipe_checkpoint": 1.3,
        "vs_torch_pipelining": 0.98,
        "of_bubble_bound": 0.92,
    },
    most={"k1_overhead": 1.02},
)
KEYS = (*BARS.least, *BARS.most, "peak_memory_ratio_1f1b_vs_gpipe")


def print_head() -> None:
    """Print the names of the columns."""
    print(
        f"  {'key':36} {'what':58} ours ms  theirs   ratio  95 % interval  pairs  "
        "(speed-up of the copies')"
    )


def verdict(comparison: Comparison) -> str:
    """Hold a comparison against its bar, which it misses only with the whole interval."""
    name, ratio = comparison.key[0] if comparison.key else "", comparison.ratio
    if (least := BARS.least.get(name)) is not None:
        return f"{'MISSES' if ratio.high < least else 'meets'} >= {least}"
    if (most := BARS.most.get(name)) is not None:
        return f"{'MISSES' if ratio.low > most else 'meets'} <= {most}"
    return ""


def print_row(comparison: Comparison, *, judged: bool) -> None:
    """Print a line of the table."""
    ratio, facts = comparison.ratio, comparison.facts or {}
    seconds = [
        "       " if value is None else f"{value * 1e3:7.0f}"
        for value in (comparison.ours_s, comparison.theirs_s)
    ]
    copies = f"({facts['speed_up']:.2f} of {facts['copies']:.2f})" if "copies" in facts else ""
    name = " ".join(comparison.key)
    print(
        f"  {name:36} {comparison.what:58} {' '.join(seconds)}  {ratio.median:6.3f}  "
        f"{ratio.low:.3f} to {ratio.high:.3f} {comparison.num_pairs:3}  {copies} "
        f"{verdict(comparison) if judged else ''}".rstrip(),
        flush=True,
    )


def as_json(comparisons: Sequence[Comparison]) -> dict[str, object]:
    """Nest the comparisons under their keys; one that was not measured is null."""
    line: dict[str, object] = dict.fromkeys(KEYS)
    for comparison in comparisons:
        place: dict[str, object] = line
        for name in comparison.key[:-1]:
            inner = place.get(name)
            if not isinstance(inner, dict):
                inner = place[name] = {}
            place = inner
        if comparison.key:
            place[comparison.key[-1]] = comparison.as_json()
    return line | {"others": [{"what": c.what, **c.as_json()} for c in comparisons if not c.key]}
