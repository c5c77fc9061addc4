"""Name every setting of a run in one frozen dataclass, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from pipetransformer.data import CollateFunction
from pipetransformer.optimizer import (
    LearningRateSchedule,
    check_warmup,
    constant,
    named_schedule,
)
from pipetransformer.planning import PLANS, Planner, usual_prefix_chunk

Metric = Callable[[Tensor, Any], tuple[float, float]]

_LEAST_STEP_LIMIT_S, _STEPS_A_WAIT = 60.0, 20
_EVALUATION_FIELDS = ("loss", "kind", "step", "elapsed_s", "epoch", "seconds")
"""What a record of an evaluation holds beside the metrics."""


@dataclass(frozen=True)
class TrainConfig:
    """Hold the settings of a run.

    Args:
        epochs: passes over the training set.
        global_batch_size: samples of a global batch, over all replicas: of one update. To fit it
            into memory it is cut into micro-batches, so there is no accumulation beside that.
        seed: of the sample order, of dataset reads and of dropout.
        learning_rate_schedule: (step, max_steps) -> factor on each parameter group's own rate, or
            a name that `named_schedule` takes.
        warmup: of a schedule by name: steps, or, as a float below 1, a share of the run.
        layer_decay: factor on the learning rate from each layer to the one below it; an embedding
            counts as a layer of its own below block 0. What policies see is the head's rate. None
            is 1.
        label_smoothing: share of each target that is spread over all classes, in training and
            evaluation, where the loss is the cross entropy of a known model or of torch.
        precision: "bf16" or "fp16" computes each sublayer in torch's autocast to it; what goes
            from sublayer to sublayer, between stages and into the cache is in it, too, while
            weights, loss, norms, sums of gradients and the optimizer are in float32. "fp16" scales
            the loss as torch.amp.GradScaler does. None computes as the weights are.
        max_grad_norm: largest norm of the whole model's gradient; None does not clip.
        on_nonfinite: what a NaN or infinite loss or gradient anywhere does: end the run, or skip
            the step everywhere. With "fp16" a gradient that overflows where the loss is finite
            always skips the step, and halves the loss's scale, down to a scale of 1.
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
        num_workers: processes of each rank that reads data, ahead of the steps; 0 reads within the
            step. Samples, their order and random numbers are the same for any number.
        prefetch_factor: steps that each of them is ahead.
        pin_memory: read into page-locked memory where training is on GPUs.
        collate_fn: makes a batch, a mapping or a tuple, of a list of the dataset's items; it gets
            a replica's samples of a step, which are so padded to their longest. One that draws
            random numbers gives others to other numbers of replicas. None stacks equal shapes.
        remove_unused_columns: keep columns that the model does not take from collate_fn.
        group_by_length: put samples of about equal lengths into a batch; the order of samples then
            depends on their lengths: the column "length", or that of the model's first input.
        folder: where records and checkpoints go; None writes nothing.
        checkpoint_every_epochs, checkpoint_every_steps: when to save, beside training, into the
            folder; what is due while the save before is still written may be left out, with a
            warning. 0 is never, and both may be set; with either, the run's end is saved, too.
        keep_checkpoints: how many of the newest checkpoints stay.
        resume: "auto" continues from the newest usable checkpoint in the folder, or starts where
            there is none; True insists on one; False starts, in a folder without a run. A process
            that its launcher (torchrun --max-restarts) started again continues in any case.
        evaluate_every_epochs: 0 evaluates only when asked.
        metrics: name -> function (output, targets) -> (sum, count), averaged over the evaluated
            examples; None is the accuracy where the output is (N, classes) and the targets are
            class indices.
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
    learning_rate_schedule: str | LearningRateSchedule = constant
    warmup: float = 0
    layer_decay: float | None = None
    label_smoothing: float = 0.0
    precision: Literal["bf16", "fp16"] | None = None
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
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = True
    collate_fn: CollateFunction | None = None
    remove_unused_columns: bool = True
    group_by_length: bool = False
    folder: str | Path | None = None
    checkpoint_every_epochs: int = 0
    checkpoint_every_steps: int = 0
    keep_checkpoints: int = 2
    resume: bool | Literal["auto"] = False
    evaluate_every_epochs: int = 1
    metrics: Mapping[str, Metric] | None = None
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
        self._check_learning_rate()
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
        for name in ("epochs", "global_batch_size", "keep_checkpoints", "prefetch_factor"):
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
        ):
            value = getattr(self, name)
            self._require(
                name, value is None or _is_whole(value, 1), "None or a whole number, at least 1"
            )
        for name in (
            "checkpoint_every_epochs",
            "checkpoint_every_steps",
            "evaluate_every_epochs",
            "num_workers",
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

    def _check_learning_rate(self) -> None:
        schedule, decay = self.learning_rate_schedule, self.layer_decay
        check_warmup(self.warmup)
        if isinstance(schedule, str):
            # The rate itself is the optimizer's, and known later.
            named_schedule(schedule, warmup=self.warmup, learning_rate=1.0)
        else:
            self._require("learning_rate_schedule", callable(schedule), "a name or a function")
            if self.warmup:
                raise ValueError(
                    f"warmup is {self.warmup}, but learning_rate_schedule is a function, which "
                    "says itself how the rate begins; give one of them, or a schedule's name"
                )
        self._require(
            "layer_decay",
            decay is None or (_is_positive(decay) and decay <= 1),
            "None or a number above 0, at most 1",
        )
        smoothing = self.label_smoothing
        self._require(
            "label_smoothing",
            smoothing == 0 or (_is_positive(smoothing) and smoothing < 1),
            "a number, 0 or more and below 1",
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
        if self.precision == "bf16-pure":
            raise ValueError(
                "precision is 'bf16-pure', but weights in bfloat16 lose every update smaller than "
                "their rounding, 1/256 of them, unless the optimizer keeps copies in float32, "
                "which torch's do not; choose 'bf16', which keeps the weights in float32"
            )
        for name, allowed in (
            ("precision", (None, "bf16", "fp16")),
            ("on_nonfinite", ("raise", "skip")),
            ("schedule", (None, "gpipe", "1f1b")),
            ("cache_dtype", (None, "bfloat16", "float16")),
            ("device", ("auto", "cpu", "cuda", "cuda-shared")),
        ):
            self._require(
                name, getattr(self, name) in allowed, f"one of {', '.join(map(repr, allowed))}"
            )
        for name in (
            "scale_batch",
            "cache",
            "progress",
            "pin_memory",
            "remove_unused_columns",
            "group_by_length",
        ):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        self._require(
            "resume",
            isinstance(self.resume, bool) or self.resume == "auto",
            "True, False or 'auto'",
        )
        self._require(
            "collate_fn",
            self.collate_fn is None or callable(self.collate_fn),
            "None or a function of a list of samples",
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
            f"None or functions by names other than {', '.join(_EVALUATION_FIELDS)}",
        )

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
        isinstance(name, str) and name not in _EVALUATION_FIELDS and callable(metric)
        for name, metric in value.items()
    )


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
