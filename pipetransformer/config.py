"""Name every setting of a run in one frozen dataclass, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from pipetransformer.planning import PLANS, Planner, usual_prefix_chunk

LearningRateSchedule = Callable[[float, int], float]
Metric = Callable[[Tensor, Any], tuple[float, float]]
ComputeMetrics = Callable[[Any], Mapping[str, float]]
"""Judges an `EvalPrediction`."""

_LEAST_STEP_LIMIT_S, _STEPS_A_WAIT = 60.0, 20
EVALUATION_FIELDS = ("loss", "kind", "step", "elapsed_s", "epoch", "seconds")
"""What a record of an evaluation holds beside the metrics."""


def cosine_with_warmup(warmup_fraction: float = 0.1) -> LearningRateSchedule:
    """Return a schedule that rises linearly, then falls along a half cosine to zero.

    Args:
        warmup_fraction: share of the run that warms up, in [0, 1).
    Returns:
        a function of (step, max_steps) that gives the factor on every group's learning rate, in
        [0, 1].
    Raises:
        ValueError: the share is out of range.
    """
    if not 0 <= warmup_fraction < 1:
        raise ValueError(f"warmup_fraction is {warmup_fraction}; choose a value in [0, 1)")

    def factor(step: float, max_steps: int) -> float:
        warmup = warmup_fraction * max_steps
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(max_steps - warmup, 1)))

    return factor


def polynomial_with_warmup(
    power: float = 2.0, warmup_fraction: float = 0.1
) -> LearningRateSchedule:
    """Return a schedule that rises linearly, then falls as (1 - t) ** power to zero.

    A power above 1 calms the layers earlier than a cosine does, so that they can freeze earlier.

    Args:
        power: at least 1.
        warmup_fraction: share of the run that warms up, in [0, 1).
    Returns:
        a function of (step, max_steps) that gives the factor on every group's learning rate.
    """
    if power < 1:
        raise ValueError(f"power is {power}; choose 1 or more")
    if not 0 <= warmup_fraction < 1:
        raise ValueError(f"warmup_fraction is {warmup_fraction}; choose a value in [0, 1)")

    def factor(step: float, max_steps: int) -> float:
        warmup = (step + 1) / (warmup_fraction * max_steps + 1)
        return float(min(warmup, (1 - min(step / max_steps, 1.0)) ** power))

    return factor


def constant(step: float, max_steps: int) -> float:
    """Keep the learning rate as the optimizer was built with."""
    return 1.0


@dataclass(frozen=True)
class TrainConfig:
    """Hold the settings of a run.

    Args:
        epochs: passes over the training set.
        global_batch_size: samples of a global batch, over all replicas.
        seed: of the sample order, of dataset reads and of dropout.
        learning_rate_schedule: (step, max_steps) -> factor on each parameter group's own rate.
        max_grad_norm: largest norm of the whole model's gradient; None does not clip.
        on_nonfinite: what a NaN or infinite loss or gradient anywhere does: end the run, or skip
            the step everywhere.
        pipeline_length: stages K, or the longest below it where frozen layers, or a resume on
            other ranks, leave no room for it; None lets the planner choose at every decision.
        micro_batches: micro-batches M of a step; None lets the planner choose.
        micro_batch_size: samples of a micro-batch: fixes where a global batch is cut, whatever K
            and R are. Dropout's masks belong to micro-batches, so that runs with one seed learn
            the same on any devices; without it they depend on the pipelines that were chosen.
        schedule: "gpipe" or "1f1b"; None lets the planner choose.
        plan: how the pipeline is chosen at every decision: "fastest" takes the fastest of all,
            "published" follows the published rules, a function takes a `PlanSituation`.
        memory_limit_bytes: modelled bytes a device slot may use, in a step and in a transition, at
            most what is free on the GPUs before the first step; None is that, and on CPUs no
            limit. What waits in host memory on any device is not counted: optimizer state of
            frozen layers, the cache, a checkpoint that is being written.
        freeze_interval_steps: steps between two decisions; None decides at the start of every
            epoch.
        scale_batch: let the batch grow with the replicas, global_batch_size each pipeline, as the
            published system did; the learning rate is scaled with it.
        cache: keep the frozen prefix's activations, where reading them is faster than computing.
        cache_folder: where the cache's file lives; RAM by default.
        cache_limit_bytes: most bytes of the training set's cache on a node, and of the evaluation
            set's; None holds all samples. Those that do not fit are computed at every step.
        cache_dtype: "bfloat16" or "float16" stores activations in half the bytes: a sample then
            has rounded ones in every epoch; None stores them as they are computed.
        cache_views: how many fixed views to take of each sample of a training set that is
            augmented at random: epoch e reads view e modulo so many; None takes a new one each
            epoch, which cannot be cached.
        prefix_chunk: samples the frozen prefix runs at a time, cached or not; None is a rank's
            share of the batch, rounded up to a multiple of 8 and at most 32.
        folder: where records and checkpoints go; None writes nothing.
        checkpoint_every_epochs, checkpoint_every_steps: when to save, beside training, into the
            folder; what is due while the save before is still written may be left out, with a
            warning. 0 is never, and both may be set; with either, the run's end is saved, too.
        keep_checkpoints: how many of the newest checkpoints stay.
        resume: "auto" continues from the newest usable checkpoint in the folder, or starts where
            there is none; True insists on one; False starts, in a folder without a run. A process
            that its launcher (torchrun --max-restarts) started again continues in any case.
        evaluate_every_epochs: 0 evaluates only when asked.
        evaluate_every_steps: beside it; 0 is never.
        metrics: name -> function (output, targets) -> (sum, count), averaged over the evaluated
            examples; None is the accuracy where the output is (N, classes) and the targets are
            class indices.
        compute_metrics: a function of an `EvalPrediction` of the whole data set that returns more
            metrics by name; called on rank 0 for all. Without it an evaluation keeps no outputs.
        metric_for_best_model: which of an evaluation's metrics tells the best.
        greater_is_better: whether more of it is better; None is no for names that end in "loss",
            and yes for others.
        load_best_model_at_end: keep the best weights in folder/best, and end `fit` with them.
        early_stopping_patience: after how many evaluations in a row without improvement the run
            ends; None goes on.
        early_stopping_threshold: by how much a metric must be better to count as improvement.
        callbacks: told of events; the same on all ranks. See `Callback`.
        device: "auto" takes a GPU for each slot where there are enough, else the CPU;
            "cuda-shared" lets slots share GPUs, with messages through host memory: for tests.
        step_timeout_s: longest wait for another rank within a step; None allows 20 steps as
            they are predicted, and at least 60 s.
        setup_timeout_s: longest wait while groups are built and state moves, and for the slowest
            rank's part of a checkpoint.
        progress: show a progress bar on rank 0.
        label: names the run beside the bar.
    Raises:
        ValueError: a value is not allowed; the message says which are.
    """

    epochs: int = 1
    global_batch_size: int = 32
    seed: int = 0
    learning_rate_schedule: LearningRateSchedule = constant
    max_grad_norm: float | None = None
    on_nonfinite: Literal["raise", "skip"] = "raise"
    pipeline_length: int | None = None
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    plan: str | Planner = "fastest"
    memory_limit_bytes: int | None = None
    freeze_interval_steps: int | None = None
    scale_batch: bool = False
    cache: bool = True
    cache_folder: str | Path = "/dev/shm"
    cache_limit_bytes: int | None = None
    cache_dtype: Literal["bfloat16", "float16"] | None = None
    cache_views: int | None = None
    prefix_chunk: int | None = None
    folder: str | Path | None = None
    checkpoint_every_epochs: int = 0
    checkpoint_every_steps: int = 0
    keep_checkpoints: int = 2
    resume: bool | Literal["auto"] = False
    evaluate_every_epochs: int = 1
    evaluate_every_steps: int = 0
    metrics: Mapping[str, Metric] | None = None
    compute_metrics: ComputeMetrics | None = None
    metric_for_best_model: str = "loss"
    greater_is_better: bool | None = None
    load_best_model_at_end: bool = False
    early_stopping_patience: int | None = None
    early_stopping_threshold: float = 0.0
    callbacks: Sequence[Any] = ()
    device: Literal["auto", "cpu", "cuda", "cuda-shared"] = "auto"
    step_timeout_s: float | None = None
    setup_timeout_s: float = 300.0
    progress: bool = True
    label: str = "train"

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        if self.micro_batches is not None and self.micro_batches > self.global_batch_size:
            raise ValueError(
                f"micro_batches is {self.micro_batches} for a global_batch_size of "
                f"{self.global_batch_size}; each needs a sample: choose at most "
                f"{self.global_batch_size}"
            )
        self._check_micro_batch_size()
        if self.folder is None and (self.saves or self.resume):
            raise ValueError(
                "checkpoint_every_epochs, checkpoint_every_steps and resume need a "
                "folder to save to; give folder=..."
            )
        if self.resume and not self.saves:
            raise ValueError(
                f"resume={self.resume!r} without checkpoint_every_epochs or "
                "checkpoint_every_steps would never save again; give "
                "checkpoint_every_epochs=1"
            )

    @property
    def saves(self) -> bool:
        """Tell whether checkpoints are written."""
        return bool(self.checkpoint_every_epochs or self.checkpoint_every_steps)

    def prefix_chunk_of(self, num_ranks: int) -> int:
        """Return the samples that the frozen prefix runs at a time on so many ranks."""
        return self.prefix_chunk or usual_prefix_chunk(self.global_batch_size, num_ranks)

    def global_batch(self, replicas: int) -> int:
        """Return the samples of a step; with scale_batch, global_batch_size for each replica."""
        return self.global_batch_size * (replicas if self.scale_batch else 1)

    def step_limit_s(self, predicted_step_s: float) -> float:
        """Return the longest wait for another rank within a step of a predicted time.

        A step's own time is no limit: one rank may be slowed down, or read its data from afar.
        """
        if self.step_timeout_s is not None:
            return self.step_timeout_s
        return max(_LEAST_STEP_LIMIT_S, _STEPS_A_WAIT * predicted_step_s)

    def _check_numbers(self) -> None:
        for name in ("epochs", "global_batch_size", "keep_checkpoints"):
            self._require(name, _is_whole(getattr(self, name), 1), "a whole number, at least 1")
        for name in (
            "pipeline_length",
            "micro_batches",
            "micro_batch_size",
            "memory_limit_bytes",
            "freeze_interval_steps",
            "cache_limit_bytes",
            "cache_views",
            "prefix_chunk",
            "early_stopping_patience",
        ):
            value = getattr(self, name)
            self._require(
                name, value is None or _is_whole(value, 1), "None or a whole number, at least 1"
            )
        for name in (
            "checkpoint_every_epochs",
            "checkpoint_every_steps",
            "evaluate_every_epochs",
            "evaluate_every_steps",
        ):
            self._require(name, _is_whole(getattr(self, name), 0), "a whole number, 0 or more")
        self._require("seed", _is_whole(self.seed, -math.inf), "a whole number")
        for name, optional in (("step_timeout_s", True), ("setup_timeout_s", False)):
            value = getattr(self, name)
            allowed = (_is_positive(value) and value < math.inf) or (optional and value is None)
            self._require(
                name, allowed, f"{'None or ' * optional}a finite number of seconds above 0"
            )
        self._require(
            "max_grad_norm",
            self.max_grad_norm is None or _is_positive(self.max_grad_norm),
            "None or a number above 0",
        )

        self._require(
            "early_stopping_threshold",
            _is_positive(self.early_stopping_threshold) or self.early_stopping_threshold == 0,
            "a number, 0 or more",
        )

    def _check_micro_batch_size(self) -> None:
        size = self.micro_batch_size
        if size is None:
            return
        if self.micro_batches is not None:
            raise ValueError(
                f"micro_batch_size is {size} and micro_batches is {self.micro_batches}; each "
                "follows from the other: give one of them"
            )
        if self.plan == "published":
            raise ValueError(
                f"micro_batch_size is {size}, but plan='published' chooses the micro-batches "
                "itself; leave one of them out"
            )
        if size > self.global_batch_size:
            raise ValueError(
                f"micro_batch_size is {size} for a global_batch_size of "
                f"{self.global_batch_size}; choose at most {self.global_batch_size}"
            )

    def _check_choices(self) -> None:
        for name, allowed in (
            ("on_nonfinite", ("raise", "skip")),
            ("schedule", (None, "gpipe", "1f1b")),
            ("cache_dtype", (None, "bfloat16", "float16")),
            ("greater_is_better", (None, False, True)),
            ("device", ("auto", "cpu", "cuda", "cuda-shared")),
        ):
            self._require(
                name, getattr(self, name) in allowed, f"one of {', '.join(map(repr, allowed))}"
            )
        for name in ("scale_batch", "cache", "progress", "load_best_model_at_end"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        self._require(
            "resume",
            isinstance(self.resume, bool) or self.resume == "auto",
            "True, False or 'auto'",
        )
        self._require(
            "learning_rate_schedule", callable(self.learning_rate_schedule), "a function"
        )
        self._require(
            "plan",
            callable(self.plan) or self.plan in tuple(PLANS),
            f"one of {', '.join(map(repr, PLANS))}, or a function",
        )
        self._require(
            "folder", self.folder is None or isinstance(self.folder, (str, Path)), "None or a path"
        )
        self._require("cache_folder", isinstance(self.cache_folder, (str, Path)), "a path")
        self._require(
            "metrics",
            self.metrics is None or _are_metrics(self.metrics),
            f"None or functions by names other than {', '.join(EVALUATION_FIELDS)}",
        )

        self._require(
            "compute_metrics",
            self.compute_metrics is None or callable(self.compute_metrics),
            "None or a function",
        )
        self._require(
            "metric_for_best_model", isinstance(self.metric_for_best_model, str), "a name"
        )
        self._require("callbacks", isinstance(self.callbacks, (list, tuple)), "a list of Callback")

    def _require(self, name: str, condition: bool, allowed: str) -> None:
        if not condition:
            raise ValueError(f"{name} is {getattr(self, name)!r}; choose {allowed}")


def make_config(settings: Mapping[str, Any]) -> TrainConfig:
    """Build a configuration from keyword settings.

    Raises:
        ValueError: a key is unknown or a value is not allowed.
    """
    known = {field.name for field in fields(TrainConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ValueError(
            f"unknown setting(s) {', '.join(map(repr, unknown))}; "
            f"known are {', '.join(sorted(known))}"
        )
    return TrainConfig(**settings)


def _is_whole(value: Any, least: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_metrics(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and name not in EVALUATION_FIELDS and callable(metric)
        for name, metric in value.items()
    )


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
