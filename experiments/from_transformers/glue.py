"""Fine-tune a classifier on a task of GLUE, from its tsv files and a model's folder.

    python -m experiments.from_transformers.glue --task_name sst2 --model_name_or_path MODEL \\
        --train_file train.tsv --validation_file dev.tsv --test_file test.tsv \\
        --do_train --do_eval --do_predict --output_dir runs/sst2 [--freeze schedule:0,2,4]
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from experiments.from_transformers.whose_trainer import TrainerArguments, trainer_class

COLUMNS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "sst2": (("sentence",), "label"),
    "mrpc": (("#1 String", "#2 String"), "Quality"),
}
"""A task's columns: its sentences, and their class."""


@dataclass
class ModelArguments:
    """Hold which model is fine-tuned."""

    model_name_or_path: str = field(metadata={"help": "a folder with a model and its tokenizer"})
    dropout: float | None = field(
        default=None, metadata={"help": "of hidden states and attention; default: the model's"}
    )


@dataclass
class DataArguments:
    """Hold on which data."""

    task_name: Literal["sst2", "mrpc"] = field(metadata={"help": "a task of GLUE"})
    train_file: str | None = None
    validation_file: str | None = None
    test_file: str | None = None
    max_seq_length: int = field(default=128, metadata={"help": "tokens; what is beyond is cut"})
    pad_to_max_length: bool = field(
        default=False, metadata={"help": "pad to it, not to the longest of a batch"}
    )
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    max_predict_samples: int | None = None


def read_split(path: str | None, option: str, limit: int | None) -> Dataset:
    """Read a task's tsv file, or as many of its lines as asked for."""
    if path is None:
        raise ValueError(f"--{option} is missing; give it, or leave out what needs it")
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return Dataset.from_list(rows[:limit])


def tokenise(data: DataArguments, tokenizer: Any, dataset: Dataset) -> Dataset:
    """Return a split's tokens and, where it has them, its labels."""
    sentences, label = COLUMNS[data.task_name]

    def convert(examples: Any) -> Any:
        encoded = tokenizer(
            *(examples[name] for name in sentences),
            padding="max_length" if data.pad_to_max_length else False,
            max_length=data.max_seq_length,
            truncation=True,
        )
        if label in examples:
            encoded["label"] = [int(one) for one in examples[label]]
        return encoded

    return dataset.map(convert, batched=True, remove_columns=dataset.column_names)


def accuracy_and_f1(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of right classes, and the F1 of class 1."""
    given: Any = np.argmax(prediction.predictions, axis=1)
    wanted: Any = prediction.label_ids
    both = ((given == 1) & (wanted == 1)).sum()
    either = (given == 1).sum() + (wanted == 1).sum()
    return {
        "accuracy": float((given == wanted).mean()),
        "f1": float(2 * both / either) if either else 0.0,
    }


def load(options: ModelArguments) -> tuple[Any, Any]:
    """Return model and tokenizer."""
    name, dropout = options.model_name_or_path, {}
    if options.dropout is not None:
        names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        dropout = dict.fromkeys(names, options.dropout)
    config = AutoConfig.from_pretrained(name, num_labels=2, **dropout)
    model = AutoModelForSequenceClassification.from_pretrained(name, config=config)
    return model, AutoTokenizer.from_pretrained(name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, evaluate and predict, as asked."""
    kinds: Any = (ModelArguments, DataArguments, TrainingArguments, TrainerArguments)
    parser = HfArgumentParser(kinds)
    model_args, data_args, training_args, trainer_args = parser.parse_args_into_dataclasses(
        args=arguments
    )
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    Trainer = trainer_class(trainer_args)
    set_seed(training_args.seed)
    model, tokenizer = load(model_args)

    def split(name: str, limit: int | None) -> Dataset:
        option = f"{name}_file"
        read = read_split(getattr(data_args, option), option, limit)
        return tokenise(data_args, tokenizer, read)

    train_dataset: Any = None
    eval_dataset: Any = None
    if training_args.do_train:
        train_dataset = split("train", data_args.max_train_samples)
    if training_args.do_eval:
        eval_dataset = split("validation", data_args.max_eval_samples)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=accuracy_and_f1,
        processing_class=tokenizer,
        data_collator=default_data_collator
        if data_args.pad_to_max_length
        else DataCollatorWithPadding(tokenizer),
    )

    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        metrics = {**result.metrics, "train_samples": len(train_dataset)}
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate(eval_dataset=eval_dataset)
        metrics["eval_samples"] = len(eval_dataset)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if training_args.do_predict:
        predict(trainer, split("test", data_args.max_predict_samples))

    trainer.create_model_card(
        finetuned_from=model_args.model_name_or_path,
        tasks="text-classification",
        dataset=f"GLUE {data_args.task_name.upper()}",
        language="en",
    )


def predict(trainer: Any, dataset: Dataset) -> None:
    """Write the classes of a split into output_dir/predict_results.tsv."""
    classes = np.argmax(trainer.predict(dataset).predictions, axis=1)
    if trainer.is_world_process_zero():
        lines = [f"{index}\t{number}\n" for index, number in enumerate(classes)]
        path = Path(trainer.args.output_dir, "predict_results.tsv")
        path.write_text("index\tprediction\n" + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
