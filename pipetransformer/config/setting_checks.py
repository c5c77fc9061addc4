"""Refuse settings that are not allowed, each by its name with what is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autopipe.stashing import VERSION_RULES
from freeze import MEASURED_SIGNALS
from pipetransformer.optimizer import check_warmup, named_schedule
from pipetransformer.planning import PLANS

if TYPE_CHECKING:  # It is checked by this as it is made.
    from pipetransformer.config.train_config import TrainConfig

Metric = Callable[[Tensor, Any], tuple[float, float]]
ComputeMetrics = Callable[[Any], Mapping[str, float]]
"""Judges an `EvalPrediction`."""

EVALUATION_FIELDS = ("loss", "kind", "step", "elapsed_s", "epoch", "seconds")
"""What a record of an evaluation holds beside the metrics."""

_COUNTS = (
    "epochs",
    "global_batch_size",
    "keep_checkpoints",
    "prefetch_factor",
    "freeze_interval_epochs",
)
_OPTIONAL_COUNTS = (
    "max_steps",
    "pipeline_length",
    "max_replicas",
    "micro_batches",
    "micro_batch_size",
    "memory_limit_bytes",
    "freeze_interval_steps",
    "cache_limit_bytes",
    "cache_views",
    "prefix_chunk",
    "eval_batch_size",
    "early_stopping_patience",
)
_COUNTS_FROM_0 = (
    "checkpoint_every_epochs",
    "checkpoint_every_steps",
    "evaluate_every_epochs",
    "evaluate_every_steps",
    "num_workers",
)
_FLAGS = (
    "scale_batch",
    "cache",
    "progress",
    "pin_memory",
    "remove_unused_columns",
    "group_by_length",
    "load_best_model_at_end",
)
_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "precision": (None, "bf16", "fp16"),
    "on_nonfinite": ("raise", "skip"),
    "schedule": (None, "gpipe", "1f1b"),
    "weight_versions": (None, *VERSION_RULES),
    "cache_dtype": (None, "bfloat16", "float16"),
    "greater_is_better": (None, False, True),
    "device": ("auto", "cpu", "cuda", "cuda-shared"),
}
_OPTIONAL_FUNCTIONS = ("collate_fn", "compute_metrics", "sample_order")


def check_settings(config: TrainConfig) -> None:
    """Raise a ValueError for the first setting, or pair of settings, that is not allowed."""
    _check_numbers(config)
    _check_choices(config)
    _check_functions(config)
    _check_batches(config)
    _check_workers(config)
    _check_versions(config)
    _check_learning_rate(config)
    _check_decisions(config)
    _check_saving(config)


def _check_numbers(config: TrainConfig) -> None:
    for name in _COUNTS:
        _require(config, name, _is_whole(getattr(config, name), 1), "a whole number, at least 1")
    for name in _OPTIONAL_COUNTS:
        value = getattr(config, name)
        allowed = value is None or _is_whole(value, 1)
        _require(config, name, allowed, "None or a whole number, at least 1")
    for name in _COUNTS_FROM_0:
        _require(config, name, _is_whole(getattr(config, name), 0), "a whole number, 0 or more")
    _require(config, "seed", _is_whole(config.seed, -math.inf), "a whole number")
    for name, optional in (("step_timeout_s", True), ("setup_timeout_s", False)):
        value = getattr(config, name)
        allowed = (_is_positive(value) and value < math.inf) or (optional and value is None)
        text = f"{'None or ' * optional}a finite number of seconds above 0"
        _require(config, name, allowed, text)
    norm, decay = config.max_grad_norm, config.layer_decay
    _require(
        config, "max_grad_norm", norm is None or _is_positive(norm), "None or a number above 0"
    )
    _require(
        config,
        "layer_decay",
        decay is None or (_is_positive(decay) and decay <= 1),
        "None or a number above 0, at most 1",
    )
    smoothing, threshold = config.label_smoothing, config.early_stopping_threshold
    _require(
        config,
        "label_smoothing",
        smoothing == 0 or (_is_positive(smoothing) and smoothing < 1),
        "a number, 0 or more and below 1",
    )
    _require(
        config,
        "early_stopping_threshold",
        threshold == 0 or _is_positive(threshold),
        "a number, 0 or more",
    )


def _check_choices(config: TrainConfig) -> None:
    if config.precision == "bf16-pure":
        raise ValueError(
            "precision is 'bf16-pure', but weights in bfloat16 lose every update smaller than "
            "their rounding, 1/256 of them, unless the optimizer keeps copies in float32, "
            "which torch's do not; choose 'bf16', which keeps the weights in float32"
        )
    for name, choices in _CHOICES.items():
        text = f"one of {', '.join(map(repr, choices))}"
        _require(config, name, getattr(config, name) in choices, text)
    for name in _FLAGS:
        _require(config, name, isinstance(getattr(config, name), bool), "True or False")
    resume, folder = config.resume, config.folder
    allowed = isinstance(resume, bool) or resume == "auto"
    _require(config, "resume", allowed, "True, False or 'auto'")
    _require(config, "folder", folder is None or isinstance(folder, (str, Path)), "None or a path")
    _require(config, "cache_folder", isinstance(config.cache_folder, (str, Path)), "a path")
    named = isinstance(config.metric_for_best_model, str)
    _require(config, "metric_for_best_model", named, "a name")
    listed = isinstance(config.callbacks, (list, tuple))
    _require(config, "callbacks", listed, "a list of Callback")


def _check_functions(config: TrainConfig) -> None:
    for name in _OPTIONAL_FUNCTIONS:
        value = getattr(config, name)
        _require(config, name, value is None or callable(value), "None or a function")
    _require(
        config,
        "plan",
        callable(config.plan) or config.plan in tuple(PLANS),
        f"one of {', '.join(map(repr, PLANS))}, or a function",
    )
    _require(
        config,
        "metrics",
        config.metrics is None or _are_metrics(config.metrics),
        f"None or functions by names other than {', '.join(EVALUATION_FIELDS)}",
    )
    if config.sample_order is not None and config.group_by_length:
        raise ValueError(
            "sample_order and group_by_length both say in which order samples come; give one"
        )


def _check_batches(config: TrainConfig) -> None:
    if config.max_steps is not None and config.scale_batch:
        raise ValueError(
            f"max_steps is {config.max_steps}, but with scale_batch=True a step's samples follow "
            "from the replicas; give epochs"
        )
    count, size, whole = config.micro_batches, config.micro_batch_size, config.global_batch_size
    if count is not None and count > whole:
        raise ValueError(
            f"micro_batches is {count} for a global_batch_size of {whole}; each needs a sample: "
            f"choose at most {whole}"
        )
    if size is None:
        return
    if count is not None:
        raise ValueError(
            f"micro_batch_size is {size} and micro_batches is {count}; each follows from the "
            "other: give one of them"
        )
    if config.plan == "published":
        raise ValueError(
            f"micro_batch_size is {size}, but plan='published' chooses the micro-batches itself; "
            "leave one of them out"
        )
    if size > whole:
        raise ValueError(
            f"micro_batch_size is {size} for a global_batch_size of {whole}; choose at most "
            f"{whole}"
        )


def _check_workers(config: TrainConfig) -> None:
    workers = config.stage_workers
    if workers is None:
        return
    allowed = isinstance(workers, (list, tuple)) and all(_is_whole(one, 1) for one in workers)
    several = "whole numbers of at least 1 for two stages or more"
    _require(config, "stage_workers", allowed and len(workers) > 1, f"None or {several}")
    others = {
        "pipeline_length": config.pipeline_length is not None,
        "max_replicas": config.max_replicas is not None,
        "scale_batch": config.scale_batch,
        "plan": config.plan == "published",
        "schedule": config.schedule == "gpipe",
    }
    _leave_out(
        f"stage_workers is {workers}, which makes one 1F1B pipeline of all processes", others
    )


def _check_versions(config: TrainConfig) -> None:
    if config.weight_versions is None:
        return
    others = {
        "max_grad_norm": config.max_grad_norm is not None,
        "precision='fp16'": config.precision == "fp16",
        "on_nonfinite='skip'": config.on_nonfinite == "skip",
        "schedule='gpipe'": config.schedule == "gpipe",
        "stage_workers": config.stage_workers is not None,
    }
    _leave_out(
        f"weight_versions is {config.weight_versions!r}: a stage updates before it could hear of "
        "the others' gradients, and runs 1F1B alone",
        others,
    )


def _leave_out(why: str, others: Mapping[str, bool]) -> None:
    """Refuse those of the others that are given."""
    if given := [name for name, is_given in others.items() if is_given]:
        raise ValueError(f"{why}; leave {' and '.join(given)} out")


def _check_learning_rate(config: TrainConfig) -> None:
    schedule = config.learning_rate_schedule
    check_warmup(config.warmup)
    if isinstance(schedule, str):
        # The rate itself is the optimizer's, and known later.
        named_schedule(schedule, warmup=config.warmup, learning_rate=1.0)
        return
    _require(config, "learning_rate_schedule", callable(schedule), "a name or a function")
    if config.warmup:
        raise ValueError(
            f"warmup is {config.warmup}, but learning_rate_schedule is a function, which says "
            "itself how the rate begins; give one of them, or a schedule's name"
        )


def _check_decisions(config: TrainConfig) -> None:
    share = config.freeze_interval_share
    allowed = share is None or (_is_positive(share) and share <= 1)
    _require(config, "freeze_interval_share", allowed, "None or a number above 0, at most 1")
    intervals = {
        "freeze_interval_steps": config.freeze_interval_steps is not None,
        "freeze_interval_epochs": config.freeze_interval_epochs != 1,
        "freeze_interval_share": share is not None,
    }
    if sum(intervals.values()) > 1:
        given = " and ".join(name for name, is_given in intervals.items() if is_given)
        raise ValueError(f"{given} are given, which each say when to decide; give one of them")
    listed = isinstance(config.signals, (list, tuple, set, frozenset))
    known = f"a list of {', '.join(sorted(MEASURED_SIGNALS))}"
    _require(config, "signals", listed and set(config.signals) <= MEASURED_SIGNALS, known)
    # Two samples are told apart by one number; a similarity needs more.
    _require(config, "probe_samples", _is_whole(config.probe_samples, 4), "4 or more")


def _check_saving(config: TrainConfig) -> None:
    if config.folder is None and (config.saves or config.resume):
        raise ValueError(
            "checkpoint_every_epochs, checkpoint_every_steps and resume need a folder to save to; "
            "give folder=..."
        )
    if config.resume and not config.saves:
        raise ValueError(
            f"resume={config.resume!r} without checkpoint_every_epochs or checkpoint_every_steps "
            "would never save again; give checkpoint_every_epochs=1"
        )


def _require(config: TrainConfig, name: str, condition: bool, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {getattr(config, name)!r}; choose {allowed}")


def _is_whole(value: Any, least: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _are_metrics(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and name not in EVALUATION_FIELDS and callable(metric)
        for name, metric in value.items()
    )
