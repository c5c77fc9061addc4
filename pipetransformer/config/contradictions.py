"""Say which settings of a run contradict each other, though each is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pipetransformer.config.rules import PIPEDREAM_PLANS

if TYPE_CHECKING:
    from pipetransformer.config.train_config import TrainConfig


def contradictions(config: TrainConfig) -> Iterator[str]:
    """Yield what is wrong with settings that are each allowed, the first first."""
    if config.sample_order is not None and config.group_by_length:
        yield "sample_order and group_by_length both say in which order samples come; give one"
    yield from _in_compiling(config)
    yield from _in_the_batch(config)
    yield from _in_the_pipeline(config)
    yield from _beside_parts(config)
    if config.warmup and not isinstance(config.learning_rate_schedule, str):
        yield (
            f"warmup is {config.warmup}, but learning_rate_schedule is a function, which says "
            "itself how the rate begins; give one of them, or a schedule's name"
        )
    if len(intervals := config.own_intervals) > 1:
        yield (
            f"{' and '.join(intervals)} are given, which each say when to decide; give one of them"
        )
    yield from _in_keeping_rows(config)
    if config.folder is None and (config.saves or config.resume):
        yield (
            "checkpoint_every_epochs, checkpoint_every_steps and resume need a folder to save to; "
            "give folder=..."
        )
    if config.resume in (True, "auto") and not config.saves:
        yield (
            f"resume={config.resume!r} without checkpoint_every_epochs or checkpoint_every_steps "
            "would never save again; give checkpoint_every_epochs=1"
        )


def _in_keeping_rows(config: TrainConfig) -> Iterator[str]:
    folders = config.cache_folders
    if len(set(folders)) < len(folders) or len(config.cache_limits) != len(folders):
        yield (
            f"cache_folder is {config.cache_folder!r} and cache_limit_bytes is "
            f"{config.cache_limit_bytes!r}; name each folder once, and give one number for all, "
            "or a list with one for each"
        )
    if config.cache_keep and len(folders) > 1:
        yield (
            f"cache_keep=True keeps rows in one folder, and cache_folder names {len(folders)}; "
            "name one"
        )
    if config.cache_keep and config.cache_folder == type(config).cache_folder:
        yield (
            f"cache_keep=True would leave rows in {config.cache_folder}, this machine's memory, "
            "for good; give cache_folder=, a folder of your own"
        )
    if config.cache_keep and config.cache_device == "cuda":
        yield (
            "cache_keep=True keeps rows in a file, and cache_device is 'cuda', the GPU's memory; "
            "leave one of them out"
        )
    if config.cache_fingerprint is not None and not config.cache_keep:
        yield (
            f"cache_fingerprint is {config.cache_fingerprint!r}, which has no effect without "
            "cache_keep=True; set that, or leave it out"
        )


def _in_compiling(config: TrainConfig) -> Iterator[str]:
    backend, mode = config.compile_backend, config.compile_mode
    if not config.compile and (backend != "inductor" or mode is not None):
        yield (
            f"compile_backend is {backend!r} and compile_mode is {mode!r}, which have no effect "
            "without compile=True; set that, or leave them out"
        )
    if mode is not None and backend != "inductor":
        yield (
            f"compile_mode is {mode!r}, which inductor alone knows, and compile_backend is "
            f"{backend!r}; leave one of them out"
        )


def _in_the_batch(config: TrainConfig) -> Iterator[str]:
    count, size, whole = config.micro_batches, config.micro_batch_size, config.global_batch_size
    if config.max_steps is not None and config.scale_batch:
        yield (
            f"max_steps is {config.max_steps}, but with scale_batch=True a step's samples follow "
            "from the replicas; give epochs"
        )
    if count is not None and count > whole:
        yield (
            f"micro_batches is {count} for a global_batch_size of {whole}; each needs a sample: "
            f"choose at most {whole}"
        )
    if size is not None and count is not None:
        yield (
            f"micro_batch_size is {size} and micro_batches is {count}; each follows from the "
            "other: give one of them"
        )
    if size is not None and config.plan == "published":
        yield (
            f"micro_batch_size is {size}, but plan='published' chooses the micro-batches itself; "
            "leave one of them out"
        )
    if size is not None and size > whole:
        yield (
            f"micro_batch_size is {size} for a global_batch_size of {whole}; choose at most "
            f"{whole}"
        )


def _in_the_pipeline(config: TrainConfig) -> Iterator[str]:
    """Yield which settings do not go with one 1F1B pipeline, or with training without a flush."""
    one_pipeline = {
        "pipeline_length": config.pipeline_length is not None,
        "max_replicas": config.max_replicas is not None,
        "scale_batch": config.scale_batch,
        "schedule='gpipe'": config.schedule == "gpipe",
    }
    published = {"plan='published'": config.plan == "published"}
    if config.stage_workers is not None:
        yield from _beside(
            f"stage_workers is {config.stage_workers}, which makes one 1F1B pipeline of all "
            "processes",
            one_pipeline | published,
        )
    if config.plan in PIPEDREAM_PLANS:
        yield from _beside(
            f"plan is {config.plan!r}, which makes one 1F1B pipeline of all processes, or "
            "replicas of one stage, and chooses which",
            one_pipeline | {"stage_workers": config.stage_workers is not None},
        )
    if config.weight_versions is None:
        return
    yield from _beside(
        f"weight_versions is {config.weight_versions!r}: a stage updates before it could hear of "
        "the others' gradients, and runs 1F1B alone",
        {
            "max_grad_norm": config.max_grad_norm is not None,
            "precision='fp16'": config.precision == "fp16",
            "on_nonfinite='skip'": config.on_nonfinite == "skip",
            "schedule='gpipe'": config.schedule == "gpipe",
            **published,
        },
    )
    # Each worker of a stage must get equally many micro-batches of a step.
    turn, count = math.lcm(*config.stage_workers or (1,)), config.micro_batches
    most = config.most_micro_batches()
    if config.micro_batch_size is not None:
        count = most
    if most < turn or (count or turn) % turn:
        yield (
            f"stage_workers {config.stage_workers} take the micro-batches of all steps in turn "
            f"with weight_versions=, so that a step needs a multiple of {turn}, and has "
            f"{count or most}; set micro_batches, micro_batch_size or global_batch_size to that"
        )


def _beside_parts(config: TrainConfig) -> Iterator[str]:
    """Yield what has no meaning where parts are frozen, or would need a second stage."""
    if not config.parts:
        return
    yield from _beside(
        f"parts are {[*config.parts]}, which one stage runs, with all that lies around them, and "
        "in a loop of your own attach(model, parts=...)",
        {
            f"pipeline_length={config.pipeline_length}": (config.pipeline_length or 1) > 1,
            "stage_workers": config.stage_workers is not None,
            "weight_versions": config.weight_versions is not None,
            f"plan={config.plan!r}": config.plan in PIPEDREAM_PLANS,
            "compile": config.compile,
            "layer_decay": config.layer_decay is not None,
            "tied_weights": config.tied_weights != "train",
        },
    )


def _beside(why: str, others: Mapping[str, bool]) -> Iterator[str]:
    if given := [name for name, is_given in others.items() if is_given]:
        yield f"{why}; leave {' and '.join(given)} out"
