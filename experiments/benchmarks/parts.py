"""Time loops with a frozen part: whole epochs in turn, in one process, on one core.

The four models are those of `experiments.part_cases`, the four loops those of
`experiments.part_loops`. Losses are compared first: all must be those of the plain loop. In each
repeat all begin anew: an epoch fills, two more are warm. Milliseconds a step are medians over
repeats, with the least and the most, of this process' CPUs and by the clock. An epoch's "start" is
what its first step takes beyond the mean of the others, as for the look at the model. It counts to
its epoch, and so the more, the fewer steps there are; "steps" are without it.
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
_STATES = ("fill", "fill_steps", "warm", "warm_steps")
_LOOPS: dict[str, Callable[[PartCase, str], PartLoop]] = {
    "plain": Plain, "by_hand": ByHand, "ours": Ours, "torchcache": ByTorchCache,
}  # fmt: skip


@dataclass
class Times:
    """Hold a loop's milliseconds a step, one entry a repeat: (R, 2), by the clock and of CPUs.

    Attributes:
        fill_start, warm_start: of an epoch, in milliseconds in all.
        fill_steps, warm_steps: without these.
    """

    fill: list[np.ndarray] = field(default_factory=list)
    fill_steps: list[np.ndarray] = field(default_factory=list)
    fill_start: list[np.ndarray] = field(default_factory=list)
    warm: list[np.ndarray] = field(default_factory=list)
    warm_steps: list[np.ndarray] = field(default_factory=list)
    warm_start: list[np.ndarray] = field(default_factory=list)

    def note(self, state: str, ms: np.ndarray) -> None:
        """Note an epoch of steps, (S, 2)."""
        steps = ms[1:].mean(axis=0)
        for name, value in (("", ms.mean(axis=0)), ("_steps", steps), ("_start", ms[0] - steps)):
            getattr(self, state + name).append(value)

    def cpu(self, state: str) -> np.ndarray:
        return np.array(getattr(self, state))[:, 1]

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
                    ms = 1e3 * np.array(loops[name].epoch())
                    times[name].note("warm" if number else "fill", ms)
            _compare(loops, left_out)
    return {name: one for name, one in times.items() if name not in left_out}, left_out


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
    by_hand = times["by_hand"]

    def ratio(state: str, others: np.ndarray) -> float:
        return round(float(np.median(times["ours"].cpu(state) / others)), 3)

    def allowed(state: str) -> np.ndarray:
        cpu = by_hand.cpu(state)
        return np.maximum(_ALLOWED_RATIO * cpu, cpu + _ALLOWED_MS)

    found = {f"{one}_over_by_hand": ratio(one, by_hand.cpu(one)) for one in _STATES}
    found |= {f"{one}_over_allowed": ratio(one, allowed(one)) for one in ("warm", "warm_steps")}
    found["plain_over_warm"] = round(1 / ratio("warm", times["plain"].cpu("warm")), 2)
    if rival := times.get("torchcache"):
        found |= {f"{one}_over_torchcache": ratio(one, rival.cpu(one)) for one in _STATES}
    return found


def table(times: Mapping[str, Times], left_out: Mapping[str, str]) -> str:
    """Return a line for each loop, in columns of the results' pages."""
    head = "CPUs | by the clock | steps, CPUs | start, CPUs"
    lines = [f"| | fill, {head} | warm, {head} |", "|---" * 9 + "|"]
    for name, one in times.items():
        cells = [name]
        for state in ("fill", "warm"):
            cpu = one.cpu(state)
            (clock, middle), steps = one.median(state), one.median(f"{state}_steps")[1]
            cells += [f"{middle:.2f} ({cpu.min():.2f} to {cpu.max():.2f})", f"{clock:.2f}"]
            cells += [f"{steps:.2f}", f"{one.median(f'{state}_start')[1]:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *(f"| {name} | {why} |" for name, why in left_out.items())])


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
            for state in (*_STATES, "fill_start", "warm_start")
            for index, clock in enumerate(("clock", "cpu"))
        }
        for name, one in times.items()
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
