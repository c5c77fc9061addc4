"""Name every setting of a run in one frozen dataclass, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from autopipe.plan import PipelinePlan
from pipetransformer.config.other_names import advice_on
from pipetransformer.config.schedules import LearningRateSchedule, constant
from pipetransformer.config.setting_checks import (
    CollateFunction,
    ComputeMetrics,
    Metric,
    PreprocessLogits,
    check_settings,
)

_LEAST_STEP_LIMIT_S, _STEPS_A_WAIT = 60.0, 20
_MOST_CHUNK = 32


@dataclass(frozen=True)
class TrainConfig:
    """Hold the settings of a run.

    Args:
        epochs: passes over the training set.
        max_steps: steps after which the run is over, within the last of the epochs at the latest;
            None is the epochs' end.
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
        precision: "bf16" or "fp16" computes in torch's autocast to it, as a loop with one around
            the model does, while weights, loss, norms, sums of gradients and the optimizer are in
            float32. "fp16" scales the loss as torch.amp.GradScaler does. None computes as the
            weights are.
        max_grad_norm: largest norm of the whole model's gradient; None does not clip.
        on_nonfinite: what a NaN or infinite loss or gradient anywhere does: end the run, or skip
            the step everywhere. With "fp16" a gradient that overflows where the loss is finite
            always skips the step, and halves the loss's scale, down to a scale of 1.
        pipeline_length: stages K, or the longest below it where frozen layers, or a resume on
            other ranks, leave no room for it; None lets the planner choose at every decision.
        max_replicas: most pipelines R that train side by side; devices beyond them stay idle.
            None for as many as there is room for; each must have a sample in every step.
        stage_workers: processes of each stage of one pipeline, such as (2, 1), all processes in
            all: a stage's take micro-batches in turn. Its boundaries are planned; where layers
            freeze until there is less than a sublayer a stage, all become replicas of one. With
            `weight_versions` a step has a multiple of their common multiple in micro-batches.
        micro_batches: micro-batches M of a step; None lets the planner choose.
        micro_batch_size: samples of a micro-batch, without `micro_batches`: fixes where a global
            batch is cut, whatever K and R are. Dropout's masks belong to micro-batches, so that
            runs with one seed learn the same on any devices; without it they depend on the
            pipelines that were chosen.
        schedule: "gpipe" or "1f1b"; None lets the planner choose.
        weight_versions: trains without a flush between steps, as PipeDream does: weights are
            "stashed", "vertical_sync" or "double_buffered" (`autopipe.stashing.stashed_weights`),
            and with K > 1 not those of training without a pipeline. Between two pauses (a
            decision, an evaluation, a checkpoint, the end of an epoch) all steps are one stream:
            their results and events come at its end, weights are its end's, and `stop` stops
            there. None flushes.
        plan: how the pipeline is chosen at every decision: "fastest" takes the fastest of all,
            "published" follows the published rules, a function takes a `PlanSituation`.
            "pipedream" is PipeDream's optimizer, asked once at the start: the workers of its
            stages are the run's, as with `stage_workers`, and its boundaries stay while each stage
            has something to train; "data parallel" makes all processes replicas of one stage.
            With `weight_versions="stashed"` that is PipeDream as published, but that all stages
            update once a global batch.
        memory_limit_bytes: modelled bytes a device slot may use, in a step and in a transition, at
            most what is free on the GPUs before the first step; None is that without a margin for
            what no model counts (workspaces, communicators, fragments), and on CPUs no limit. What
            waits in host memory on any device is not counted: optimizer state of frozen layers,
            the cache, a checkpoint that is being written.
        freeze_interval_steps: steps between two decisions; None decides by epochs. At most one of
            the three intervals is set.
        freeze_interval_epochs: decides at the start of every so many epochs.
        freeze_interval_share: decides after every such share of the run, rounded to steps.
        signals: what is measured and recorded beside gradient norms and what the policy asks for,
            named as in `LayerStats`, so that other policies can be tried on the run later.
        probe_samples: samples of the training set, at least 4, spread evenly over it, on which
            probe signals look at every layer's outputs.
        scale_batch: let the batch grow with the replicas, global_batch_size each pipeline, as the
            published system did; the learning rate is scaled with it. Not with `max_steps`.
        cache: keep the frozen prefix's activations, where reading them is faster than computing.
        cache_check: whether a row that is read is held against what the data set gives now. With
            "sampled" one in four is in the first pass over the rows and one in 32 later, each time
            others: of 5 changed samples none is noticed at first with a chance of 24 %, of 20 with
            less than 1 %. "all" asks the data set for every sample, at every step. Targets are
            compared at every read, and changed ones trained, in either case, where the data set
            holds them apart: in a TensorDataset, a list, or `targets`, `labels` or `samples` as
            torchvision's have them.
        cache_device: where cached activations lie. "cuda" is in the GPU's memory, of several
            processes each by itself: after a shuffle it lacks what others have computed. "cpu" is
            in a file. "auto" is the GPU where one process trains, and all rows fit in half of what
            is free beside what it has used at most.
        cache_folder: where the cache's file lives; RAM by default. One on a disk is used where the
            disk alone, without memory's help, reads rows faster than they are computed. The
            default is replaced by the folder for temporary files where it has too little room;
            where that has not enough either, or another folder, fewer rows are kept.
        cache_limit_bytes: most bytes of rows of the training set on a node, and of the evaluation
            set's; None holds all samples. Those that do not fit are computed at every step.
        cache_dtype: "bfloat16" or "float16" stores activations in half the bytes: a sample then
            has rounded ones in every epoch and evaluation, whether a row holds them or not; None
            stores them as they are computed.
        cache_views: how many fixed views to take of each sample of a training set that is
            augmented at random: epoch e reads view e modulo so many; None takes a new one each
            epoch, which is not cached.
        prefix_chunk: samples the frozen prefix runs at a time, cached or not; None is a rank's
            share of the batch, on CPUs rounded up to a multiple of 8 and at most 32.
        num_workers: processes of each rank that reads data, ahead of the steps; 0 reads within the
            step. Samples, their order and random numbers are the same for any number. They read
            the dataset as it is at the first step: changes to it later do not reach them.
        prefetch_factor: steps that each of them is ahead.
        pin_memory: read into page-locked memory where training is on GPUs.
        collate_fn: makes a batch, a mapping or a tuple, of a list of the dataset's items; it gets
            a replica's samples of a step, in their order, which are so padded to their longest;
            before the first step also a few, to measure. One that draws random numbers, or mixes
            samples, gives others to other numbers of replicas. None stacks equal shapes.
        eval_collate_fn: likewise in evaluations and predictions, where mixup for instance has no
            place; None takes collate_fn, torch's default_collate stacks.
        remove_unused_columns: keep columns that the model does not take from collate_fn.
        sample_order: (epoch) -> (N,) int64, every index of the training set once, in the order of
            that epoch; the same on every rank and in a run that resumes. None shuffles.
        group_by_length: put samples of about equal lengths into a batch; the order of samples then
            depends on their lengths: the column "length", or that of the model's first input.
        folder: where records and checkpoints go; None writes nothing.
        tensorboard: write the records' numbers to folder/tensorboard, too, where TensorBoard is
            installed.
        checkpoint_every_epochs, checkpoint_every_steps: when to save, beside training, into the
            folder; what is due while the save before is still written may be left out, with a
            warning. 0 is never, and both may be set; with either, the run's end is saved, too.
        keep_checkpoints: how many of the newest checkpoints stay.
        resume: beside one of them: "auto" continues from the newest usable checkpoint in the
            folder, or starts where there is none; True insists on one; False starts, in a folder
            without a run; "replace" starts, and removes a run that is there. A process that its
            launcher (torchrun --max-restarts) started again continues in any case.
        eval_batch_size: samples that are evaluated at a time, over all replicas; None is the
            global batch's.
        evaluate_every_epochs: 0 evaluates only when asked.
        evaluate_every_steps: beside it; 0 is never. With either, the run's end is evaluated, too.
        metrics: name -> function (output, targets) -> (sum, count), averaged over the evaluated
            examples; None is the accuracy where the output is (N, classes) and the targets are
            class indices.
        compute_metrics: a function of an `EvalPrediction` of the whole data set that returns more
            metrics by name; called on rank 0 for all. Without it an evaluation keeps no outputs.
        preprocess_logits_for_metrics: a function (outputs, targets) -> a tensor of as many rows,
            called for each micro-batch of a data set where outputs are kept; what it returns
            is kept instead of them. Targets are a tensor, a tuple of several, or None.
        metric_for_best_model: which of an evaluation's metrics tells the best.
        greater_is_better: whether more of it is better; None is no for names that end in "loss",
            and yes for others.
        load_best_model_at_end: keep the best weights in folder/best, and end `fit` with them.
        early_stopping_patience: after how many evaluations in a row without improvement the run
            ends; None goes on.
        early_stopping_threshold: by how much a metric must be better to count as improvement.
        callbacks: told of events; the same on all ranks. See `Callback`.
        device: "auto" takes a GPU for each slot where there are enough, else the CPU;
            "cuda" refuses to train without so many, "cpu" leaves them alone, "cuda-shared" lets
            slots share GPUs, with messages through host memory: for tests.
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
    max_steps: int | None = None
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
    max_replicas: int | None = None
    stage_workers: tuple[int, ...] | None = None
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    weight_versions: Literal["stashed", "vertical_sync", "double_buffered"] | None = None
    plan: str | Callable[..., PipelinePlan] = "fastest"
    memory_limit_bytes: int | None = None
    freeze_interval_steps: int | None = None
    freeze_interval_epochs: int = 1
    freeze_interval_share: float | None = None
    signals: Sequence[str] = ()
    probe_samples: int = 64
    scale_batch: bool = False
    cache: bool = True
    cache_device: Literal["auto", "cpu", "cuda"] = "auto"
    cache_check: Literal["sampled", "all"] = "sampled"
    cache_folder: str | Path = "/dev/shm"
    cache_limit_bytes: int | None = None
    cache_dtype: Literal["bfloat16", "float16"] | None = None
    cache_views: int | None = None
    prefix_chunk: int | None = None
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = True
    collate_fn: CollateFunction | None = None
    eval_collate_fn: CollateFunction | None = None
    remove_unused_columns: bool = True
    sample_order: Callable[[int], Tensor] | None = None
    group_by_length: bool = False
    folder: str | Path | None = None
    tensorboard: bool = True
    checkpoint_every_epochs: int = 0
    checkpoint_every_steps: int = 0
    keep_checkpoints: int = 2
    resume: bool | Literal["auto", "replace"] = False
    eval_batch_size: int | None = None
    evaluate_every_epochs: int = 1
    evaluate_every_steps: int = 0
    metrics: Mapping[str, Metric] | None = None
    compute_metrics: ComputeMetrics | None = None
    preprocess_logits_for_metrics: PreprocessLogits | None = None
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
        check_settings(self)

    @property
    def saves(self) -> bool:
        return bool(self.checkpoint_every_epochs or self.checkpoint_every_steps)

    def plain(self) -> dict[str, Any]:
        """Return by name the settings that are one value; of a function it is the name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: getattr(value, "__name__", value) for name, value in named.items()}
        kinds = (int, float, str, type(None))
        return {name: value for name, value in plain.items() if isinstance(value, kinds)}

    def prefix_chunk_of(self, num_ranks: int, *, on_gpu: bool = False) -> int:
        """Return the samples that the frozen prefix runs at a time on so many ranks.

        A GPU gains by more of them at once, so there it is a rank's share of the batch.
        """
        if on_gpu and self.prefix_chunk is None:
            return math.ceil(self.global_batch_size / num_ranks)
        return self.prefix_chunk or usual_prefix_chunk(self.global_batch_size, num_ranks)

    def global_batch(self, replicas: int) -> int:
        """Return the samples of a step; with scale_batch, global_batch_size for each replica."""
        return self.global_batch_size * (replicas if self.scale_batch else 1)

    def most_replicas(self) -> int | None:
        """Return how many pipelines may train side by side, each with samples; None: any."""
        if self.scale_batch:
            return self.max_replicas
        most = self.most_micro_batches()
        return min(most, self.max_replicas or most)

    def most_micro_batches(self) -> int:
        """Return into how many micro-batches a batch of global_batch_size can be cut."""
        return math.ceil(self.global_batch_size / (self.micro_batch_size or 1))

    def step_limit_s(self, predicted_step_s: float) -> float:
        """Return the longest wait for another rank within a step of a predicted time.

        A step's own time is no limit: one rank may be slowed down, or read its data from afar.
        """
        if self.step_timeout_s is not None:
            return self.step_timeout_s
        return max(_LEAST_STEP_LIMIT_S, _STEPS_A_WAIT * predicted_step_s)


def make_config(settings: Mapping[str, Any]) -> TrainConfig:
    """Build a configuration from keyword settings.

    Raises:
        ValueError: a key is unknown or a value is not allowed.
    """
    known = [field.name for field in fields(TrainConfig)]
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(
            f"unknown setting(s) {', '.join(map(repr, unknown))}; {advice_on(unknown, known)}"
        )
    return TrainConfig(**settings)


def usual_prefix_chunk(global_batch: int, num_ranks: int) -> int:
    """Return how many samples the frozen prefix runs at a time, where nobody says.

    A rank's share of the batch, so that whole chunks are filled whatever the number of replicas;
    beyond 32 samples more make a layer hardly faster, and take memory. In multiples of 8, as
    kernels compute the odd rows at a chunk's end in another way, with other last bits.
    """
    return min(_MOST_CHUNK, -(-global_batch // (8 * num_ranks)) * 8)
