"""Name every setting of a run: its type, its rule, its default and its meaning in one place.

A rule stands beside the type, or follows from it: `bool`, `Literal`, and `None` where the type has
it. Error messages and `help(TrainConfig)` are made from the rules and the sentences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import Tensor

from autopipe.plan import PipelinePlan
from autopipe.schedule import SCHEDULES
from freeze import MEASURED_SIGNALS
from pipetransformer.config import rules
from pipetransformer.config.contradictions import contradictions
from pipetransformer.config.schedules import LearningRateSchedule, constant, named_schedule
from pipetransformer.hints import did_you_mean

CollateFunction = Callable[[list[Any]], Any]
Metric = Callable[[Tensor, Any], tuple[Tensor | float, Tensor | float]]
ComputeMetrics = Callable[[Any], Mapping[str, float]]
"""Judges an `EvalPrediction`."""
PreprocessLogits = Callable[[Tensor, Any], Tensor]
"""Reduces a micro-batch's outputs to what is kept of them."""

EVALUATION_FIELDS = ("loss", "kind", "step", "elapsed_s", "epoch", "seconds")
"""What a record of an evaluation holds beside the metrics."""

_BESIDE = ("freeze", "loss_fn", "optimizer", "train_dataset", "eval_dataset")
"""Arguments of the Trainer that are no settings."""

_LEAST_STEP_LIMIT_S, _STEPS_A_WAIT = 60.0, 20
_COMPILING_S = 600.0
_MOST_CHUNK = 32

_STAGE_COUNTS = rules.Rule(
    lambda value: rules.is_list(value) and len(value) > 1 and all(map(rules.COUNT.allows, value)),
    "whole numbers of at least 1 for two stages or more",
)
_PLANNER = rules.Rule(
    lambda value: callable(value) or value in rules.PLANS,
    f"one of {', '.join(map(repr, rules.PLANS))}, or a function",
)
_SIGNALS = rules.Rule(
    lambda value: (
        (rules.is_list(value) or isinstance(value, (set, frozenset)))
        and all(isinstance(name, str) and name in MEASURED_SIGNALS for name in value)
    ),
    f"a list of {', '.join(sorted(MEASURED_SIGNALS))}",
)
# Two samples are told apart by one number; a similarity needs more.
_PROBES = rules.Rule(lambda value: rules.is_whole(value) and value >= 4, "4 or more")
_RESUME = rules.Rule(
    lambda value: rules.FLAG.allows(value) or value in ("auto", "replace"),
    "True, False, 'auto' or 'replace'",
)
_AUTO_OR_FLAG = rules.Rule(
    lambda value: rules.FLAG.allows(value) or value == "auto", "True, False or 'auto'"
)
_METRICS = rules.Rule(
    lambda value: (
        isinstance(value, Mapping)
        and all(rules.NAME.allows(name) and name not in EVALUATION_FIELDS for name in value)
        and all(map(callable, value.values()))
    ),
    f"functions by names other than {', '.join(EVALUATION_FIELDS)}",
)
_CALLBACKS = rules.Rule(rules.is_list, "a list of Callback")
_PARTS = rules.Rule(
    lambda value: rules.is_list(value) and all(map(rules.NAME.allows, value)),
    "a list of names of the model's modules",
)


@rules.documented
@dataclass(frozen=True)
class TrainConfig:
    """Hold the settings of a run.

    Raises:
        ValueError: a value is not allowed, or two contradict each other. The message says what is
            allowed.
    """

    # Length, batch and learning rate

    epochs: Annotated[int, rules.COUNT] = 1
    """Passes over the training set."""
    max_steps: Annotated[int | None, rules.COUNT] = None
    """Steps after which the run ends, if the epochs have not ended before."""
    global_batch_size: Annotated[int, rules.COUNT] = 32
    """Samples of one update, over all replicas. They are cut into micro-batches that fit into
    memory, so there is no accumulation beside that."""
    seed: Annotated[int, rules.WHOLE] = 0
    """Seeds the sample order, the reading of samples and dropout."""
    learning_rate_schedule: Annotated[str | LearningRateSchedule, rules.NAME_OR_CALL] = constant
    """(step, max_steps) -> factor on each parameter group's own rate, or a name that
    `named_schedule` takes."""
    warmup: Annotated[float, rules.WARMUP] = 0
    """Warm-up of a schedule by name: steps or, as a float below 1, a share of the run."""
    layer_decay: Annotated[float | None, rules.SHARE] = None
    """Factor on the learning rate from each layer to the one below it; None is 1. An embedding
    counts as a layer of its own below block 0. Policies see the head's rate."""
    label_smoothing: Annotated[float, rules.SHARE_BELOW_1] = 0.0
    """Share of each target that is spread over all classes, in training and evaluation. The loss
    must be the cross entropy of a known model or of torch."""
    precision: Literal["bf16", "fp16"] | None = None
    """Computes in torch's autocast to this dtype; None computes in the weights' own. Weights,
    loss, norms, sums of gradients and the optimizer stay in float32. "fp16" scales the loss as
    torch.amp.GradScaler does."""
    compile: bool = False
    """Compile blocks for training steps, forward and backward, with torch.compile. Equal blocks
    share one graph, whatever the lengths. Graphs are made before the first step; a freeze adds at
    most one. Embedding, head, frozen prefix and evaluation are not compiled. Dropout draws other
    numbers than without."""
    compile_backend: Annotated[str, rules.NAME] = "inductor"
    """What compiles, as `torch.compiler.list_backends(())` names it."""
    compile_mode: Literal["max-autotune-no-cudagraphs"] | None = None
    """How long inductor searches for fast kernels; None is torch's usual way. CUDA graphs are not
    offered: their outputs do not outlive the next micro-batch."""
    cuda_graph: bool = False
    """Launch a step on a run's only GPU at once, as a CUDA graph, from the second batch of each
    shape on. Worth it where a step computes for less time than Python takes to launch it. What
    cannot be captured is launched as ever, and one line says why. Learning rates are kept in
    float32 on the GPU, so weights may differ from a run without in their last bits."""
    max_grad_norm: Annotated[float | None, rules.POSITIVE] = None
    """Largest norm of the whole model's gradient; None does not clip."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """What a NaN or infinite loss or gradient on any rank does: end the run, or skip the step on
    all ranks. With "fp16" a gradient that overflows under a finite loss always skips the step. It
    also halves the loss's scale, down to 1."""

    # Pipeline

    pipeline_length: Annotated[int | None, rules.COUNT] = None
    """Stages K; None lets the planner choose at every decision. Where frozen layers, or fewer
    ranks after a resume, leave no room for K, the longest pipeline below it is used."""
    max_replicas: Annotated[int | None, rules.COUNT] = None
    """Most pipelines R that train side by side; further devices stay idle. None sets no limit, but
    each pipeline must have a sample in every step."""
    stage_workers: Annotated[tuple[int, ...] | None, _STAGE_COUNTS] = None
    """Processes of each stage of one pipeline, such as (2, 1); together they are all processes.
    The processes of a stage take micro-batches in turn, and the planner sets the boundaries. Once
    fewer sublayers than stages train, all processes become replicas of one stage. With
    `weight_versions` the micro-batches of a step are a multiple of the counts' common multiple."""
    micro_batches: Annotated[int | None, rules.COUNT] = None
    """Micro-batches M of a step; None lets the planner choose."""
    micro_batch_size: Annotated[int | None, rules.COUNT] = None
    """Samples of a micro-batch, in place of `micro_batches`: a batch is cut alike whatever K and R
    are. Dropout masks belong to micro-batches, so runs with one seed then learn the same on any
    devices. Without it they depend on the pipelines that were chosen."""
    schedule: Annotated[str | None, rules.one_of(None, *SCHEDULES)] = None
    """"gpipe" or "1f1b"; None lets the planner choose."""
    weight_versions: Literal["stashed", "vertical_sync", "double_buffered"] | None = None
    """Trains without a flush between steps, as PipeDream does; None flushes. See
    `autopipe.stashing` for the three. With K > 1 the weights differ from those of
    training without a pipeline. All steps between two pauses (a decision, an evaluation, a
    checkpoint, an epoch's end) are one stream. Results and events come at its end, with the
    weights of its end, and `stop` stops there."""
    plan: Annotated[str | Callable[..., PipelinePlan], _PLANNER] = "fastest"
    """How the pipeline is chosen at every decision. "fastest" takes the fastest plan of all,
    "published" follows the published rules, and a function takes a `PlanSituation`. "pipedream"
    chooses once, at the start, the stages' workers with the highest simulated rate: they are used
    as `stage_workers` are. "pipedream_paper" chooses by the formula of PipeDream's paper. The
    boundaries stay while each stage has something to train. Where the answer is one stage, all
    processes are its replicas. With `weight_versions="stashed"` this is PipeDream as published,
    except that all stages update once a global batch."""
    memory_limit_bytes: Annotated[int | None, rules.COUNT] = None
    """Modelled bytes that a device slot may use, in a step and in a transition; never more than
    what is free on the GPUs before the first step. None is that, less a margin for workspaces,
    communicators and fragments, which no model counts; on CPUs it is no limit. Host memory is not
    counted: optimizer state of frozen layers, the cache, a checkpoint that is being written."""

    activation_checkpointing: Annotated[bool | Literal["auto"], _AUTO_OR_FLAG] = "auto"
    """Keep only the inputs of sublayers, and run them forward again in the backward, with the same
    random numbers. Gradients stay what they are; memory for activations falls, and a step costs
    one more forward. "auto" does so where the memory limit excludes the fastest plan without. The
    head keeps its activations, and frozen layers never have any."""

    # Freezing

    freeze_interval_steps: Annotated[int | None, rules.COUNT] = None
    """Steps between two decisions; None decides by epochs, or as often as the policy asks to. At
    most one interval may be set."""
    freeze_interval_epochs: Annotated[int, rules.COUNT] = 1
    """Epochs between two decisions, each at an epoch's start."""
    freeze_interval_share: Annotated[float | None, rules.SHARE] = None
    """Share of the run between two decisions, rounded to steps."""
    signals: Annotated[Sequence[str], _SIGNALS] = ()
    """Signals to record beside gradient norms and those that the policy asks for, named as in
    `LayerStats`. Other policies can then be tried on the run later."""
    probe_samples: Annotated[int, _PROBES] = 64
    """Samples of the training set, evenly spread, on which probe signals compare outputs."""
    scale_batch: bool = False
    """Let the batch grow with the replicas, global_batch_size each, as the published system did.
    The learning rate is scaled with it. Not with `max_steps`."""

    parts: Annotated[Sequence[str], _PARTS] = ()
    """Names of modules that are frozen wherever they are in the model, such as
    "model.vision_tower". They stay in eval mode, and the cache keeps what they return. Nothing
    else freezes, so give no `freeze`. All processes are replicas of one stage."""

    # Cache

    cache: bool = True
    """Keep the frozen prefix's activations where reading them is faster than computing them."""
    cache_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where cached activations lie: "cpu" is a file, "cuda" the GPU's memory. Each of several
    processes has its own GPU memory, and keeps its samples while the replicas stay. "auto" has
    as many rows on GPUs as fit into half of what is free there at the peak, and the others in the
    file. Each of several processes then has its part of the rows."""
    cache_check: Literal["sampled", "all"] = "sampled"
    """Whether the rows that are read are compared with the data set's present samples. "sampled"
    compares one row in four in the first pass over the rows. Each later pass compares other rows,
    one in 32. It misses 5 changed samples at first with a chance of 24 %, and 20 with less
    than 1 %. "all" reads every sample at every step. Targets are compared at every read in either
    case, and changed ones are trained, where the data set holds them apart. That is a
    TensorDataset, a list, a column of a `datasets.Dataset`, or `targets`, `labels` or `samples` as
    in torchvision."""
    cache_folder: Annotated[str | Path | Sequence[str | Path], rules.PATHS] = "/dev/shm"
    """Where the cache's file lives; RAM by default. A folder on a disk is used if the disk reads
    rows faster than they are computed, without memory's help. Where the default has too little
    room, the folder for temporary files is used. Where that or another folder has too little,
    fewer rows are kept. Of a list of folders each takes what the one before has no room for, as in
    `["/dev/shm", "/data/rows"]`."""
    cache_limit_bytes: Annotated[int | Sequence[int] | None, rules.COUNTS] = None
    """Most bytes of a node's rows, for the training set and again for the evaluation set. A list
    has one number for each folder, beside what a GPU has room for. None holds all samples; those
    that do not fit are computed at every step, and all if less than a tenth fits. Texts of unequal
    lengths count by their mean length, on a GPU by the longest, when it is chosen which have rows.
    With `cache_keep` it is the most of all that the folder holds, and sets that were not used for
    longest are removed."""
    cache_keep: bool = False
    """Keep rows in `cache_folder` when the run ends. Later runs read those that they would compute
    themselves: of the same frozen layers, data, processing, device and `prefix_chunk`. A row is
    compared with its sample when a run first reads it, unless `cache_fingerprint` vouches for the
    data. Runs may share a folder at once."""
    cache_fingerprint: Annotated[str | None, rules.NAME] = None
    """Your own name for the data and all that is done to a sample, such as "cifar10-224-v2". Rows
    that were kept under it are trusted: no sample is read for the sake of comparing, beyond
    `cache_check`. Change it whenever the data or the processing change."""
    cache_dtype: Literal["bfloat16", "float16", "int8"] | None = None
    """Stores activations in half of float32's bytes, or in a quarter, with one scale a token; None
    stores them as they are computed. A sample then has rounded activations in every epoch and
    evaluation, whether a row holds them or not. How that changes a batch's loss is logged once."""
    cache_views: Annotated[int | None, rules.COUNT] = None
    """Fixed views V of each sample of a training set that is augmented at random: epoch e reads
    view e modulo V. None takes a new view in each epoch, which is not cached."""
    prefix_chunk: Annotated[int | None, rules.COUNT] = None
    """Samples that the frozen prefix runs at a time, cached or not. None is a rank's share of the
    batch, on CPUs rounded up to a multiple of 8, and at most 32."""

    tied_weights: Literal["train", "freeze", "untie"] = "train"
    """What becomes of a tensor that a frozen layer shares with one above it, such as an embedding
    that is the head's matrix, too. With "train" it goes on training, so that nothing is lost, but
    nothing is cached. "freeze" freezes it with its first layer, as `requires_grad_(False)` does.
    "untie" gives the head a copy of its own before the first step, and the model is saved so."""

    # Data

    num_workers: Annotated[int, rules.COUNT_FROM_0] = 0
    """Processes that read data ahead of the steps, for each rank that reads; 0 reads in the step.
    Samples, their order and random numbers are the same for any number. Workers read the dataset
    as it is at the first step; later changes do not reach them."""
    prefetch_factor: Annotated[int, rules.COUNT] = 2
    """Steps that each worker is ahead."""
    pin_memory: bool = True
    """Read into page-locked memory where training is on GPUs."""
    collate_fn: Annotated[CollateFunction | None, rules.FUNCTION] = None
    """Makes a batch, a mapping or a tuple, of a list of the dataset's items; None stacks equal
    shapes. It gets a replica's samples of a step in their order, so it pads to their longest; and
    before the first step a few, to measure. If it draws random numbers or mixes samples, its
    batches depend on the number of replicas."""
    eval_collate_fn: Annotated[CollateFunction | None, rules.FUNCTION] = None
    """The same for evaluations and predictions, where mixup, for instance, has no place. None
    takes collate_fn; torch's default_collate stacks."""
    remove_unused_columns: bool = True
    """Keep columns that the model does not take from collate_fn."""
    sample_order: Annotated[Callable[[int], Tensor] | None, rules.FUNCTION] = None
    """(epoch) -> (N,) int64, every index of the training set once, in that epoch's order; None
    shuffles, on several nodes such that each has the same samples in every epoch. It must be the
    same on every rank and in a run that resumes."""
    group_by_length: bool = False
    """Put samples of about equal lengths into a batch. The length is the column "length", or that
    of the model's first input. The order of samples then depends on lengths."""

    # Folder and checkpoints

    folder: Annotated[str | Path | None, rules.PATH] = None
    """Where records and checkpoints go; None writes nothing."""
    tensorboard: bool = True
    """Write the records' numbers to folder/tensorboard, too, if TensorBoard is installed."""
    checkpoint_every_epochs: Annotated[int, rules.COUNT_FROM_0] = 0
    """Epochs between two checkpoints; 0 is never. Writing goes on beside training: a checkpoint
    that is due meanwhile may be left out, with a warning."""
    checkpoint_every_steps: Annotated[int, rules.COUNT_FROM_0] = 0
    """Steps between two checkpoints, beside those of epochs; 0 is never. With either of the two,
    the run's end is saved, too."""
    keep_checkpoints: Annotated[int, rules.COUNT] = 2
    """How many of the newest checkpoints stay."""
    resume: Annotated[bool | Literal["auto", "replace"], _RESUME] = False
    """"auto" continues from the newest usable checkpoint in the folder, or starts if there is
    none. True insists on one. False starts, in a folder without a run. "replace" removes a run
    that is there, and starts. A process that its launcher restarted (torchrun --max-restarts)
    continues in any case."""

    # Evaluation

    eval_batch_size: Annotated[int | None, rules.COUNT] = None
    """Samples that are evaluated at a time, over all replicas; None is global_batch_size."""
    evaluate_every_epochs: Annotated[int, rules.COUNT_FROM_0] = 1
    """Epochs between two evaluations; 0 is never."""
    evaluate_every_steps: Annotated[int, rules.COUNT_FROM_0] = 0
    """Steps between two evaluations, beside those of epochs; 0 is never. With either of the two,
    the run's end is evaluated, too."""
    metrics: Annotated[Mapping[str, Metric] | None, _METRICS] = None
    """Name -> function (output, targets) -> (sum, count), averaged over the evaluated examples.
    None is the accuracy if the output is (N, classes) and the targets are class indices."""
    compute_metrics: Annotated[ComputeMetrics | None, rules.FUNCTION] = None
    """(EvalPrediction of the whole data set) -> more metrics by name, called on rank 0. Without it
    an evaluation keeps no outputs."""
    preprocess_logits_for_metrics: Annotated[PreprocessLogits | None, rules.FUNCTION] = None
    """(outputs, targets) -> a tensor with as many rows, which is kept instead of the outputs. It
    is called for each micro-batch where outputs are kept. Targets are a tensor, a tuple of
    several, or None."""
    metric_for_best_model: Annotated[str, rules.NAME] = "loss"
    """The metric by which the best evaluation is chosen."""
    greater_is_better: Annotated[bool | None, rules.one_of(None, False, True)] = None
    """Whether more of that metric is better. None is no for names that end in "loss", else yes."""
    load_best_model_at_end: bool = False
    """Keep the best weights in folder/best, and end `fit` with them."""
    early_stopping_patience: Annotated[int | None, rules.COUNT] = None
    """Evaluations in a row without improvement after which the run ends; None goes on."""
    early_stopping_threshold: Annotated[float, rules.NUMBER_FROM_0] = 0.0
    """By how much a metric must be better to count as an improvement."""
    callbacks: Annotated[Sequence[Any], _CALLBACKS] = ()
    """Told of events; the same on all ranks. See `Callback`."""

    # Processes

    device: Literal["auto", "cpu", "cuda", "cuda-shared"] = "auto"
    """"auto" takes a GPU for each slot if there are enough, or if each process of a node sees one
    that no other sees; else the CPU. "cuda" insists on the GPUs, and "cpu" leaves them alone.
    "cuda-shared", for tests, lets slots share GPUs, with messages through host memory."""
    step_timeout_s: Annotated[float | None, rules.SECONDS] = None
    """Longest wait for another rank within a step. None allows 20 predicted steps, and at least
    60 s. With `compile` ten minutes are added to either, as a rank may compile within a step."""
    setup_timeout_s: Annotated[float, rules.SECONDS] = 300.0
    """Longest wait while groups are built, while state moves, and for the slowest rank's part of a
    checkpoint."""
    progress: bool = True
    """Show a progress bar on rank 0."""
    label: str = "train"
    """Names the run beside the bar."""

    def __post_init__(self) -> None:
        if self.precision == "bf16-pure":
            raise ValueError(
                "precision is 'bf16-pure', but weights in bfloat16 lose every update smaller than "
                "their rounding, 1/256 of them, unless the optimizer keeps copies in float32, "
                "which torch's do not; choose 'bf16', which keeps the weights in float32"
            )
        for name, rule in rules.of_fields(TrainConfig).items():
            rule.check(name, getattr(self, name))
        for reason in contradictions(self):
            raise ValueError(reason)
        if isinstance(self.learning_rate_schedule, str):
            # The rate itself is the optimizer's, and known later.
            named_schedule(self.learning_rate_schedule, warmup=self.warmup, learning_rate=1.0)

    @property
    def recompute(self) -> tuple[bool, ...]:
        """Return whether plans may recompute activations, as a `PlanRequest` takes it."""
        asked = self.activation_checkpointing
        return (False, True) if asked == "auto" else (asked,)

    @property
    def cache_folders(self) -> tuple[Path, ...]:
        """Return the folders of the cache's files, the first to be filled first."""
        folder = self.cache_folder
        return tuple(map(Path, [folder] if isinstance(folder, (str, Path)) else folder))

    @property
    def cache_limits(self) -> tuple[int | None, ...]:
        """Return the most bytes of rows in each folder; None for no limit of its own."""
        limits = self.cache_limit_bytes
        if limits is None or isinstance(limits, int):
            return (None,) * len(self.cache_folders)
        return tuple(limits)

    @property
    def cache_limit(self) -> int | None:
        """Return the most bytes of all rows; None where there is none, or one for each folder."""
        limit = self.cache_limit_bytes
        return limit if isinstance(limit, int) else None

    @property
    def own_intervals(self) -> list[str]:
        """Name the settings that say when a policy decides, of those that are given."""
        given = {
            "freeze_interval_steps": self.freeze_interval_steps is not None,
            "freeze_interval_epochs": self.freeze_interval_epochs != 1,
            "freeze_interval_share": self.freeze_interval_share is not None,
        }
        return [name for name, is_given in given.items() if is_given]

    @property
    def saves(self) -> bool:
        return bool(self.checkpoint_every_epochs or self.checkpoint_every_steps)

    def deciding_every(self, share: float | None) -> TrainConfig:
        """Return the settings with a policy's own interval where none is set; None changes
        nothing.
        """
        if share is None or self.own_intervals:
            return self
        return replace(self, freeze_interval_share=share)

    def plain(self) -> dict[str, Any]:
        """Return by name the settings that are one value; a function is its name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: getattr(value, "__name__", value) for name, value in named.items()}
        kinds = (int, float, str, type(None))
        return {name: value for name, value in plain.items() if isinstance(value, kinds)}

    def prefix_chunk_of(self, num_ranks: int, *, on_gpu: bool = False) -> int:
        """Return the samples that the frozen prefix runs at a time.

        A GPU gains by larger chunks, so there it is a rank's share of the batch.
        """
        if on_gpu and self.prefix_chunk is None:
            return math.ceil(self.global_batch_size / num_ranks)
        return self.prefix_chunk or usual_prefix_chunk(self.global_batch_size, num_ranks)

    def global_batch(self, replicas: int) -> int:
        """Return the samples of a step."""
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
        """Return the longest wait for another rank within a step.

        A step's own time is no limit: one rank may be slowed down, or read its data from afar.
        """
        usual_s = max(_LEAST_STEP_LIMIT_S, _STEPS_A_WAIT * predicted_step_s)
        limit_s = usual_s if self.step_timeout_s is None else self.step_timeout_s
        return limit_s + self.compile * _COMPILING_S


def make_config(settings: Mapping[str, Any]) -> TrainConfig:
    """Build a configuration from keyword settings.

    Raises:
        ValueError: a key is unknown or a value is not allowed.
    """
    known = [field.name for field in fields(TrainConfig)]
    if unknown := sorted(set(settings) - set(known)):
        meant = did_you_mean(unknown, [*known, *_BESIDE], most=3)
        raise ValueError(
            f"unknown setting(s) {', '.join(map(repr, unknown))}{meant or ';'} "
            "help(pipetransformer.TrainConfig) lists all"
        )
    return TrainConfig(**settings)


def usual_prefix_chunk(global_batch: int, num_ranks: int) -> int:
    """Return the samples that the frozen prefix runs at a time if no setting says it.

    It is a rank's share of the batch, so whole chunks are filled for any number of replicas. Above
    32 samples a layer hardly gets faster, and takes more memory. Multiples of 8 avoid odd rows at
    a chunk's end, which kernels compute in another way, with other last bits.
    """
    return min(_MOST_CHUNK, -(-global_batch // (8 * num_ranks)) * 8)
