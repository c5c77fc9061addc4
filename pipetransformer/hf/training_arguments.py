"""Read transformers' TrainingArguments: what is honoured, changes nothing, or is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from pipetransformer.optimizer import NamedParameters, OptimizerFactory, named_schedule
from pipetransformer.processes import world_size

_HONOURED = """
    output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay
    adam_beta1 adam_beta2 adam_epsilon max_grad_norm label_smoothing_factor bf16 fp16
    logging_strategy logging_steps logging_first_step disable_tqdm report_to run_name
    eval_strategy eval_steps per_device_eval_batch_size save_strategy save_steps save_total_limit
    load_best_model_at_end metric_for_best_model greater_is_better seed data_seed use_cpu
    dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor remove_unused_columns
    train_sampling_strategy length_column_name ddp_timeout
""".split()  # noqa: SIM905
"""Fields that `settings_of` reads, or the Trainer itself."""

_HARMLESS = """
    average_tokens_across_devices log_on_each_node logging_nan_inf_filter log_level
    log_level_replica project trackio_space_id trackio_bucket_id trackio_static_space_id
    do_train do_eval do_predict resume_from_checkpoint local_rank skip_memory_metrics
    eval_accumulation_steps dataloader_persistent_workers dataloader_in_order
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
    ddp_backend hub_model_id hub_token hub_strategy hub_private_repo hub_always_push hub_revision
    use_cache torch_empty_cache_steps label_names
""".split()  # noqa: SIM905
"""Fields that a script reads, that choose among ways to the same numbers, or that matter only with
one that is refused; `label_names` may say what the model has as its targets."""

_LABELS = {"label", "labels", "label_ids", "start_positions", "end_positions"}

_CHOICES = {
    "save_strategy": ("no", "steps", "epoch"),
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
}
_KEEP_ALL = 1_000_000


@dataclass(frozen=True)
class Length:
    """Say how long a run is: its epochs, whole or begun, and all its steps."""

    epochs: int
    steps: int


def refuse_unknown(args: TrainingArguments) -> None:
    """Raise a ValueError that names every field with a value that would not be honoured."""
    usual = TrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu)
    names = [field.name for field in fields(TrainingArguments)]
    changed = [
        name
        for name in names
        if name not in {*_HONOURED, *_HARMLESS} and getattr(args, name) != getattr(usual, name)
    ]
    if changed:
        given = ", ".join(f"{name}={getattr(args, name)!r}" for name in changed)
        raise ValueError(
            f"TrainingArguments has {given}, which pipetransformer.hf.Trainer does not honour; "
            "leave them as they are by default, or train with transformers.Trainer"
        )
    if other := sorted(set(args.label_names or ()) - _LABELS):
        raise ValueError(
            f"label_names has {other}, but labels are what the model calls so; leave it out"
        )
    for name, choices in _CHOICES.items():
        value = getattr(args, name)
        if value not in choices:
            given = getattr(value, "value", value)
            raise ValueError(f"{name} is {given!r}; choose one of {', '.join(choices)}")


def global_batch_size(args: TrainingArguments) -> int:
    """Return the samples of an update: as many as with transformers on as many devices."""
    per_process = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return per_process * world_size()


def length_of(args: TrainingArguments, num_samples: int) -> Length:
    """Return how long a run over so many samples is."""
    per_epoch = -(-num_samples // global_batch_size(args))
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    return Length(-(-steps // per_epoch), steps)


def settings_of(
    args: TrainingArguments, num_samples: int, peak_learning_rate: float
) -> dict[str, Any]:
    """Return the fields of `TrainConfig` that arguments stand for.

    Args:
        args: checked by `refuse_unknown`.
        num_samples: of the training set.
        peak_learning_rate: the optimizer's, which need not be `args.learning_rate`.
    """
    length = length_of(args, num_samples)
    ends_within = args.max_steps > 0 or not float(args.num_train_epochs).is_integer()
    settings = {
        # Each has a step at least, whatever the batch with which a run is resumed.
        "epochs": args.max_steps if args.max_steps > 0 else length.epochs,
        "max_steps": length.steps if ends_within else None,
        "global_batch_size": global_batch_size(args),
        "eval_batch_size": args.per_device_eval_batch_size * world_size(),
        "seed": args.seed,
        "learning_rate_schedule": _schedule_of(args, length, peak_learning_rate),
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
        "max_grad_norm": args.max_grad_norm or None,
        "label_smoothing": args.label_smoothing_factor,
        "metrics": {},
        "device": "cpu" if args.use_cpu else "auto",
        "progress": not args.disable_tqdm,
        "setup_timeout_s": float(args.ddp_timeout),
        "folder": args.output_dir,
        "label": args.run_name or "train",
        "num_workers": args.dataloader_num_workers,
        "prefetch_factor": args.dataloader_prefetch_factor or 2,
        "pin_memory": args.dataloader_pin_memory,
        "remove_unused_columns": args.remove_unused_columns,
        "keep_checkpoints": args.save_total_limit or _KEEP_ALL,
    }
    settings |= _every("checkpoint", args.save_strategy, args.save_steps, length)
    settings |= _every("evaluate", args.eval_strategy, args.eval_steps, length)
    if args.metric_for_best_model is not None and args.eval_strategy != "no":
        settings |= {
            "load_best_model_at_end": args.load_best_model_at_end,
            "metric_for_best_model": str(args.metric_for_best_model).removeprefix("eval_"),
            "greater_is_better": args.greater_is_better,
        }
    return settings | _order_of(args, num_samples)


def optimizer_of(
    args: TrainingArguments, model: Any, given: tuple[type[Optimizer], dict[str, Any]] | None
) -> OptimizerFactory:
    """Return a factory of the optimizer that transformers would build, over parts of the model.

    Args:
        args: name it, where none is given.
        model: whose biases and norms do not decay, as transformers counts them.
        given: a class and its keywords.
    """
    kind, keywords = given or Trainer.get_optimizer_cls_and_kwargs(args, model)
    # It needs nothing of a Trainer, and is no function of its own.
    without: Any = None
    decaying = set(Trainer.get_decay_parameter_names(without, model))

    def build(named: NamedParameters) -> Optimizer:
        groups = [
            {
                "params": [p for name, p in named if (name in decaying) == decays],
                "weight_decay": args.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        optimizer: Optimizer = kind([group for group in groups if group["params"]], **keywords)
        return optimizer

    return build


def peak_learning_rate_of(optimizer: OptimizerFactory) -> float:
    """Return the rate that an optimizer begins with, before any schedule."""
    return float(optimizer([("weight", nn.Parameter(torch.zeros(2, 2)))]).param_groups[0]["lr"])


def _schedule_of(args: TrainingArguments, length: Length, peak_learning_rate: float) -> Any:
    name = transformers.SchedulerType(args.lr_scheduler_type).value
    warmup = 0 if name == "constant" else int(args.get_warmup_steps(length.steps))
    options: Any = args.lr_scheduler_kwargs or {}
    return named_schedule(name, warmup=warmup, learning_rate=peak_learning_rate, **options)


def _every(what: str, strategy: Any, steps: float | None, length: Length) -> dict[str, int]:
    """Return how often something is done, as our settings say it."""
    epochs, every = f"{what}_every_epochs", f"{what}_every_steps"
    if strategy == "epoch":
        return {epochs: 1, every: 0}
    if strategy == "no" or steps is None:
        return {epochs: 0, every: 0}
    # A share of the run, below 1, is transformers' other way to say it.
    return {epochs: 0, every: math.ceil(length.steps * steps) if steps < 1 else int(steps)}


def _order_of(args: TrainingArguments, num_samples: int) -> dict[str, Any]:
    """Return in which order samples come: transformers' own, for the same seed."""
    if args.train_sampling_strategy == "group_by_length":
        if args.data_seed not in (None, args.seed):
            raise ValueError(
                f"data_seed is {args.data_seed}, but samples that are grouped by length are "
                f"shuffled by seed={args.seed}; leave data_seed out"
            )
        return {"group_by_length": True}
    if args.train_sampling_strategy == "sequential":
        return {"sample_order": partial(_in_order, num_samples=num_samples)}
    seed = args.seed if args.data_seed is None else args.data_seed
    return {"sample_order": partial(_shuffled, num_samples=num_samples, seed=seed)}


def _in_order(epoch: int, *, num_samples: int) -> Tensor:
    return torch.arange(num_samples)


def _shuffled(epoch: int, *, num_samples: int, seed: int) -> Tensor:
    """Shuffle as accelerate's SeedableRandomSampler, which transformers' Trainer goes through."""
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_samples, generator=generator)
