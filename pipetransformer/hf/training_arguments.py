"""Read transformers' TrainingArguments, and refuse what a script would not get."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from pipetransformer.config import named_schedule
from pipetransformer.model import NamedParameters, OptimizerFactory, entry_names
from pipetransformer.processes import world_size

_KNOWN = """
    output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay
    adam_beta1 adam_beta2 adam_epsilon max_grad_norm label_smoothing_factor bf16 fp16
    logging_strategy logging_steps logging_first_step disable_tqdm report_to run_name
    eval_strategy eval_steps per_device_eval_batch_size save_strategy save_steps save_total_limit
    load_best_model_at_end metric_for_best_model greater_is_better seed data_seed use_cpu
    dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor remove_unused_columns
    train_sampling_strategy ddp_timeout log_level log_level_replica log_on_each_node
    torch_compile torch_compile_backend torch_compile_mode
    gradient_checkpointing activation_checkpointing

    average_tokens_across_devices logging_nan_inf_filter
    project trackio_space_id trackio_bucket_id trackio_static_space_id
    do_train do_eval do_predict resume_from_checkpoint local_rank
    eval_accumulation_steps dataloader_persistent_workers dataloader_in_order
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
    ddp_backend hub_model_id hub_token hub_strategy hub_private_repo hub_always_push hub_revision
    use_cache torch_empty_cache_steps label_names
    gradient_checkpointing_kwargs activation_checkpointing_kwargs
""".split()  # noqa: SIM905
"""Fields that are honoured, above the empty line; below it those without an effect on training.

Scripts or callbacks read them, they choose among ways to the same numbers, or they matter only
with a field that is refused. docs/from-transformers.md lists them. `label_names` must be the
model's own targets."""

_CHOICES = {
    "save_strategy": ("no", "steps", "epoch"),
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
    # CUDA graphs, which the others use, overwrite their outputs in the next micro-batch.
    "torch_compile_mode": (None, "default", "max-autotune-no-cudagraphs"),
}
_KEEP_ALL = 1_000_000


def refuse_arguments(args: TrainingArguments, model: Any, settings: Mapping[str, Any]) -> None:
    """Raise a ValueError for arguments that would not be honoured for a model, beside settings."""
    refuse_unknown(args)
    _refuse_more_outputs(model)
    _refuse_other_labels(args, model)
    _refuse_shares(args, settings)


def refuse_unknown(args: TrainingArguments) -> None:
    """Raise a ValueError that names every field with a value that would not be honoured."""
    usual = TrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu)
    others = [field.name for field in fields(TrainingArguments) if field.name not in _KNOWN]
    changed = [name for name in others if getattr(args, name) != getattr(usual, name)]
    if changed:
        given = ", ".join(f"{name}={getattr(args, name)!r}" for name in changed)
        raise ValueError(
            f"TrainingArguments has {given}, which pipetransformer.hf.Trainer does not honour; "
            "leave them as they are by default, or train with transformers.Trainer"
        )
    for name, choices in _CHOICES.items():
        value = getattr(args, name)
        if value not in choices:
            given = getattr(value, "value", value)
            text = ", ".join(str(choice) for choice in choices)
            raise ValueError(f"{name} is {given!r}; choose one of {text}")


def settings_of(
    args: TrainingArguments, num_samples: int, optimizer: OptimizerFactory
) -> dict[str, Any]:
    """Return the fields of `TrainConfig` that arguments stand for.

    Args:
        args: checked by `refuse_unknown`.
        optimizer: its learning rate need not be `args.learning_rate`.
    """
    # As many samples an update as with transformers on as many devices.
    per_process = args.per_device_train_batch_size * args.gradient_accumulation_steps
    global_batch_size = per_process * world_size()
    per_epoch = -(-num_samples // global_batch_size)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    ends_within = args.max_steps > 0 or not float(args.num_train_epochs).is_integer()
    settings = {
        # An epoch has at least one step, so this many epochs reach max_steps with any batch.
        "epochs": args.max_steps if args.max_steps > 0 else -(-steps // per_epoch),
        "max_steps": steps if ends_within else None,
        "global_batch_size": global_batch_size,
        "eval_batch_size": args.per_device_eval_batch_size * world_size(),
        "seed": args.seed,
        "learning_rate_schedule": _schedule_of(args, optimizer),
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
        "compile": args.torch_compile,
        "compile_backend": args.torch_compile_backend or "inductor",
        "compile_mode": None if (mode := args.torch_compile_mode) == "default" else mode,
        "max_grad_norm": args.max_grad_norm or None,
        "label_smoothing": args.label_smoothing_factor,
        "metrics": {},
        "device": "cpu" if args.use_cpu else "auto",
        "progress": not args.disable_tqdm,
        "setup_timeout_s": float(args.ddp_timeout),
        "folder": args.output_dir,
        "tensorboard": "tensorboard" in (args.report_to or ()),
        "label": args.run_name or "train",
        "num_workers": args.dataloader_num_workers,
        "prefetch_factor": args.dataloader_prefetch_factor or 2,
        "pin_memory": args.dataloader_pin_memory,
        "remove_unused_columns": args.remove_unused_columns,
        # Below 1 keeps all, as in transformers.
        "keep_checkpoints": limit if (limit := args.save_total_limit or 0) > 0 else _KEEP_ALL,
        # Older versions of transformers know only one of the two names.
        "activation_checkpointing": args.gradient_checkpointing
        or getattr(args, "activation_checkpointing", False)
        or "auto",
    }
    settings |= _every("checkpoint", args.save_strategy, args.save_steps, steps)
    settings |= _every("evaluate", args.eval_strategy, args.eval_steps, steps)
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
        model: its biases and norms do not decay, as in transformers.
        given: the optimizer's class and keywords; None is args.optim.
    """
    kind, keywords = given or Trainer.get_optimizer_cls_and_kwargs(args, model)
    # It is a method, but uses nothing of a Trainer.
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


def _schedule_of(args: TrainingArguments, optimizer: OptimizerFactory) -> Any:
    name = transformers.SchedulerType(args.lr_scheduler_type).value
    warmup = 0 if name == "constant" else args.warmup_steps
    # The rate is in the optimizer's keywords or defaults, so one is built to be asked.
    begun = optimizer([("weight", nn.Parameter(torch.zeros(2, 2)))])
    rate = float(begun.param_groups[0]["lr"])
    options: Any = args.lr_scheduler_kwargs or {}
    # A share stays a share, as settings may make the run longer.
    warmup = float(warmup) if warmup < 1 else int(warmup)
    return named_schedule(name, warmup=warmup, learning_rate=rate, **options)


def _every(what: str, strategy: Any, given: float | None, steps: int) -> dict[str, int]:
    """Return our settings for how often something is done."""
    every = 0
    if strategy == "steps" and given is not None:
        # Below 1 transformers takes it as a share of the run.
        every = math.ceil(steps * given) if given < 1 else int(given)
    return {f"{what}_every_epochs": int(strategy == "epoch"), f"{what}_every_steps": every}


def _order_of(args: TrainingArguments, num_samples: int) -> dict[str, Any]:
    """Return the setting of the sample order: transformers' own, for the same seed."""
    if args.train_sampling_strategy == "group_by_length":
        if args.data_seed not in (None, args.seed):
            raise ValueError(
                f"data_seed is {args.data_seed}, but samples that are grouped by length are "
                f"shuffled by seed={args.seed}; leave data_seed out"
            )
        return {"group_by_length": True}
    if args.train_sampling_strategy == "sequential":
        return {"sample_order": lambda epoch: torch.arange(num_samples)}
    seed = args.seed if args.data_seed is None else args.data_seed

    def shuffled(epoch: int) -> Tensor:
        # As accelerate's SeedableRandomSampler, which transformers' Trainer goes through.
        generator = torch.Generator().manual_seed(seed + epoch)
        return torch.randperm(num_samples, generator=generator)

    return {"sample_order": shuffled}


_OF_INSTANCES = ("accelerator", "lr_scheduler", "model_wrapped", "optimizer")
"""Attributes of instances of transformers' Trainer that its class lacks."""
_STAGES = "each stage has its own; give args.optim or optimizer_cls_and_kwargs"
_HUB = "call save_model(), and upload the folder"
_INSTEAD = {
    "hyperparameter_search": "make a Trainer for each trial, in an output_dir of its own",
    "pop_callback": "call remove_callback()",
    **dict.fromkeys(("push_to_hub", "init_hf_repo"), _HUB),
    **dict.fromkeys(("optimizer", "lr_scheduler", "create_optimizer"), _STAGES),
}


def _refuse_more_outputs(model: Any) -> None:
    """Refuse a model that returns more than logits; predictions would lack the rest."""
    config = getattr(model, "config", None)
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(config, name, False):
            raise ValueError(
                f"model.config.{name} is True, but predictions hold the logits alone; set it to "
                "False"
            )


def _refuse_other_labels(args: TrainingArguments, model: Any) -> None:
    """Refuse label names that differ, or differ in order, from those that predictions hold."""
    if args.label_names is None:
        return
    asked, targets = list(args.label_names), list(entry_names(model).targets)
    if asked != targets:
        raise ValueError(
            f"label_names has {asked}, but a {type(model).__name__} calls its labels {targets}; "
            "leave it out"
        )


def _refuse_shares(args: TrainingArguments, settings: Mapping[str, Any]) -> None:
    """Refuse intervals as shares of the arguments' run, if settings change the run's length."""
    changed = sorted({"epochs", "max_steps", "global_batch_size"} & settings.keys())
    for name in ("eval_steps", "save_steps", "logging_steps"):
        if changed and 0 < (getattr(args, name) or 0) < 1:
            raise ValueError(
                f"{name} is a share of the run, which {', '.join(changed)} changes; give steps"
            )


def refuse_unselected(args: TrainingArguments, settings: Mapping[str, Any]) -> None:
    """Refuse to choose the best evaluation if evaluations are calls of `evaluate`."""
    chosen = [n for n in ("metric_for_best_model", "load_best_model_at_end") if getattr(args, n)]
    chosen += ["early_stopping_patience"] * bool(settings.get("early_stopping_patience"))
    if chosen:
        raise ValueError(
            f"{', '.join(chosen)} cannot be honoured, as evaluations in the run are calls of "
            "evaluate: of a subclass, of several eval_datasets, or of one without labels; leave "
            "it out, or give one labelled eval_dataset and compute_metrics"
        )


def refuse_own_loss(args: TrainingArguments, loss_fn: Any) -> None:
    """Refuse a second loss beside a subclass's `compute_loss`."""
    beside = [("loss_fn", loss_fn), ("label_smoothing_factor", args.label_smoothing_factor)]
    if given := [name for name, value in beside if value]:
        raise ValueError(
            f"{given[0]} would have no effect beside a compute_loss of the subclass; leave one of "
            "them out"
        )


def refuse_overrides(kind: type, parent: type) -> None:
    """Refuse a subclass's methods of transformers' Trainer that training would not call."""
    defined = {name for base in kind.__mro__ if base not in parent.__mro__ for name in vars(base)}
    called = {
        "train", "evaluate", "predict", "evaluation_loop", "compute_loss", "create_model_card",
        "is_world_process_zero",
    }  # fmt: skip
    unheard = sorted(
        name for name in defined & set(vars(transformers.Trainer)) - called if name[:2] != "__"
    )
    if unheard:
        raise ValueError(
            f"{kind.__name__} overrides {', '.join(unheard)}, which training here does not call; "
            "give pipetransformer.Trainer a loss_fn, an optimizer or callbacks, or train with "
            "transformers.Trainer"
        )


def why_missing(kind: type, name: str) -> str:
    """Return the text of an AttributeError, with the reason if transformers' Trainer has it."""
    text = f"{kind.__name__!r} object has no attribute {name!r}"
    if name.startswith("_") or not (hasattr(transformers.Trainer, name) or name in _OF_INSTANCES):
        return text
    why = _INSTEAD.get(name, "training here is not transformers' loop, and has other parts")
    return f"{text}: {why}; docs/from-transformers.md lists what is there"


def refuse_given(**arguments: Any) -> None:
    """Refuse arguments that would have no effect."""
    names = sorted(name for name, value in arguments.items() if value is not None)
    if names:
        raise ValueError(
            f"{', '.join(names)} would not be honoured by pipetransformer.hf.Trainer; leave it "
            "out. An optimizer is built by args.optim or optimizer_cls_and_kwargs; a loss is the "
            "model's, loss_fn= or a subclass's compute_loss"
        )
