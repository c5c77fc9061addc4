"""Compare what a callback predicts that freezing saves with what it then saves.

MiniLM trains in `transformers.Trainer` on all cores, with `FreezeCallback(cache=False)` and a
policy that freezes so many layers halfway. The callback watches the first few steps and predicts
from them; the medians of the steps between them and the freeze, and of those behind it, are what
came of it. What it predicts with a cache stands beside our Trainer's steps of an epoch that reads
all rows from its cache, over those of one with nothing frozen. Runs of all depths take turns. Run
it as

    python -m experiments.benchmarks.predicted_savings --minilm FOLDER --sst2 FOLDER

Without the folders a BERT of MiniLM's shape is trained on random tokens, which takes as long. The
last line printed is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.both_sides import MAX_GRAD_NORM, make_trainer
from experiments.benchmarks.measuring.rounds import num_cores, seconds_of
from experiments.benchmarks.measuring.timed_loop import (
    RivalTask,
    Sentences,
    add_folders,
    sentences_task,
)
from freeze import FreezeContext
from pipetransformer import FreezeCallback

BARS = Bars(least={"least_uncached": 0.95}, most={"most_uncached": 1.35})
"""Saved over predicted: without a cache the prediction is the least, as a frozen forward is
shorter than one that trains."""
DEPTHS = (2, 4)
WATCHED, HALF = 10, 26
"""Steps in which the callback has its hooks, and all steps before the freeze; as many follow."""


@dataclass(frozen=True)
class Savings:
    """Hold the share of a step that freezing was to save, and the share that it saved."""

    predicted: float
    saved: float


class _Clock(TrainerCallback):
    """Note when each step began and ended."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps_s.append(time.perf_counter() - self._start)


def run(task: RivalTask, num_frozen: int, folder: str) -> dict[bool, Savings]:
    """Train twice HALF steps, the second half of them with frozen layers; then with a cache.

    Returns:
        by whether there was a cache, what it came to.
    """

    def halfway(context: FreezeContext) -> int:
        return num_frozen if context.step >= HALF else 0

    clock = _Clock()
    callback = FreezeCallback(halfway, every_steps=HALF, cache=False)
    trainer = Trainer(
        task.build(),
        TrainingArguments(
            folder,
            max_steps=2 * HALF,
            per_device_train_batch_size=task.batch_size,
            learning_rate=5e-5,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
        ),
        train_dataset=task.dataset,
        callbacks=[clock, callback],
    )
    trainer.train()
    costs = callback.advice.costs
    assert costs is not None
    # While it is watched a step takes longer, and the first one of the second half, too.
    before, after = clock.steps_s[WATCHED:HALF], clock.steps_s[HALF + 1 :]
    saved = 1 - statistics.median(after) / statistics.median(before)
    all_saved = {False: saved, True: saved_with_cache(task, num_frozen)}
    return {
        cached: Savings(costs.saved_share(num_frozen, cached=cached), one)
        for cached, one in all_saved.items()
    }


def saved_with_cache(task: RivalTask, num_frozen: int) -> float:
    """Train three epochs in our Trainer: nothing frozen, the cache filling, every row there."""
    medians_s = []
    frozen = (0, num_frozen, num_frozen)
    with make_trainer(task, frozen, max_grad_norm=MAX_GRAD_NORM) as trainer:
        for _ in frozen:
            steps_s = [seconds_of(trainer.step) for _ in range(task.steps_per_epoch)]
            medians_s.append(statistics.median(steps_s[1:]))  # The first holds the transition.
        assert trainer.report.cache_hits > 0
    return 1 - medians_s[2] / medians_s[0]


def main() -> int:
    """Measure every depth; fail where the median prediction without a cache is off."""
    parser = argparse.ArgumentParser(description="Compare predicted savings with real ones.")
    add_folders(parser)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(num_cores())
    task = sentences_task(Sentences(options.minilm, options.sst2))
    with tempfile.TemporaryDirectory() as folder:
        runs = [{d: run(task, d, folder) for d in DEPTHS} for _ in range(options.repeats)]
    found: dict[str, Any] = {}
    for cached, kind in ((False, "uncached"), (True, "cached")):
        ratios = found[f"{kind}_ratios"] = {}
        for depth in DEPTHS:
            outcomes = [one[depth][cached] for one in runs]
            ratios[depth] = statistics.median(one.saved / one.predicted for one in outcomes)
            each = ", ".join(f"{one.predicted:.1%} -> {one.saved:.1%}" for one in outcomes)
            print(f"{depth} of {task.num_layers} layers, {kind}, predicted -> saved: {each}")
            found[f"{kind}_runs_of_{depth}"] = [asdict(one) for one in outcomes]
    uncached = found["uncached_ratios"].values()
    return conclude(
        {"least_uncached": min(uncached), "most_uncached": max(uncached), **found}, BARS
    )


if __name__ == "__main__":
    sys.exit(main())
