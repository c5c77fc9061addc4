"""Refuse what a script gives beside its TrainingArguments, and would not get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import TrainingArguments

from pipetransformer.data import SizedDataset, check_dataset
from pipetransformer.hf.training_arguments import LABELS


def refuse_more_outputs(model: Any) -> None:
    """Refuse a model that would return more than the logits, of which predictions would lack."""
    config = getattr(model, "config", None)
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(config, name, False):
            raise ValueError(
                f"model.config.{name} is True, but predictions hold the logits alone; set it to "
                "False"
            )


def refuse_shares(args: TrainingArguments, settings: Mapping[str, Any]) -> None:
    """Refuse intervals that are shares of the arguments' run, where settings make another one."""
    changed = sorted({"epochs", "max_steps", "global_batch_size"} & settings.keys())
    for name in ("eval_steps", "save_steps", "logging_steps"):
        if changed and 0 < (getattr(args, name) or 0) < 1:
            raise ValueError(
                f"{name} is a share of the run, which {', '.join(changed)} changes; give steps"
            )


def refuse_unlabelled(dataset: SizedDataset, args: TrainingArguments) -> None:
    """Refuse to begin with samples that steps cannot be measured on."""
    check_dataset(dataset, "dataset")
    first = dataset[0]
    if args.remove_unused_columns and isinstance(first, Mapping) and not LABELS & first.keys():
        raise ValueError(
            "a run begins by measuring steps, even where it only predicts, and the data set has "
            "no labels to measure with; give some labelled samples as eval_dataset"
        )


def refuse_overrides(kind: type, parent: type) -> None:
    """Refuse methods of transformers' Trainer in a subclass that training would not call."""
    defined = {name for base in kind.__mro__ if base not in parent.__mro__ for name in vars(base)}
    called = {"train", "predict", "create_model_card", "is_world_process_zero"}
    unheard = sorted(
        name for name in defined & set(vars(transformers.Trainer)) - called if name[:2] != "__"
    )
    if unheard:
        raise ValueError(
            f"{kind.__name__} overrides {', '.join(unheard)}, which training here does not call; "
            "give pipetransformer.Trainer a loss_fn, an optimizer or callbacks, or train with "
            "transformers.Trainer"
        )


def refuse_given(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that would be left aside."""
    given = sorted(name for name, value in arguments.items() if value is not None)
    if given:
        raise ValueError(
            f"{', '.join(given)} would not be honoured by pipetransformer.hf.Trainer; leave it "
            "out. An optimizer is built by args.optim or optimizer_cls_and_kwargs, a loss by the "
            "model"
        )
