"""Say at a run's end what freezing and caching came to, where that is not plain from progress."""

from __future__ import annotations

from freeze import FreezeContext
from pipetransformer.report.decision_records import signals_of
from pipetransformer.report.fit_report import FitReport


def cache_line(report: FitReport) -> str:
    """Say what the cache has spared; "" where nothing was looked up."""
    if not report.cache_hits + report.cache_misses:
        return ""
    upgrades = report.cache_upgrades
    parts = [
        f"{report.cache_hits} samples read",
        f"{upgrades} read and computed on from there" if upgrades else "",
        f"{report.cache_misses - upgrades} computed",
    ]
    seconds = report.cache_spared_s
    spared = f"; about {seconds:.3g} s of forwards spared" if seconds else "; nothing spared"
    return f"behind frozen layers: {', '.join(filter(None, parts))}{spared}"


def nothing_frozen_line(num_asked: int, step: int, reason: str, seen: FreezeContext) -> str:
    """Say that a policy froze nothing, with its last answer and what that was an answer to."""
    ranges = [
        f"{name} {min(values):.3g} to {max(values):.3g}"
        for name, values in signals_of(seen).items()
    ]
    found = [f"{name} {value:.4g}" for name, value in seen.metrics.items()]
    loss = [] if seen.loss is None else [f"loss {seen.loss:.4g}"]
    times = "once" if num_asked == 1 else f"{num_asked} times"
    text = f"nothing was frozen: the policy was asked {times}, and said last, at step {step}: "
    return f"{text}{reason}; it saw {', '.join([*loss, *found, *ranges]) or 'no signals yet'}"
