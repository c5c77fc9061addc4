"""Compare what the freeze advisor predicts with what freezing then saves.

MiniLM trains in `transformers.Trainer` on all cores, with `FreezeAdvisor(act=True)` and a policy
that freezes so many layers halfway. The advisor watches the first few steps and predicts from
them; the medians of the steps between them and the freeze, and of those behind it, are what came
of it. Runs of all depths take turns. Run it as

    python -m experiments.benchmarks.advisor --minilm FOLDER --sst2 FOLDER

Without the folders a BERT of MiniLM's shape is trained on random tokens, which takes as long. The
last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from experiments.benchmarks.plain_loop import RivalTask, Sentences, add_folders, sentences_task
from experiments.benchmarks.rounds import num_cores
from freeze import FreezeContext
from freeze.advisor import FreezeAdvisor

MOST_OFF = 0.10
DEPTHS = (2, 4)
WATCHED, HALF = 10, 26
"""Steps in which the advisor has its hooks, and all steps before the freeze; as many follow."""


@dataclass(frozen=True)
class Outcome:
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


def run(task: RivalTask, num_frozen: int, folder: str) -> Outcome:
    """Train twice HALF steps, the second half of them with frozen layers."""

    def halfway(context: FreezeContext) -> int:
        return num_frozen if context.step >= HALF else 0

    clock = _Clock()
    advisor = FreezeAdvisor(halfway, every_steps=HALF, act=True)
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
        callbacks=[clock, advisor],
    )
    trainer.train()
    costs = advisor.advice.costs
    assert costs is not None
    # While it is watched a step takes longer, and the first one of the second half, too.
    before, after = clock.steps_s[WATCHED:HALF], clock.steps_s[HALF + 1 :]
    saved = 1 - statistics.median(after) / statistics.median(before)
    return Outcome(costs.saved_share(num_frozen, cached=False), saved)


def main() -> int:
    """Measure every depth; fail where the median prediction is too far off."""
    parser = argparse.ArgumentParser(description="Compare the advisor's savings with real ones.")
    add_folders(parser)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(num_cores())
    task = sentences_task(Sentences(options.minilm, options.sst2))
    found: dict[int, list[Outcome]] = {depth: [] for depth in DEPTHS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.repeats):
            for depth, outcomes in found.items():
                outcomes.append(run(task, depth, folder))
    off = {}
    for depth, outcomes in found.items():
        ratios = [one.saved / one.predicted for one in outcomes]
        off[depth] = abs(statistics.median(ratios) - 1)
        each = ", ".join(f"{one.predicted:.1%} -> {one.saved:.1%}" for one in outcomes)
        print(f"{depth} of {task.num_layers} layers, predicted -> saved: {each}")
    print(
        json.dumps(
            {
                "off": off,
                "most_off": MOST_OFF,
                "runs": {depth: [asdict(one) for one in own] for depth, own in found.items()},
                "torch": torch.__version__,
                "cores": num_cores(),
            }
        )
    )
    return 1 if max(off.values()) > MOST_OFF else 0


if __name__ == "__main__":
    sys.exit(main())
