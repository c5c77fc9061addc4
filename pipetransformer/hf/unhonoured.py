"""Refuse what a script gives beside its TrainingArguments, and would not get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import TrainingArguments

from pipetransformer.adapters import adapt

_OF_INSTANCES = ("accelerator", "lr_scheduler", "model_wrapped", "optimizer")
"""What transformers' Trainer has once it is made; its class does not."""
_STAGES = "each stage has its own; give args.optim or optimizer_cls_and_kwargs"
_HUB = "call save_model(), and upload the folder"
_INSTEAD = {
    "hyperparameter_search": "make a Trainer for each trial, in an output_dir of its own",
    "pop_callback": "call remove_callback()",
    **dict.fromkeys(("push_to_hub", "init_hf_repo"), _HUB),
    **dict.fromkeys(("optimizer", "lr_scheduler", "create_optimizer"), _STAGES),
}


def refuse_more_outputs(model: Any) -> None:
    """Refuse a model that would return more than the logits, of which predictions would lack."""
    config = getattr(model, "config", None)
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(config, name, False):
            raise ValueError(
                f"model.config.{name} is True, but predictions hold the logits alone; set it to "
                "False"
            )


def refuse_other_labels(args: TrainingArguments, model: Any) -> None:
    """Refuse names of labels, of which predictions would hold others or in another order."""
    if args.label_names is None:
        return
    given, own = list(args.label_names), list(adapt(model).targets)
    if given != own:
        raise ValueError(
            f"label_names has {given}, but a {type(model).__name__} calls its labels {own}; leave "
            "it out"
        )


def refuse_shares(args: TrainingArguments, settings: Mapping[str, Any]) -> None:
    """Refuse intervals that are shares of the arguments' run, where settings make another one."""
    changed = sorted({"epochs", "max_steps", "global_batch_size"} & settings.keys())
    for name in ("eval_steps", "save_steps", "logging_steps"):
        if changed and 0 < (getattr(args, name) or 0) < 1:
            raise ValueError(
                f"{name} is a share of the run, which {', '.join(changed)} changes; give steps"
            )


def refuse_unselected(args: TrainingArguments, settings: Mapping[str, Any]) -> None:
    """Refuse to choose the best of evaluations that are the script's own."""
    chosen = [n for n in ("metric_for_best_model", "load_best_model_at_end") if getattr(args, n)]
    chosen += [n for n in ("early_stopping_patience",) if settings.get(n)]
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
    """Refuse methods of transformers' Trainer in a subclass that training would not call."""
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
    """Return the text of an AttributeError, and for what transformers' Trainer has, why."""
    text = f"{kind.__name__!r} object has no attribute {name!r}"
    if name.startswith("_") or not (hasattr(transformers.Trainer, name) or name in _OF_INSTANCES):
        return text
    why = _INSTEAD.get(name, "training here is not transformers' loop, and has other parts")
    return f"{text}: {why}; docs/from-transformers.md lists what is there"


def refuse_given(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that would be left aside."""
    given = sorted(name for name, value in arguments.items() if value is not None)
    if given:
        raise ValueError(
            f"{', '.join(given)} would not be honoured by pipetransformer.hf.Trainer; leave it "
            "out. An optimizer is built by args.optim or optimizer_cls_and_kwargs; a loss is the "
            "model's, loss_fn= or a subclass's compute_loss"
        )
