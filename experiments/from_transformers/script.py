"""Hold what both scripts have in common, in the shape of transformers' examples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import transformers
from datasets import Dataset
from transformers import (
    AutoConfig,
    DataCollatorWithPadding,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

import pipetransformer.hf
from experiments.tasks.text_model import load_tokenizer
from freeze import POLICY_HELP, named_policy


@dataclass
class ModelArguments:
    """Hold which model is fine-tuned."""

    model_name_or_path: str = field(
        metadata={"help": "a folder with a model and its tokenizer, or a name of the hub"}
    )
    dropout: float | None = field(
        default=None, metadata={"help": "of hidden states and attention; default: the model's"}
    )


@dataclass
class TrainerArguments:
    """Hold the options by which Trainers are compared."""

    trainer: Literal["pipetransformer", "transformers"] = field(
        default="pipetransformer", metadata={"help": "whose Trainer runs"}
    )
    freeze: str = field(
        default="none",
        metadata={"help": f"of pipetransformer's Trainer only: {POLICY_HELP}"},
    )


class Script(NamedTuple):
    """Hold the options of a script; `data` are its own."""

    model: ModelArguments
    data: Any
    training: TrainingArguments
    trainer: TrainerArguments


def read_options(data_kind: type, arguments: Sequence[str] | None) -> Script:
    """Read a script's options, show what is logged, and set the seed."""
    kinds: Any = (ModelArguments, data_kind, TrainingArguments, TrainerArguments)
    options = Script(*HfArgumentParser(kinds).parse_args_into_dataclasses(args=arguments))
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    trainer_class(options.trainer)  # Refused before anything is read.
    set_seed(options.training.seed)
    return options


def given(path: str | None, option: str) -> str:
    """Return a file that is needed.

    Raises:
        ValueError: it is not given.
    """
    if path is None:
        raise ValueError(f"--{option} is missing; give it, or leave out what needs it")
    return path


def tokenizer_of(options: Script) -> Any:
    """Load the tokenizer."""
    return load_tokenizer(options.model.model_name_or_path, options.data.max_seq_length)


def make_trainer(
    options: Script, kind: Any, tokenizer: Any, *, head: dict[str, Any], **arguments: Any
) -> Any:
    """Load the model and make a Trainer, whosever is asked for.

    Args:
        options: of the script; its own hold `max_seq_length` and `pad_to_max_length`.
        kind: the model's class.
        tokenizer: of the model.
        head: entries of the model's configuration.
        arguments: further ones of the Trainer.
    """
    Trainer = trainer_class(options.trainer)
    name, dropout = options.model.model_name_or_path, {}
    if options.model.dropout is not None:
        names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        dropout = dict.fromkeys(names, options.model.dropout)
    config = AutoConfig.from_pretrained(name, **head, **dropout)
    to = "max_length" if options.data.pad_to_max_length else "longest"
    return Trainer(
        model=kind.from_pretrained(name, config=config),
        args=options.training,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(
            tokenizer, padding=to, max_length=options.data.max_seq_length
        ),
        **arguments,
    )


def trainer_class(options: TrainerArguments) -> Callable[..., Any]:
    """Return what takes the arguments of `transformers.Trainer` and makes a Trainer.

    Raises:
        ValueError: `freeze` names no policy, or is asked of transformers' Trainer.
    """
    if options.trainer == "pipetransformer":
        return partial(pipetransformer.hf.Trainer, freeze=named_policy(options.freeze))
    if options.freeze != "none":
        raise ValueError(
            f"--freeze {options.freeze} is not for --trainer transformers, which freezes nothing; "
            "leave one of them out"
        )
    found: Callable[..., Any] = transformers.Trainer
    return found


def train(trainer: Any, dataset: Dataset) -> None:
    """Train, and save the model, the metrics and the state."""
    result = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    report(trainer, "train", {**result.metrics, "train_samples": len(dataset)})
    trainer.save_state()


def report(trainer: Any, split: str, metrics: dict[str, float]) -> None:
    """Log metrics, and save them."""
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)
