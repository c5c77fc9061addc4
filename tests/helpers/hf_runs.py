"""Run scripts for the Trainer of transformers, by it and by ours."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    EvalPrediction,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import PredictionOutput, speed_metrics

from pipetransformer.hf import Trainer
from tests.helpers.texts import pad_to_longest, sentences, tiny_bert


def rows(num: int) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "sentence"} for row in sentences(num)]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    right = np.argmax(prediction.predictions, axis=1) == prediction.label_ids
    return {"accuracy": float(right.mean())}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 0.25,
        "weight_decay": 0.01,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    return TrainingArguments(output_dir=str(folder), **{**usual, **options})


@contextmanager
def made(folder: Path, *, options: Any = None, kind: Any = Trainer, **given: Any) -> Iterator[Any]:
    trainer = kind(
        model=tiny_bert().float(),
        **{
            "args": arguments(folder, **(options or {})),
            "data_collator": pad_to_longest,
            "train_dataset": rows(30),
            "eval_dataset": rows(13),
            "compute_metrics": accuracy,
            **given,
        },
    )
    if kind is not Trainer:
        yield trainer
        return
    with closing(trainer):
        yield trainer


KINDS = (transformers.Trainer, Trainer)


LENGTH = 12


def reader() -> Any:
    """Build a tiny model that finds answers, the same on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = BertConfig(
            vocab_size=50,
            intermediate_size=32,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.2,
            **sizes,
        )
        return BertForQuestionAnswering(config)


def questions(num: int, *, answered: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(num):
        row: dict[str, Any] = {
            "input_ids": torch.randint(1, 50, (LENGTH,), generator=generator).tolist(),
            "attention_mask": [1] * LENGTH,
            "example_id": f"question {index}",
        }
        if answered:
            start = int(torch.randint(LENGTH, (), generator=generator))
            row |= {"start_positions": start, "end_positions": min(start + 2, LENGTH - 1)}
        found.append(row)
    return found


def post_process(examples: Any, features: Any, predictions: Any, stage: str = "eval") -> Any:
    starts, ends = predictions
    names = [one["example_id"] for one in features]
    found = dict(zip(names, zip(starts.argmax(-1), ends.argmax(-1), strict=True), strict=True))
    return EvalPrediction(predictions=found, label_ids=examples)


def exact(prediction: EvalPrediction) -> dict[str, float]:
    pairs = [prediction.predictions[one["example_id"]] for one in prediction.label_ids]
    wanted = [(one["start"], one["end"]) for one in prediction.label_ids]
    right = sum(tuple(pair) == want for pair, want in zip(pairs, wanted, strict=True))
    return {"exact_match": right / len(wanted), "sum": float(np.sum(pairs))}


def answers_of(num: int) -> list[dict[str, Any]]:
    return [
        {"example_id": one["example_id"], "start": one["start_positions"], "end": 3}
        for one in questions(num, answered=True)
    ]


def answering(base: Any) -> Any:
    """Make a Trainer whose evaluations post-process predictions, of either library."""

    class Answering(base):  # type: ignore[misc]
        def __init__(self, *given: Any, eval_examples: Any = None, **named: Any) -> None:
            super().__init__(*given, **named)
            self.eval_examples = eval_examples

        def found(self, dataset: Any, loader: Any, what: str, prefix: str) -> Any:
            judge, self.compute_metrics = self.compute_metrics, None
            start = time.time()
            try:
                output = self.evaluation_loop(
                    loader,
                    description=what,
                    prediction_loss_only=True if judge is None else None,
                    ignore_keys=None,
                    metric_key_prefix=prefix,
                )
            finally:
                self.compute_metrics = judge
            steps = math.ceil(output.num_samples / self.args.eval_batch_size)
            output.metrics.update(
                speed_metrics(prefix, start, num_samples=output.num_samples, num_steps=steps)
            )
            return output

        def evaluate(
            self,
            eval_dataset: Any = None,
            eval_examples: Any = None,
            ignore_keys: Any = None,
            metric_key_prefix: str = "eval",
        ) -> Any:
            dataset = self.eval_dataset if eval_dataset is None else eval_dataset
            loader = self.get_eval_dataloader(dataset)
            examples = self.eval_examples if eval_examples is None else eval_examples
            output = self.found(dataset, loader, "Evaluation", metric_key_prefix)
            metrics = dict(output.metrics)
            if self.compute_metrics is not None and self.args.should_save:
                found = post_process(examples, dataset, output.predictions)
                judged = self.compute_metrics(found)
                metrics |= {f"{metric_key_prefix}_{n}": value for n, value in judged.items()}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, metrics
            )
            return metrics

        def predict(
            self,
            predict_dataset: Any,
            predict_examples: Any,
            ignore_keys: Any = None,
            metric_key_prefix: str = "test",
        ) -> Any:
            loader = self.get_test_dataloader(predict_dataset)
            output = self.found(predict_dataset, loader, "Prediction", metric_key_prefix)
            found = post_process(predict_examples, predict_dataset, output.predictions, "predict")
            judged = self.compute_metrics(found)
            metrics = {**output.metrics} | {
                f"{metric_key_prefix}_{name}": value for name, value in judged.items()
            }
            return PredictionOutput(found.predictions, found.label_ids, metrics)

    return Answering


def answer(folder: Path, base: Any, **given: Any) -> Any:
    usual = {
        "model": reader(),
        "train_dataset": questions(24, answered=True),
        "eval_dataset": questions(9, answered=False),
        "eval_examples": answers_of(9),
        "compute_metrics": exact,
    }
    options, kind = given.pop("options", {}), given.pop("kind", answering)
    return kind(base)(args=arguments(folder, **options), **{**usual, **given})


def numbers(found: Any) -> dict[str, Any]:
    """Leave times out."""
    return {n: v for n, v in found.items() if "second" not in n and not n.endswith("time")}


def answered(folder: Path, batch: int) -> list[dict[str, Any]]:
    """Train with a loss and evaluations of the script's own; return what was logged."""
    options = {"per_device_train_batch_size": batch}
    with closing(answer(folder, Trainer, options=options, kind=asks_more)) as trainer:
        trainer.train()
        logs = [numbers(one) for one in trainer.state.log_history]
        return [one for one in logs if "loss" in one or "eval_sum" in one]


def asks_more(base: Any) -> Any:
    def compute_loss(self: Any, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 0.1 * outputs.start_logits.square().mean()
        return (loss, outputs) if more.get("return_outputs") else loss

    return type("AsksMore", (answering(base),), {"compute_loss": compute_loss})


SAVES = {"save_strategy": "steps", "save_steps": 2, "warmup_steps": 0}


class StopAt(TrainerCallback):  # type: ignore[misc]
    """End the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if state.global_step >= self.step:
            control.should_training_stop = True


class KilledAt(StopAt):
    """End the run within a step, before it is saved."""

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if state.global_step == self.step:
            raise InterruptedError("killed")
