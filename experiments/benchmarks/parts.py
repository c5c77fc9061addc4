"""Time loops with a frozen part: whole epochs in turn, in one process, on one core.

The four models are those of `experiments.part_cases`, the four loops those of
`experiments.part_loops`. Losses are compared first: all must be those of the plain loop. In each
repeat all begin anew: an epoch fills, two more are warm. Milliseconds a step are medians over
repeats, with the least and the most, of this process' CPUs and by the clock. "start" is what the
first step takes beyond a usual one, as for the look at the model: it counts to filling.
Run it as

    python -m experiments.benchmarks.parts [whisper] [resnet] [clip] [smolvlm] [--cifar NPZ]

torchcache takes part where it can be imported, and needs zstd.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.rounds import ResultsDifferError
from experiments.part_cases import ONE_CORE, PartCase, Size, part_cases
from experiments.part_loops import ByHand, ByTorchCache, DoesNotRunError, Ours, PartLoop, Plain

BARS = Bars(
    most={"fill_over_by_hand": 1.1, "warm_over_allowed": 1.0, "fill_over_torchcache": 1.0,
          "warm_over_torchcache": 1.0},
)  # fmt: skip
_ALLOWED_RATIO, _ALLOWED_MS = 1.1, 0.5
"""Beside a warm step by hand: the larger of both is allowed."""
_NUM_WARM = 2
_LOOPS: dict[str, Callable[[PartCase, str], PartLoop]] = {
    "plain": Plain, "by_hand": ByHand, "ours": Ours, "torchcache": ByTorchCache,
}  # fmt: skip


@dataclass
class Times:
    """Hold a loop's milliseconds a step, one entry a repeat: (R, 2), by the clock and of CPUs.

    Attributes:
        start: milliseconds in all.
    """

    fill: list[np.ndarray] = field(default_factory=list)
    warm: list[np.ndarray] = field(default_factory=list)
    start: list[np.ndarray] = field(default_factory=list)

    def median(self, state: str) -> np.ndarray:
        found: np.ndarray = np.median(getattr(self, state), axis=0)
        return found


def run(case: PartCase, repeats: int) -> tuple[dict[str, Times], dict[str, str]]:
    """Time all loops that run; return the reasons of the others, too."""
    left_out: dict[str, str] = {}
    times = {name: Times() for name in _LOOPS}
    shuffle = random.Random(0)
    for _ in range(repeats):
        with ExitStack() as ended:
            loops: dict[str, PartLoop] = {}
            for name in times.keys() - left_out.keys():
                try:
                    loops[name] = _LOOPS[name](case, "cpu")
                except DoesNotRunError as error:
                    left_out[name] = str(error)
                    continue
                ended.callback(loops[name].close)
            for number in range(1 + _NUM_WARM):
                for name in shuffle.sample(sorted(loops), len(loops)):
                    gc.collect()
                    _note(times[name], number, 1e3 * np.array(loops[name].epoch()))
            _compare(loops, left_out)
    return {name: one for name, one in times.items() if name not in left_out}, left_out


def _note(times: Times, number: int, ms: np.ndarray) -> None:
    (times.warm if number else times.fill).append(ms.mean(axis=0))
    if not number:
        times.start.append(ms[0] - np.median(ms[1:], axis=0))


def _compare(loops: Mapping[str, PartLoop], left_out: dict[str, str]) -> None:
    """Leave torchcache out where it is wrong; raise for any other of us."""
    plainly = torch.stack(loops["plain"].losses)
    for name, loop in loops.items():
        losses = torch.stack(loop.losses)
        if torch.allclose(losses, plainly, rtol=1e-4, atol=0):
            continue
        worst = float(((losses - plainly) / plainly).abs().max())
        if name != "torchcache":
            raise ResultsDifferError(f"{name}'s losses differ by {worst:.2g} from the plain ones")
        left_out[name] = f"wrong: its losses differ by {worst:.2g}"


def figures(times: Mapping[str, Times]) -> dict[str, float]:
    """Return ratios of CPU time, the medians of those within a repeat."""

    def ratio(state: str, other: str) -> float:
        ours, others = (_cpu(times[name], state) for name in ("ours", other))
        return round(float(np.median(ours / others)), 3)

    by_hand = _cpu(times["by_hand"], "warm")
    allowed = np.maximum(_ALLOWED_RATIO * by_hand, by_hand + _ALLOWED_MS)
    found = {
        "fill_over_by_hand": ratio("fill", "by_hand"),
        "warm_over_by_hand": ratio("warm", "by_hand"),
        "warm_over_allowed": round(float(np.median(_cpu(times["ours"], "warm") / allowed)), 3),
        "plain_over_warm": round(1 / ratio("warm", "plain"), 2),
    }
    # Where it does not run, it sets no bar.
    others = "torchcache" if "torchcache" in times else "plain"
    return found | {f"{state}_over_{others}": ratio(state, others) for state in ("fill", "warm")}


def _cpu(times: Times, state: str) -> np.ndarray:
    return np.array(getattr(times, state))[:, 1]


def table(times: Mapping[str, Times], left_out: Mapping[str, str]) -> str:
    """Return a line for each loop, in columns of the results' pages."""
    lines = ["| | fill, CPUs | by the clock | warm, CPUs | by the clock | start, CPUs |"]
    lines.append("|---" * 6 + "|")
    for name, one in times.items():
        cells = [name]
        for state in ("fill", "warm"):
            low, high = _cpu(one, state).min(), _cpu(one, state).max()
            clock, cpus = one.median(state)
            cells += [f"{cpus:.2f} ({low:.2f} to {high:.2f})", f"{clock:.2f}"]
        cells.append(f"{one.median('start')[1]:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *(f"| {name} | {why} | | | | |" for name, why in left_out.items())])


def main(arguments: list[str], size: Size = ONE_CORE) -> int:
    """Time what the command line names; return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="Time loops with a frozen part.")
    parser.add_argument("cases", nargs="*", help="all by default")
    parser.add_argument("--cifar", metavar="NPZ", help="of decoded images; random without it")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    cases = {case.name: case for case in part_cases(size, options.cifar)}
    if unknown := {*options.cases} - {*cases}:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    worst = 0
    for name in options.cases or cases:
        case = cases[name]
        times, left_out = run(case, options.repeats)
        print(f"\n{name}: {len(case.rows)} samples, {case.batch_size} a step\n")
        print(table(times, left_out), flush=True)
        bars = Bars(most={bar: most for bar, most in BARS.most.items() if bar in figures(times)})
        worst = max(worst, conclude({"case": name, **figures(times), **_as_json(times)}, bars))
    return worst


def _as_json(times: Mapping[str, Times]) -> dict[str, Any]:
    return {
        name: {
            f"{state}_{clock}_ms": round(float(one.median(state)[index]), 2)
            for state in ("fill", "warm", "start")
            for index, clock in enumerate(("clock", "cpu"))
        }
        for name, one in times.items()
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
