"""Fine-tune a model that finds answers in texts, from SQuAD's json files and a model's folder.

    python -m experiments.from_transformers.question_answering --model_name_or_path MODEL \\
        --train_file train-v1.1.json --validation_file dev-v1.1.json \\
        --do_train --do_eval --output_dir runs/squad [--freeze schedule:0,2,4]

A text that is too long is read through windows that overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForQuestionAnswering

from experiments.from_transformers.script import (
    given,
    make_trainer,
    read_options,
    report,
    tokenizer_of,
    train,
)
from experiments.tasks.questions import cut, write_answers
from experiments.tasks.squad import Question, best_answers, read_questions, score


@dataclass
class DataArguments:
    """Hold on which data, and how answers are found."""

    train_file: str | None = None
    validation_file: str | None = None
    max_seq_length: int = field(default=384, metadata={"help": "tokens of a window"})
    doc_stride: int = field(default=128, metadata={"help": "tokens that two windows share"})
    pad_to_max_length: bool = field(
        default=True, metadata={"help": "pad to it, or else to the longest of a batch"}
    )
    n_best_size: int = field(default=20, metadata={"help": "answers to keep of each question"})
    max_answer_length: int = field(default=30, metadata={"help": "tokens of the longest answer"})
    max_train_samples: int | None = None
    max_eval_samples: int | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and evaluate, as asked."""
    options = read_options(DataArguments, arguments)
    data, asked, tokenizer = options.data, options.training, tokenizer_of(options)
    train_dataset, questions = None, []
    if asked.do_train:
        read = read_questions(given(data.train_file, "train_file"))[: data.max_train_samples]
        entries, _ = cut(read, tokenizer, length=data.max_seq_length, stride=data.doc_stride)
        train_dataset = Dataset.from_list(entries)
    if asked.do_eval:
        path = given(data.validation_file, "validation_file")
        questions = read_questions(path)[: data.max_eval_samples]
    trainer = make_trainer(
        options, AutoModelForQuestionAnswering, tokenizer, head={}, train_dataset=train_dataset
    )
    if train_dataset is not None:
        train(trainer, train_dataset)
    if asked.do_eval:
        report(trainer, "eval", evaluate(trainer, data, questions))
    trainer.create_model_card(
        finetuned_from=options.model.model_name_or_path,
        tasks="question-answering",
        dataset="SQuAD 1.1",
        language="en",
    )


def evaluate(trainer: Any, data: DataArguments, questions: list[Question]) -> dict[str, float]:
    """Answer questions, write the answers into output_dir, and return how good they are."""
    entries, windows = cut(
        questions, trainer.processing_class, length=data.max_seq_length, stride=data.doc_stride
    )
    # Answered, not judged by its loss, as transformers' example does.
    asked = Dataset.from_list(entries).remove_columns(["start_positions", "end_positions"])
    predicted = trainer.predict(asked, metric_key_prefix="eval")
    answers = best_answers(
        questions,
        windows,
        predicted.predictions,
        num_best=data.n_best_size,
        max_answer_tokens=data.max_answer_length,
    )
    if trainer.is_world_process_zero():
        write_answers(answers, Path(trainer.args.output_dir), prefix="eval_")
    best = {name: several[0].text for name, several in answers.items()}
    metrics = {f"eval_{name}": value for name, value in score(best, questions).items()}
    return {**predicted.metrics, **metrics, "eval_samples": len(questions)}


if __name__ == "__main__":
    main()
