"""Fine-tune a classifier on a task of GLUE, from its tsv files and a model's folder.

    python -m experiments.from_transformers.glue --task_name sst2 --model_name_or_path MODEL \\
        --train_file train.tsv --validation_file dev.tsv --test_file test.tsv \\
        --do_train --do_eval --do_predict --output_dir runs/sst2 [--freeze schedule:0,2,4]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, EvalPrediction

from experiments.from_transformers.script import (
    given,
    make_trainer,
    read_options,
    report,
    tokenizer_of,
    train,
)
from experiments.tasks.glue import TASKS, Example, GlueTask, read_tsv


@dataclass
class DataArguments:
    """Hold on which data."""

    task_name: str = field(metadata={"help": "a task of GLUE", "choices": list(TASKS)})
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


def tokenise(data: DataArguments, tokenizer: Any, rows: list[Example]) -> Dataset:
    """Return a split's tokens and, where it has them, its labels."""
    sentences = zip(*(row.sentences for row in rows), strict=True)
    encoded = tokenizer(*map(list, sentences), max_length=data.max_seq_length, truncation=True)
    if rows[0].label is not None:
        encoded["label"] = [row.label for row in rows]
    return Dataset.from_dict(encoded)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, evaluate and predict, as asked."""
    options = read_options(DataArguments, arguments)
    data, asked = options.data, options.training
    task, tokenizer = TASKS[data.task_name], tokenizer_of(options)

    def rows_of(name: str, limit: int | None) -> list[Example]:
        path = given(getattr(data, f"{name}_file"), f"{name}_file")
        return read_tsv(task, Path(path), labelled=name != "test")[:limit]

    def judge(prediction: EvalPrediction) -> dict[str, float]:
        found = task.found(np.asarray(prediction.predictions))
        metrics = task.metrics(found, np.asarray(prediction.label_ids).reshape(-1))
        return {name: value / 100 for name, value in metrics.items()}

    train_dataset = eval_dataset = None
    if asked.do_train:
        train_dataset = tokenise(data, tokenizer, rows_of("train", data.max_train_samples))
    if asked.do_eval:
        eval_dataset = tokenise(data, tokenizer, rows_of("validation", data.max_eval_samples))
    trainer = make_trainer(
        options,
        AutoModelForSequenceClassification,
        tokenizer,
        head=task.head,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=judge,
    )
    if train_dataset is not None:
        train(trainer, train_dataset)
    if eval_dataset is not None:
        metrics = trainer.evaluate(eval_dataset=eval_dataset)
        report(trainer, "eval", {**metrics, "eval_samples": len(eval_dataset)})
    if asked.do_predict:
        rows = rows_of("test", data.max_predict_samples)
        outputs = trainer.predict(tokenise(data, tokenizer, rows)).predictions
        write(trainer, task, rows, outputs)
    trainer.create_model_card(
        finetuned_from=options.model.model_name_or_path,
        tasks="text-classification",
        dataset=f"GLUE {data.task_name.upper()}",
        language="en",
    )


def write(trainer: Any, task: GlueTask, rows: list[Example], outputs: Any) -> None:
    """Write the labels of a split into output_dir/predict_results.tsv."""
    if trainer.is_world_process_zero():
        found = zip(rows, task.found(outputs), strict=True)
        lines = [f"{row.number}\t{task.name_of(one)}\n" for row, one in found]
        path = Path(trainer.args.output_dir, "predict_results.tsv")
        path.write_text("index\tprediction\n" + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
