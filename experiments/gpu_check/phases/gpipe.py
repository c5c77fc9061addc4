"""Train torchgpipe's models at full size with one partition: rates and memory, as published.

The published rows beside are of Tesla P40 GPUs. AmoebaNet-D's rates are published from two
partitions on, so that its lines stand beside those of two.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from experiments.benchmarks.gpipe.memory import memory_row
from experiments.benchmarks.gpipe.runs import (
    Experiment,
    ModelFamily,
    Options,
    WarmExperiment,
    by_time,
)
from experiments.benchmarks.gpipe.tables import TABLES
from experiments.gpu_check.findings import Findings, Setting

_TINY_SCALE, _TINY_BATCH = 1 / 16, 8
_NUM_STEPS = 5


def run(findings: Findings, setting: Setting) -> None:
    """Measure each line that one partition can have; one that fails costs itself alone."""
    for table, (family, experiments, settings) in TABLES.items():
        scale = _TINY_SCALE if setting.tiny else 1.0
        options = Options(table, scale, setting.device, (1,), _NUM_STEPS)
        least = min(one.num_partitions or 1 for one in experiments)
        for published in experiments:
            if (published.num_partitions or 1) > least:
                continue
            one = replace(published, num_partitions=published.num_partitions and 1)
            if setting.tiny:
                chunks = min(one.num_micro_batches, _TINY_BATCH // 2)
                one = replace(one, batch_size=_TINY_BATCH, num_micro_batches=chunks)
            action = partial(_memory if settings else _speed, family, one, options, **settings)
            findings.check(f"{table}, published {published.name}", action)
            gc.collect()
            if setting.device == "cuda":
                torch.cuda.empty_cache()


def _speed(family: ModelFamily, one: Experiment, options: Options) -> Mapping[str, Any]:
    training = WarmExperiment(family, one, options, balance=by_time)
    training.step()
    rates = [training.rate() for _ in range(options.num_steps)]
    return {"samples_per_s": statistics.median(rates), **one.published}


def _memory(
    family: ModelFamily, one: Experiment, options: Options, *, momentum: float
) -> Mapping[str, Any]:
    row = memory_row(family, one, options=options, momentum=momentum)
    return {name: value for name, value in row.items() if value is not None} | dict(one.published)
