"""Fine-tune with the Trainer; every process runs this."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autopipe.plan import PlanRequest
from autopipe.profile import Profile
from experiments.finetune.freezing import policy_of
from experiments.finetune.killed_run import OPTIONS_FILE, as_read, refuse_others
from experiments.finetune.options import RunOptions
from experiments.finetune.outputs import Outcome, write_outcome
from experiments.tasks.workload import Workload
from pipetransformer import Trainer, named_optimizer
from pipetransformer.durable_files import hash_json
from pipetransformer.forecast import Place, answers_text, find_plan, make_request

_NUM_SAMPLES = 64
_MAY_CHANGE = {
    "output_dir", "recipe", "processes", "pipeline_length", "max_replicas", "micro_batches",
    "memory_limit_bytes", "dataloader_num_workers", "checkpoint_every_epochs",
}  # fmt: skip
"""Options with which a killed run may go on, as nothing but rounding depends on them."""


def settings_of(options: RunOptions, workload: Workload) -> dict[str, Any]:
    """Return the Trainer's settings."""
    checkpoint_every = 0 if options.plan_only else options.checkpoint_every_epochs
    return {
        "epochs": options.num_train_epochs,
        "global_batch_size": options.global_batch_size,
        "learning_rate_schedule": options.lr_scheduler_type,
        "warmup": options.warmup,
        "layer_decay": options.layer_decay,
        "max_grad_norm": options.max_grad_norm or None,
        "label_smoothing": options.label_smoothing_factor,
        "seed": options.seed,
        "group_by_length": options.group_by_length,
        "precision": None if options.precision == "float32" else options.precision,
        "cache": options.cache,
        "cache_views": workload.num_views or None,
        "memory_limit_bytes": options.memory_limit_bytes,
        "pipeline_length": options.pipeline_length,
        "max_replicas": options.max_replicas,
        "micro_batches": options.micro_batches,
        "scale_batch": options.scale_batch,
        "num_workers": options.dataloader_num_workers,
        "collate_fn": workload.collate_fn,
        "compute_metrics": workload.judge,
        "metrics": {},
        "folder": None if options.plan_only else options.output_dir,
        "checkpoint_every_epochs": checkpoint_every,
        "resume": "auto" if checkpoint_every else False,
        "freeze_interval_steps": options.freeze_interval_steps,
        "freeze_interval_share": options.freeze_interval_share,
        "signals": options.signals,
        "evaluate_every_epochs": options.evaluate_every_epochs or options.num_train_epochs,
        "label": workload.name,
        "progress": not options.plan_only,
    }


def say_plans(options: RunOptions, workload: Workload, trainer: Trainer) -> None:
    """Measure, and print on rank 0 which pipeline each number of frozen layers would get."""
    measured, world = trainer.measure(), trainer.world
    place = Place(
        f"{world.size} processes here",
        measured.profile,
        world.size,
        world.slots_per_node,
        options.memory_limit_bytes,
        measured.cache_bytes_per_s,
    )
    layers = max(cost.layer for cost in measured.profile.sublayers)
    requests = [
        _as_set(
            trainer,
            measured.profile,
            make_request(
                place,
                global_batch=options.global_batch_size,
                num_frozen=num_frozen,
                memory_limit_bytes=options.memory_limit_bytes,
                cached=options.cache,
            ),
        )
        for num_frozen in range(layers)
    ]
    if trainer.is_main_process:
        num_samples = len(workload.train_dataset)
        answers = [find_plan(place, request, plan="fastest") for request in requests]
        print(answers_text(workload.name, answers, num_samples=num_samples))


def _as_set(trainer: Trainer, profile: Profile, request: PlanRequest) -> PlanRequest:
    """Consider only pipelines that the settings allow."""
    config, lengths = trainer.config, request.lengths
    if config.pipeline_length is not None:
        num_active = len(profile.sublayers) - profile.first_active(request.num_frozen)
        most = min(config.pipeline_length, num_active)
        lengths = (max(one for one in trainer.world.lengths if one <= most),)
    return replace(
        request,
        lengths=lengths,
        max_replicas=config.most_replicas(),
        micro_batches=None if config.micro_batches is None else (config.micro_batches,),
    )


def refuse_other_options(options: RunOptions, workload: Workload) -> None:
    """Refuse to go on with a killed run that was asked for otherwise; note what this one is.

    Raises:
        ValueError: options, or some of the training samples, are others.
    """
    folder = Path(options.output_dir)
    given = {
        k: v for k, v in {**asdict(options), **workload.options}.items() if k not in _MAY_CHANGE
    }
    num = len(workload.train_dataset)
    chosen = sorted({n * (num - 1) // (_NUM_SAMPLES - 1) for n in range(_NUM_SAMPLES)})
    if not workload.num_views:  # Else an image is another in each view.
        given["training samples"] = hash_json([repr(workload.train_dataset[i]) for i in chosen])
    given["number of training samples"] = num
    asked, is_first = as_read(given), os.environ.get("RANK", "0") == "0"
    path = folder / OPTIONS_FILE
    if path.exists() and (folder / "checkpoints").exists():
        refuse_others(folder, json.loads(path.read_text()), asked)
        if is_first:
            print(f"{folder}: goes on with the run that was killed")
    elif is_first:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asked, indent=2) + "\n")


def train(options: RunOptions, workload: Workload) -> None:
    """Fine-tune, evaluate, and write the results on rank 0."""
    if not options.plan_only:
        refuse_other_options(options, workload)
    folder, stops_early = Path(options.output_dir), options.baseline == "early-stop"
    further = {}
    if stops_early:
        further = {"metric_for_best_model": workload.metric, "load_best_model_at_end": True}
    with Trainer(
        workload.build(False),
        workload.train_dataset,
        eval_dataset=workload.eval_dataset,
        optimizer=named_optimizer(
            "adamw", options.learning_rate, weight_decay=options.weight_decay
        ),
        freeze=policy_of(options.freeze, options.replay),
        early_stopping_patience=options.patience if stops_early else None,
        **{**settings_of(options, workload), **further},
    ) as trainer:
        if options.plan_only:
            say_plans(options, workload, trainer)
            return
        start = time.perf_counter()
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
                },
            )
            write_outcome(options, workload, outcome, found)
