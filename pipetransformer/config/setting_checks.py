"""Refuse settings that are not allowed, each by its name with what is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autopipe.schedule import SCHEDULES
from autopipe.stashing import VERSION_RULES
from freeze import MEASURED_SIGNALS
from pipetransformer.config.schedules import check_warmup, named_schedule

if TYPE_CHECKING:  # It is checked by this as it is made.
    from pipetransformer.config.train_config import TrainConfig

PLANS = ("fastest", "published", "pipedream")
"""Planners by name."""

CollateFunction = Callable[[list[Any]], Any]
Metric = Callable[[Tensor, Any], tuple[Tensor | float, Tensor | float]]
ComputeMetrics = Callable[[Any], Mapping[str, float]]
"""Judges an `EvalPrediction`."""
PreprocessLogits = Callable[[Tensor, Any], Tensor]
"""Makes of a micro-batch's outputs what is kept of them."""

EVALUATION_FIELDS = ("loss", "kind", "step", "elapsed_s", "epoch", "seconds")
"""What a record of an evaluation holds beside the metrics."""


@dataclass(frozen=True)
class _Rule:
    """Say which values of a setting are allowed, to us and to the user."""

    allows: Callable[[Any], bool]
    text: str


def _optional(rule: _Rule) -> _Rule:
    return _Rule(lambda value: value is None or rule.allows(value), f"None or {rule.text}")


def _one_of(*choices: Any) -> _Rule:
    return _Rule(lambda value: value in choices, f"one of {', '.join(map(repr, choices))}")


def _whole_from(least: int, text: str) -> _Rule:
    return _Rule(lambda value: _is_whole(value) and value >= least, text)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _are_counts_of_stages(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 1 and all(map(_COUNT.allows, value))


def _are_signals(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and all(
        isinstance(one, str) and one in MEASURED_SIGNALS for one in value
    )


def _are_metrics(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and name not in EVALUATION_FIELDS and callable(metric)
        for name, metric in value.items()
    )


_COUNT = _whole_from(1, "a whole number, at least 1")
_COUNT_FROM_0 = _whole_from(0, "a whole number, 0 or more")
_SECONDS = _Rule(
    lambda value: _is_positive(value) and value < math.inf, "a finite number of seconds above 0"
)
_POSITIVE = _Rule(_is_positive, "a number above 0")
_SHARE = _Rule(lambda value: _is_positive(value) and value <= 1, "a number above 0, at most 1")
_FLAG = _Rule(lambda value: isinstance(value, bool), "True or False")
_FUNCTION = _Rule(callable, "a function")
_PATH = _Rule(lambda value: isinstance(value, (str, Path)), "a path")

_RULES: Mapping[str, _Rule] = {
    "epochs": _COUNT,
    "max_steps": _optional(_COUNT),
    "global_batch_size": _COUNT,
    "seed": _Rule(_is_whole, "a whole number"),
    "learning_rate_schedule": _Rule(
        lambda value: isinstance(value, str) or callable(value), "a name or a function"
    ),
    "layer_decay": _optional(_SHARE),
    "label_smoothing": _Rule(
        lambda value: value == 0 or (_is_positive(value) and value < 1),
        "a number, 0 or more and below 1",
    ),
    "precision": _one_of(None, "bf16", "fp16"),
    "max_grad_norm": _optional(_POSITIVE),
    "on_nonfinite": _one_of("raise", "skip"),
    "pipeline_length": _optional(_COUNT),
    "max_replicas": _optional(_COUNT),
    "stage_workers": _optional(
        _Rule(_are_counts_of_stages, "whole numbers of at least 1 for two stages or more")
    ),
    "micro_batches": _optional(_COUNT),
    "micro_batch_size": _optional(_COUNT),
    "schedule": _one_of(None, *SCHEDULES),
    "weight_versions": _one_of(None, *VERSION_RULES),
    "plan": _Rule(
        lambda value: callable(value) or value in PLANS,
        f"one of {', '.join(map(repr, PLANS))}, or a function",
    ),
    "memory_limit_bytes": _optional(_COUNT),
    "freeze_interval_steps": _optional(_COUNT),
    "freeze_interval_epochs": _COUNT,
    "freeze_interval_share": _optional(_SHARE),
    "signals": _Rule(_are_signals, f"a list of {', '.join(sorted(MEASURED_SIGNALS))}"),
    # Two samples are told apart by one number; a similarity needs more.
    "probe_samples": _whole_from(4, "4 or more"),
    "scale_batch": _FLAG,
    "cache": _FLAG,
    "cache_device": _one_of("auto", "cpu", "cuda"),
    "cache_check": _one_of("sampled", "all"),
    "cache_folder": _PATH,
    "cache_limit_bytes": _optional(_COUNT),
    "cache_dtype": _one_of(None, "bfloat16", "float16"),
    "cache_views": _optional(_COUNT),
    "prefix_chunk": _optional(_COUNT),
    "num_workers": _COUNT_FROM_0,
    "prefetch_factor": _COUNT,
    "pin_memory": _FLAG,
    "collate_fn": _optional(_FUNCTION),
    "eval_collate_fn": _optional(_FUNCTION),
    "remove_unused_columns": _FLAG,
    "sample_order": _optional(_FUNCTION),
    "group_by_length": _FLAG,
    "folder": _optional(_PATH),
    "checkpoint_every_epochs": _COUNT_FROM_0,
    "checkpoint_every_steps": _COUNT_FROM_0,
    "keep_checkpoints": _COUNT,
    "resume": _Rule(
        lambda value: isinstance(value, bool) or value in ("auto", "replace"),
        "True, False, 'auto' or 'replace'",
    ),
    "eval_batch_size": _optional(_COUNT),
    "evaluate_every_epochs": _COUNT_FROM_0,
    "evaluate_every_steps": _COUNT_FROM_0,
    "metrics": _optional(
        _Rule(_are_metrics, f"functions by names other than {', '.join(EVALUATION_FIELDS)}")
    ),
    "compute_metrics": _optional(_FUNCTION),
    "preprocess_logits_for_metrics": _optional(_FUNCTION),
    "metric_for_best_model": _Rule(lambda value: isinstance(value, str), "a name"),
    "greater_is_better": _one_of(None, False, True),
    "load_best_model_at_end": _FLAG,
    "tensorboard": _FLAG,
    "early_stopping_patience": _optional(_COUNT),
    "early_stopping_threshold": _Rule(
        lambda value: value == 0 or _is_positive(value), "a number, 0 or more"
    ),
    "callbacks": _Rule(lambda value: isinstance(value, (list, tuple)), "a list of Callback"),
    "device": _one_of("auto", "cpu", "cuda", "cuda-shared"),
    "step_timeout_s": _optional(_SECONDS),
    "setup_timeout_s": _SECONDS,
    "progress": _FLAG,
}


def check_settings(config: TrainConfig) -> None:
    """Raise a ValueError for the first setting, or pair of settings, that is not allowed."""
    if config.precision == "bf16-pure":
        raise ValueError(
            "precision is 'bf16-pure', but weights in bfloat16 lose every update smaller than "
            "their rounding, 1/256 of them, unless the optimizer keeps copies in float32, "
            "which torch's do not; choose 'bf16', which keeps the weights in float32"
        )
    for name, rule in _RULES.items():
        value = getattr(config, name)
        if not rule.allows(value):
            raise ValueError(f"{name} is {value!r}; choose {rule.text}")
    _check_samples(config)
    _check_batches(config)
    _check_workers(config)
    _check_pipedream(config)
    _check_versions(config)
    _check_learning_rate(config)
    _check_decisions(config)
    _check_saving(config)


def _check_samples(config: TrainConfig) -> None:
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


def _check_pipedream(config: TrainConfig) -> None:
    if config.plan != "pipedream":
        return
    others = {
        "pipeline_length": config.pipeline_length is not None,
        "max_replicas": config.max_replicas is not None,
        "stage_workers": config.stage_workers is not None,
        "scale_batch": config.scale_batch,
        "schedule='gpipe'": config.schedule == "gpipe",
    }
    _leave_out(
        "plan is 'pipedream', which makes one 1F1B pipeline of all processes, or replicas of one "
        "stage, and chooses which",
        others,
    )


def _check_versions(config: TrainConfig) -> None:
    if config.weight_versions is None:
        return
    others = {
        "max_grad_norm": config.max_grad_norm is not None,
        "precision='fp16'": config.precision == "fp16",
        "on_nonfinite='skip'": config.on_nonfinite == "skip",
        "schedule='gpipe'": config.schedule == "gpipe",
        "plan='published'": config.plan == "published",
    }
    _leave_out(
        f"weight_versions is {config.weight_versions!r}: a stage updates before it could hear of "
        "the others' gradients, and runs 1F1B alone",
        others,
    )
    if config.stage_workers is not None:
        _check_turns(config, math.lcm(*config.stage_workers))


def _check_turns(config: TrainConfig, turn: int) -> None:
    """Refuse steps of which a stage's workers would not get equally many micro-batches."""
    count, most = config.micro_batches, config.most_micro_batches()
    if config.micro_batch_size is not None:
        count = most
    if most < turn or (count or turn) % turn:
        raise ValueError(
            f"stage_workers {config.stage_workers} take the micro-batches of all steps in turn "
            f"with weight_versions=, so that a step needs a multiple of {turn}, and has "
            f"{count or most}; set micro_batches, micro_batch_size or global_batch_size to that"
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
    if config.warmup:
        raise ValueError(
            f"warmup is {config.warmup}, but learning_rate_schedule is a function, which says "
            "itself how the rate begins; give one of them, or a schedule's name"
        )


def _check_decisions(config: TrainConfig) -> None:
    intervals = {
        "freeze_interval_steps": config.freeze_interval_steps is not None,
        "freeze_interval_epochs": config.freeze_interval_epochs != 1,
        "freeze_interval_share": config.freeze_interval_share is not None,
    }
    if sum(intervals.values()) > 1:
        given = " and ".join(name for name, is_given in intervals.items() if is_given)
        raise ValueError(f"{given} are given, which each say when to decide; give one of them")


def _check_saving(config: TrainConfig) -> None:
    if config.folder is None and (config.saves or config.resume):
        raise ValueError(
            "checkpoint_every_epochs, checkpoint_every_steps and resume need a folder to save to; "
            "give folder=..."
        )
    if config.resume in (True, "auto") and not config.saves:
        raise ValueError(
            f"resume={config.resume!r} without checkpoint_every_epochs or checkpoint_every_steps "
            "would never save again; give checkpoint_every_epochs=1"
        )
