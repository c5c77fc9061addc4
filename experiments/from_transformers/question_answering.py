"""Fine-tune a model that finds answers in texts, from SQuAD's json files and a model's folder.

    python -m experiments.from_transformers.question_answering --model_name_or_path MODEL \\
        --train_file train-v1.1.json --validation_file dev-v1.1.json \\
        --do_train --do_eval --output_dir runs/squad [--freeze schedule:0,2,4]

A text that is too long is read through windows that overlap.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from experiments.from_transformers.whose_trainer import TrainerArguments, trainer_class
from experiments.tasks.squad import (
    Question,
    answer_tokens,
    best_answers,
    read_questions,
    score,
    text_offsets,
)


@dataclass
class ModelArguments:
    """Hold which model is fine-tuned."""

    model_name_or_path: str = field(metadata={"help": "a folder with a model and its tokenizer"})
    dropout: float | None = field(
        default=None, metadata={"help": "of hidden states and attention; default: the model's"}
    )


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


def read_split(path: str | None, option: str, limit: int | None) -> list[Question]:
    """Read a file's questions, or as many as asked for."""
    if path is None:
        raise ValueError(f"--{option} is missing; give it, or leave out what needs it")
    return read_questions(path)[:limit]


def windows(data: DataArguments, tokenizer: Any, examples: Any) -> Any:
    """Return the windows of tokens over some questions' texts, by column, with offsets."""
    return tokenizer(
        examples["question"],
        examples["context"],
        truncation="only_second",
        max_length=data.max_seq_length,
        stride=data.doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding="max_length" if data.pad_to_max_length else False,
    )


def train_features(data: DataArguments, tokenizer: Any, questions: list[Question]) -> Dataset:
    """Return windows with the tokens at which their answers begin and end.

    Where a window does not hold the whole answer both are its first, the class token.
    """

    def convert(examples: Any) -> Any:
        encoded = windows(data, tokenizer, examples)
        found, spans = encoded.pop("overflow_to_sample_mapping"), []
        for index, offsets in enumerate(encoded.pop("offset_mapping")):
            gold = examples["answers"][found[index]]
            begin = gold["answer_start"][0]
            places = text_offsets(offsets, encoded.sequence_ids(index))
            spans.append(answer_tokens(places, begin, begin + len(gold["text"][0])))
        encoded["start_positions"] = [first for first, _ in spans]
        encoded["end_positions"] = [last for _, last in spans]
        return encoded

    return _mapped(questions, convert)


def evaluation_features(data: DataArguments, tokenizer: Any, questions: list[Question]) -> Dataset:
    """Return windows with what `best_answers` needs to know of them."""

    def convert(examples: Any) -> Any:
        encoded = windows(data, tokenizer, examples)
        found = encoded.pop("overflow_to_sample_mapping")
        encoded["example_id"] = [examples["id"][index] for index in found]
        encoded["offset_mapping"] = [
            text_offsets(offsets, encoded.sequence_ids(index))
            for index, offsets in enumerate(encoded["offset_mapping"])
        ]
        return encoded

    return _mapped(questions, convert)


def _mapped(questions: list[Question], convert: Any) -> Dataset:
    dataset = Dataset.from_list(questions)
    return dataset.map(convert, batched=True, remove_columns=dataset.column_names)


def load(options: ModelArguments) -> tuple[Any, Any]:
    """Return model and tokenizer."""
    name, dropout = options.model_name_or_path, {}
    if options.dropout is not None:
        names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        dropout = dict.fromkeys(names, options.dropout)
    config = AutoConfig.from_pretrained(name, **dropout)
    model = AutoModelForQuestionAnswering.from_pretrained(name, config=config)
    return model, AutoTokenizer.from_pretrained(name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and evaluate, as asked."""
    kinds: Any = (ModelArguments, DataArguments, TrainingArguments, TrainerArguments)
    parser = HfArgumentParser(kinds)
    model_args, data_args, training_args, trainer_args = parser.parse_args_into_dataclasses(
        args=arguments
    )
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    Trainer = trainer_class(trainer_args)
    set_seed(training_args.seed)
    model, tokenizer = load(model_args)

    train_dataset: Any = None
    questions: list[Question] = []
    if training_args.do_train:
        limit = data_args.max_train_samples
        read = read_split(data_args.train_file, "train_file", limit)
        train_dataset = train_features(data_args, tokenizer, read)
    if training_args.do_eval:
        limit = data_args.max_eval_samples
        questions = read_split(data_args.validation_file, "validation_file", limit)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
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
        metrics = evaluate(trainer, data_args, questions)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    trainer.create_model_card(
        finetuned_from=model_args.model_name_or_path,
        tasks="question-answering",
        dataset="SQuAD 1.1",
        language="en",
    )


def evaluate(trainer: Any, data: DataArguments, questions: list[Question]) -> dict[str, float]:
    """Answer questions, write the answers into output_dir, and return how good they are."""
    features = evaluation_features(data, trainer.processing_class, questions)
    predicted = trainer.predict(features, metric_key_prefix="eval")
    answers = best_answers(
        questions,
        features,
        predicted.predictions,
        num_best=data.n_best_size,
        max_answer_tokens=data.max_answer_length,
    )
    best = {name: several[0].text for name, several in answers.items()}
    if trainer.is_world_process_zero():
        folder = Path(trainer.args.output_dir)
        several = {name: [asdict(one) for one in found] for name, found in answers.items()}
        for name, content in (("predictions", best), ("nbest_predictions", several)):
            text = json.dumps(content, indent=2, ensure_ascii=False)
            (folder / f"eval_{name}.json").write_text(text, encoding="utf-8")
    metrics = {f"eval_{name}": value for name, value in score(best, questions).items()}
    return {**predicted.metrics, **metrics, "eval_samples": len(questions)}


if __name__ == "__main__":
    main()
