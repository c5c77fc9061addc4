"""Compare what the planner predicts with what steps take, over a grid of pipelines.

In every round the machine is profiled, every pipeline of the grid is predicted from that profile,
and trained for a few steps, in random order; the medians of the rounds are compared. Then the
planner's choice, the pipeline that was measured fastest and the plan by the published rules, whose
M comes from a table of measured steps, are measured again, in turn. Two processes of one thread
each. Run it as `python -m experiments.benchmarks.plan`.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from autopipe.plan import PipelinePlan, PlanRequest, plan_as_published, plan_pipeline
from autopipe.profile import Profile
from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.both_sides import make_trainer
from experiments.benchmarks.measuring.processes import found_by
from experiments.benchmarks.measuring.rounds import bootstrap
from experiments.benchmarks.measuring.timed_loop import BATCH_SIZE, digits_task
from freeze import FreezeContext
from pipetransformer import PlanSituation

WARM_UP, MEASURED = 3, 3
"""Steps of a visit to a pipeline: the first two fill the cache, the third first reads from it."""

Planner = Callable[[Profile, PlanRequest], PipelinePlan]

BARS = Bars(
    most={"plan_error_median": 0.05, "plan_error_max": 0.15, "plan_regret": 0.05},
)


@dataclass(frozen=True)
class Point:
    """Name a pipeline of the grid, with how many layers are frozen."""

    frozen: int
    length: int
    micro_batches: int
    schedule: str


def grid(frozen: tuple[int, ...]) -> list[Point]:
    """List all pipelines; a single stage runs every schedule alike, so it appears once."""
    shapes = [(1, "1f1b"), (2, "1f1b"), (2, "gpipe")]
    return [Point(f, k, m, s) for f, (k, s), m in product(frozen, shapes, (1, 2, 4, 8))]


class Tour:
    """Lead a trainer from pipeline to pipeline, and note what it predicts and takes."""

    def __init__(self, frozen: tuple[int, ...], num_epochs: int) -> None:
        self._point: Point | None = None
        self._planner: Planner = plan_pipeline
        self._frozen = frozen[0]
        self.trainer = make_trainer(
            digits_task(2 * BATCH_SIZE),  # So that two steps fill the cache.
            (0,),
            epochs=num_epochs,
            plan=self._plan,
            freeze=self._freeze,
            freeze_interval_steps=WARM_UP + MEASURED,
        )

    def visit(
        self, frozen: int, point: Point | None, planner: Planner = plan_pipeline
    ) -> tuple[PipelinePlan, list[float]]:
        """Train on a pipeline, or on a planner's choice; return it and its steps' seconds."""
        self._frozen, self._point, self._planner = frozen, point, planner
        seconds = []
        for _ in range(WARM_UP + MEASURED):
            seconds.append(self.trainer.step().seconds)
        assert self.trainer.decision is not None
        return self.trainer.decision.plan, seconds[WARM_UP:]

    def _freeze(self, context: FreezeContext) -> int:
        return self._frozen

    def _plan(self, situation: PlanSituation) -> PipelinePlan:
        request = situation.request
        if self._point is not None:
            request = dataclasses.replace(
                request,
                lengths=(self._point.length,),
                micro_batches=(self._point.micro_batches,),
                schedules=(self._point.schedule,),
            )
        return self._planner(situation.profile, request)


def measure_grid(frozen: tuple[int, ...], num_rounds: int, num_pairs: int) -> dict[str, Any]:
    """Tour the grid, then compare choices with the best; return what this rank saw."""
    points = grid(frozen)
    visits = num_rounds * len(points) + len(frozen) * (2 + 3 * num_pairs)
    tour = Tour(frozen, num_epochs=visits * (WARM_UP + MEASURED))
    shuffle = random.Random(0)
    seen: dict[Point, list[tuple[float, float]]] = {point: [] for point in points}
    with tour.trainer as trainer:
        for _ in range(num_rounds):
            trainer.measure()
            for point in shuffle.sample(points, len(points)):
                plan, seconds = tour.visit(point.frozen, point)
                seen[point].append((plan.predicted_step_s, statistics.median(seconds)))
        trainer.measure()
        choices = [_compare(tour, f, seen, num_pairs) for f in frozen]
    grid_seen = [[dataclasses.asdict(p), values] for p, values in seen.items()]
    return {"grid": grid_seen, "choices": choices}


def _compare(
    tour: Tour,
    frozen: int,
    seen: dict[Point, list[tuple[float, float]]],
    num_pairs: int,
) -> dict[str, Any]:
    """Measure the choice, the grid's fastest pipeline and the published rules' plan in turn."""
    plan, _ = tour.visit(frozen, None)
    # Every rank saw other seconds; rank 0 alone chooses pipelines, so only its choice counts.
    best = min(
        (p for p in seen if p.frozen == frozen),
        key=lambda p: statistics.median(measured for _, measured in seen[p]),
    )
    paper, _ = tour.visit(frozen, None, plan_as_published)
    visits: dict[str, tuple[Point | None, Planner]] = {
        "choice": (None, plan_pipeline),
        "best": (best, plan_pipeline),
        "paper": (None, plan_as_published),
    }
    ratios, paper_ratios = [], []
    for number in range(num_pairs):
        order = list(visits) if number % 2 else list(visits)[::-1]
        seconds = {name: statistics.median(tour.visit(frozen, *visits[name])[1]) for name in order}
        ratios.append(seconds["choice"] / seconds["best"])
        paper_ratios.append(seconds["paper"] / seconds["choice"])
    return {
        "paper": [paper.length, paper.num_micro_batches],
        "paper_ratios": paper_ratios,
        "frozen": frozen,
        "length": plan.length,
        "micro_batches": plan.num_micro_batches,
        "schedule": plan.schedule,
        "best": dataclasses.asdict(best),
        "ratios": ratios,
    }


def table(found: dict[str, Any]) -> Iterator[str]:
    """Write what was predicted and measured, and what the planner chose."""
    yield "frozen  K  M  schedule  predicted ms  measured ms   ratio"
    for point, values in found["grid"]:
        predicted, measured = (statistics.median(column) for column in zip(*values, strict=True))
        yield (
            f"{point['frozen']:6}  {point['length']}  {point['micro_batches']}  "
            f"{point['schedule']:8}  {predicted * 1e3:12.1f}  {measured * 1e3:11.1f}  "
            f"{predicted / measured:6.3f}"
        )
    yield "\nthe planner's choice beside the fastest of the grid, measured again in turn"
    for choice in found["choices"]:
        yield from _choice_lines(choice)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Return how far predictions are off, and how much longer the planner's choices take."""
    errors = []
    for _, values in found["grid"]:
        predicted, measured = (statistics.median(column) for column in zip(*values, strict=True))
        errors.append(abs(predicted / measured - 1))
    interval = bootstrap(np.array(errors))
    return {
        "plan_error_median": round(interval.median, 4),
        "plan_error_max": round(max(errors), 4),
        "plan_regret": round(max(map(_regret, found["choices"])), 4),
        "interval": [round(interval.low, 4), round(interval.high, 4)],
        "pipelines": len(errors),
        "rounds": len(found["grid"][0][1]),
        "pairs": sum(len(choice["ratios"]) for choice in found["choices"]),
        "paper_over_choice": [
            round(bootstrap(np.array(choice["paper_ratios"])).median, 3)
            for choice in found["choices"]
        ],
    }


def _choice_lines(choice: dict[str, Any]) -> Iterator[str]:
    """Compare a choice with the fastest pipeline of the grid, and the published rules' with it."""
    best, ratio = choice["best"], bootstrap(np.array(choice["ratios"]))
    yield (
        f"  frozen {choice['frozen']}: K = {choice['length']}, M = "
        f"{choice['micro_batches']} ({choice['schedule']}) takes {ratio.median:.3f} "
        f"[{ratio.low:.3f}, {ratio.high:.3f}] of K = {best['length']}, M = "
        f"{best['micro_batches']} ({best['schedule']})"
        f"{', which is the same' if _is_best(choice) else ''}"
    )
    length, count = choice["paper"]
    paper = bootstrap(np.array(choice["paper_ratios"]))
    yield (
        f"            the published rules' K = {length}, M = {count} (gpipe) takes "
        f"{paper.median:.3f} [{paper.low:.3f}, {paper.high:.3f}] of it"
    )


def _regret(choice: dict[str, Any]) -> float:
    """Return how much longer the choice takes than the fastest; what it is itself, is noise."""
    ratio = bootstrap(np.array(choice["ratios"]))
    return 0.0 if _is_best(choice) else max(0.0, ratio.median - 1)


def _is_best(choice: dict[str, Any]) -> bool:
    """Say whether the choice is the fastest itself; a single stage runs every schedule alike."""
    best = choice["best"]
    same = all(choice[part] == best[part] for part in ("length", "micro_batches"))
    return same and (choice["length"] == 1 or choice["schedule"] == best["schedule"])


def main() -> int:
    """Measure and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frozen", type=int, nargs="+", default=[0, 3, 6, 9])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=12, help="a number of frozen layers")
    options = parser.parse_args()
    asked = tuple(options.frozen), options.rounds, options.pairs
    found = found_by(measure_grid, asked)
    print("\n".join(table(found)))
    return conclude(figures(found), BARS)


if __name__ == "__main__":
    sys.exit(main())
