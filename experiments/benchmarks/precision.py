"""Fine-tune MiniLM on SST-2 in float32 and in bf16: accuracy, seconds, and bytes of cached rows.

The two train in turn, with the same seeds, freezing and data. Run it as

    python -m experiments.benchmarks.precision --minilm FOLDER --sst2 FOLDER
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.rounds import num_cores
from experiments.tasks.glue import glue_workload
from experiments.tasks.text_model import TextSource
from freeze import FreezeSchedule
from pipetransformer import Trainer, adamw

FROZEN = (0, 2, 2)
"""Frozen layers by epoch: of the three, the second fills the cache, and the third reads it."""

BATCH_SIZE = 32
BARS = Bars(most={"points_lost": 0.5})


@dataclass(frozen=True)
class PrecisionRun:
    """Hold what a run came to.

    Args:
        accuracy: on the whole dev set, in percent.
        seconds: of training, transitions included.
        row_bytes: of a cached sample of the profile's length, behind the frozen layers.
        hits: samples that were read from the cache.
    """

    accuracy: float
    seconds: float
    row_bytes: int
    hits: int


def train(minilm: str, sst2: str, *, seed: int, precision: str | None, num: int) -> PrecisionRun:
    """Fine-tune from the same weights; only the head and the samples' order follow the seed."""
    workload = glue_workload("sst2", TextSource(minilm, sst2, 64, num, None, seed))
    with Trainer(
        workload.build(False),
        workload.train_dataset,
        eval_dataset=workload.eval_dataset,
        optimizer=adamw(5e-5),
        learning_rate_schedule="linear",
        warmup=0.1,
        freeze=FreezeSchedule(FROZEN),
        epochs=len(FROZEN),
        global_batch_size=BATCH_SIZE,
        micro_batch_size=BATCH_SIZE,
        evaluate_every_epochs=0,
        seed=seed,
        precision=precision,
        collate_fn=workload.collate_fn,
        device="cpu",
        progress=False,
    ) as trainer:
        trainer.measure()  # Before the clock runs.
        start = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - start
        assert trainer.measurements is not None
        row_bytes = trainer.measurements.prefix_bytes(FROZEN[-1])
        accuracy = 100 * trainer.evaluate()["accuracy"]
        return PrecisionRun(accuracy, seconds, round(row_bytes), trainer.report.cache_hits)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Train each seed in both, in turn; say a line for each, and return the JSON line's values."""
    found: dict[str, list[PrecisionRun]] = {"float32": [], "bf16": []}
    for number, seed in enumerate(options.seeds):
        for name in sorted(found, reverse=number % 2 == 0):
            precision = None if name == "float32" else name
            outcome = train(
                options.minilm, options.sst2, seed=seed, precision=precision, num=options.num
            )
            found[name].append(outcome)
            print(f"seed {seed}  {name:7}  {outcome}", flush=True)

    def mean(name: str, field: str) -> float:
        return statistics.mean(getattr(one, field) for one in found[name])

    return {
        "points_lost": mean("float32", "accuracy") - mean("bf16", "accuracy"),
        "float32_over_bf16_seconds": mean("float32", "seconds") / mean("bf16", "seconds"),
        "row_bytes_share": mean("bf16", "row_bytes") / mean("float32", "row_bytes"),
        "runs": {name: [asdict(one) for one in runs] for name, runs in found.items()},
    }


def main() -> int:
    """Compare; fail where bf16 loses more than it may."""
    parser = argparse.ArgumentParser(description="Compare bf16 with float32.")
    parser.add_argument("--minilm", required=True, help="folder with MiniLM and its tokenizer")
    parser.add_argument("--sst2", required=True, help="GLUE's folder of SST-2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num", type=int, default=1600, help="training sentences")
    options = parser.parse_args()
    torch.set_num_threads(num_cores())
    return conclude(compare(options), BARS)


if __name__ == "__main__":
    sys.exit(main())
