"""Fine-tune with the Trainer; every process runs this."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from experiments.finetune.freezing import policy_of
from experiments.finetune.killed_run import note_or_refuse
from experiments.finetune.options import RunOptions
from experiments.finetune.outputs import Outcome, write_outcome
from experiments.finetune.usage import as_usage
from experiments.tasks.workload import Workload
from pipetransformer import Trainer, named_optimizer
from pipetransformer.cli import Place, answers_text, find_plan
from pipetransformer.demo import RunQueueWait


def settings_of(options: RunOptions, workload: Workload) -> dict[str, Any]:
    """Return the Trainer's settings."""
    return {
        **options.settings(),
        "cache_views": workload.num_views or None,
        "collate_fn": workload.collate_fn,
        "compute_metrics": workload.judge,
        "metrics": {},
        "label": workload.name,
    }


def make_trainer(options: RunOptions, workload: Workload) -> Trainer:
    """Build the model and what trains it.

    Raises:
        ValueError: options do not go together with the model or the data.
    """
    further: dict[str, Any] = {}
    if options.baseline == "early-stop":
        further = {
            "metric_for_best_model": workload.metric,
            "load_best_model_at_end": True,
            "early_stopping_patience": options.patience,
        }
    return Trainer(
        workload.build(False),
        workload.train_dataset,
        eval_dataset=workload.eval_dataset,
        optimizer=named_optimizer(
            "adamw", options.learning_rate, weight_decay=options.weight_decay
        ),
        freeze=policy_of(options.freeze, options.replay),
        **settings_of(options, workload),
        **further,
    )


def say_plans(options: RunOptions, workload: Workload, trainer: Trainer) -> None:
    """Measure, and print on rank 0 which pipeline each number of frozen layers would get."""
    measured, world = trainer.measure(), trainer.world
    place = Place(
        f"{world.size} processes here",
        measured,
        world.size,
        world.slots_per_node,
        options.memory_limit_bytes,
    )
    layers = max(cost.layer for cost in measured.sublayers)
    requests = [trainer.plan_request(num_frozen) for num_frozen in range(layers)]
    if trainer.is_main_process:
        answers = [find_plan(place, request) for request in requests]
        print(answers_text(workload.name, answers))


def train(options: RunOptions, workload: Workload) -> None:
    """Fine-tune, evaluate, and write the results on rank 0."""
    folder = Path(options.output_dir)
    with as_usage():
        if not options.plan_only:
            note_or_refuse(options, workload)
        trainer = make_trainer(options, workload)
    with trainer:
        if options.plan_only:
            say_plans(options, workload, trainer)
            return
        start = time.perf_counter()
        with RunQueueWait() as held_up:
            report = trainer.fit()
        seconds = time.perf_counter() - start
        found = {"": trainer.predict(workload.eval_dataset)}
        metrics = dict(found[""].metrics)
        for name, dataset in workload.further.items():
            found[name] = trainer.predict(dataset)
            metrics |= {f"{name}_{key}": value for key, value in found[name].metrics.items()}
        trainer.save_pretrained(folder / "model", workload.processing_class)
        if trainer.is_main_process:
            outcome = Outcome(
                metrics,
                report.seconds,
                seconds,
                trainer.global_step,
                {
                    "cache_hits": report.cache_hits,
                    "cache_misses": report.cache_misses,
                    "kept_bytes": report.cache_bytes,
                    "transitions": report.transitions,
                    "processes": trainer.world.size,
                    "held_up": held_up.share,
                },
            )
            write_outcome(options, workload, outcome, found)
