"""Prove that subclasses in the shape of transformers' examples come to the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import TrainerCallback

from pipetransformer import FreezeSchedule
from pipetransformer.hf import Trainer
from tests.helpers.hf_runs import (
    KINDS,
    accuracy,
    answer,
    answered,
    answers_of,
    made,
    numbers,
    questions,
    rows,
)
from tests.helpers.marks import slow
from tests.helpers.pool import Pool


class Heard(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self.metrics.append(numbers(facts["metrics"]))


@pytest.mark.parametrize("strategy", ["no", slow("epoch"), "steps"])
def test_a_question_answering_trainer_answers_as_with_transformers(
    tmp_path: Path, strategy: str
) -> None:
    options = {"eval_strategy": strategy, "eval_steps": 2 if strategy == "steps" else None}
    results = []
    for kind in KINDS:
        heard = Heard()
        trainer = answer(tmp_path / kind.__module__, kind, options=options, callbacks=[heard])
        with nullcontext() if kind is transformers.Trainer else closing(trainer):
            trainer.train()
            metrics = trainer.evaluate()
            predicted = trainer.predict(questions(5, answered=False), answers_of(5))
            logs = [numbers(one) for one in trainer.state.log_history]
            results.append((metrics, predicted, heard.metrics, logs))
    (theirs, other, told, logs), (ours, mine, heard_of, logged) = results
    assert numbers(ours) == numbers(theirs) and ours.keys() == theirs.keys()
    assert mine.predictions == other.predictions
    assert numbers(mine.metrics) == numbers(other.metrics)
    assert heard_of == told and len(told) == {"no": 1, "epoch": 3, "steps": 4}[strategy]
    for one, two in zip(logged, logs, strict=True):
        for name in one.keys() & two.keys() - {"total_flos"}:
            assert one[name] == pytest.approx(two[name], abs=1e-4), name


def test_evaluations_of_a_script_s_own_change_no_checkpoint(tmp_path: Path) -> None:
    options = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
    }
    given = {"freeze": FreezeSchedule([0, 1, 1])}
    with closing(
        answer(tmp_path / "whole", Trainer, options={**options, "num_train_epochs": 3}, **given)
    ) as trainer:
        trainer.train()
        whole = {name: p.clone() for name, p in trainer.model.named_parameters()}
    folder = tmp_path / "parts"
    with closing(answer(folder, Trainer, options=options, **given)) as trainer:
        trainer.train()
    options["num_train_epochs"] = 3
    with closing(answer(folder, Trainer, options=options, **given)) as trainer:
        trainer.train(resume_from_checkpoint=True)
        logged = [one["epoch"] for one in trainer.state.log_history if "eval_sum" in one]
        assert logged == [1, 2, 3]
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter, whole[name]), name


def test_two_processes_train_and_answer_as_one_with_the_batch_of_both(
    two_ranks: Pool, tmp_path: Path
) -> None:
    expected = answered(tmp_path / "one", 8)
    first, second = two_ranks.run(answered, tmp_path / "two", 4)
    assert len(first) == len(expected) == 8
    for mine, other in zip(first, expected, strict=True):
        assert mine == pytest.approx(other, abs=1e-4)
    assert [one for one in second if "loss" in one] == [one for one in first if "loss" in one]


@pytest.mark.parametrize(
    ("asked", "freeze"), [("evaluate", FreezeSchedule([1])), ("predict", None)]
)
def test_answers_alone_need_no_labels_at_all(tmp_path: Path, asked: str, freeze: Any) -> None:
    results = []
    for kind in KINDS:
        given = {} if kind is transformers.Trainer else {"freeze": freeze}
        trainer = answer(tmp_path, kind, train_dataset=None, **given)
        with nullcontext() if kind is transformers.Trainer else closing(trainer):
            if asked == "evaluate":
                results.append(numbers(trainer.evaluate()))
            else:
                predicted = trainer.predict(questions(5, answered=False), answers_of(5))
                results.append((predicted.predictions, numbers(predicted.metrics)))
    if asked == "evaluate":
        results[0].pop("eval_model_preparation_time", None)
    assert results[0] == results[1]


def test_what_a_script_finds_without_training_is_saved_as_with_transformers(
    tmp_path: Path,
) -> None:
    saved = []
    for kind in KINDS:
        folder = tmp_path / kind.__module__ / "run"
        with made(folder, kind=kind, train_dataset=None) as trainer:
            trainer.save_metrics("eval", trainer.evaluate())
            saved.append(sorted(one.name for one in folder.iterdir()))
    assert saved == [["all_results.json", "eval_results.json"]] * 2


def predict_bare(folder: Path) -> Any:
    with made(folder, train_dataset=None, eval_dataset=None, data_collator=None) as trainer:
        found = trainer.predict(bare(6))
        labelled = trainer.evaluate([{**row, "label": 1} for row in bare(6)])
        return found.predictions, labelled["eval_loss"]


def bare(num: int) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"][:3], "attention_mask": [1, 1, 1]} for row in rows(num)]


def test_two_processes_predict_without_labels_what_one_does(
    two_ranks: Pool, tmp_path: Path
) -> None:
    predictions, loss = predict_bare(tmp_path)
    for found, own in two_ranks.run(predict_bare, tmp_path):
        np.testing.assert_allclose(found, predictions, atol=1e-6)
        assert own == pytest.approx(loss, abs=1e-6)


def test_samples_without_labels_are_evaluated_in_a_run_as_in_transformers(tmp_path: Path) -> None:
    logged = []
    for kind in KINDS:
        given = {"eval_dataset": bare(6), "data_collator": None, "compute_metrics": None}
        labelled = [{**row, "label": 1} for row in bare(12)]
        folder = tmp_path / kind.__module__
        with made(folder, kind=kind, train_dataset=labelled, **given) as trainer:
            trainer.train()
            logged.append([sorted(one) for one in trainer.state.log_history])
            assert numbers(trainer.evaluate()).keys() == {"epoch"}
    assert logged[0] == logged[1]


@pytest.mark.parametrize("when", ["between", "after"])
def test_metrics_that_are_assigned_later_are_computed(tmp_path: Path, when: str) -> None:
    results = []
    for kind in KINDS:
        folder = tmp_path / kind.__module__
        with made(folder, kind=kind, compute_metrics=None) as trainer:
            if when == "between":
                assert "eval_accuracy" not in trainer.evaluate()
            if when != "after":
                trainer.compute_metrics = accuracy
            trainer.train()
            trainer.compute_metrics = accuracy
            found = trainer.evaluate()["eval_accuracy"]
            logged = [one.get("eval_accuracy") for one in trainer.state.log_history]
            results.append((found, [one for one in logged if one is not None]))
    assert results[1] == results[0]


def penalised(self: Any, model: Any, inputs: Any, return_outputs: Any = False, **more: Any) -> Any:
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    logits = outputs.get("logits")
    loss = F.cross_entropy(logits.view(-1, 3), labels.view(-1)) + 0.1 * logits.square().mean()
    return (loss, outputs) if return_outputs else loss


def scaled(self: Any, model: Any, inputs: Any, return_outputs: Any = False, **more: Any) -> Any:
    loss, outputs = super(type(self), self).compute_loss(model, inputs, return_outputs=True)
    return (3 * loss, outputs) if return_outputs else 3 * loss


def watched(self: Any, model: Any, inputs: Any, return_outputs: Any = False, **more: Any) -> Any:
    outputs = model(**inputs)
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return (loss, outputs) if return_outputs else loss


def weighted(self: Any, model: Any, inputs: Any, return_outputs: Any = False, **more: Any) -> Any:
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    weights = outputs.logits.new_tensor([1.0, 4.0, 0.5])
    loss = F.cross_entropy(outputs.logits, labels, weight=weights)
    return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("loss", [penalised, scaled, watched], ids=lambda one: one.__name__)
def test_a_loss_of_a_subclass_is_trained_and_evaluated(
    tmp_path: Path, loss: Callable[..., Any]
) -> None:
    found = []
    for base in KINDS:
        kind = type("Own", (base,), {"compute_loss": loss})
        folder = tmp_path / base.__module__
        with made(folder, kind=kind) as trainer:
            trainer.train()
            found.append([numbers(one) for one in trainer.state.log_history])
            if base is Trainer:
                trainer.close()
    for theirs, ours in zip(*found, strict=True):
        for name in theirs.keys() & ours.keys() - {"total_flos"}:
            assert ours[name] == pytest.approx(theirs[name], abs=1e-4), name


def twice(self: Any, model: Any, inputs: Any, **more: Any) -> Any:
    return model(**inputs)["loss"] + model(**inputs)["loss"]


def reading(self: Any, model: Any, inputs: Any, **more: Any) -> Any:
    lengths = inputs["attention_mask"].sum(-1)
    return (F.cross_entropy(model(**inputs).logits, inputs["labels"]) * lengths).mean()


def optional(self: Any, model: Any, inputs: Any, **more: Any) -> Any:
    weights = inputs.pop("weights", None)
    loss = F.cross_entropy(model(**inputs).logits, inputs["labels"])
    return loss if weights is None else loss * weights.mean()


def penalty(self: Any, model: Any, inputs: Any, **more: Any) -> Any:
    weight: Tensor = self.model.classifier.weight
    return F.cross_entropy(model(**inputs).logits, inputs["labels"]) + weight.square().sum()


def of_parts(self: Any, model: Any, inputs: Any, **more: Any) -> Any:
    return model(**inputs)["loss"] + sum(one.sum() for one in model.parameters())


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        (weighted, ValueError, "'Own.compute_loss' depends on how a batch is split"),
        (twice, ValueError, "calls the model it is given 2 times"),
        (reading, ValueError, r"reads inputs\['attention_mask'\], but the last stage"),
        (optional, ValueError, r"reads inputs\['weights'\], but the last stage"),
        (penalty, ValueError, "computes with the parameter 'classifier.weight'"),
        (of_parts, AttributeError, "compute_loss reads model.parameters, but the model"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_loss_that_cannot_be_split_is_refused_with_the_reason(
    tmp_path: Path, loss: Callable[..., Any], error: type[Exception], text: str
) -> None:
    kind = type("Own", (Trainer,), {"compute_loss": loss})
    # The first two samples, of which a probe is made, are of two classes.
    labelled = [{**row, "label": index % 3} for index, row in enumerate(rows(30))]
    with made(tmp_path, kind=kind, train_dataset=labelled) as trainer, closing(trainer):
        with pytest.raises(error, match=text):
            trainer.train()
        assert trainer.state.global_step == 0


def test_class_weights_are_given_as_a_loss_function_and_equal_a_subclass_there(
    tmp_path: Path,
) -> None:
    kind = type("Weighted", (transformers.Trainer,), {"compute_loss": weighted})
    with made(tmp_path / "theirs", kind=kind) as trainer:
        trainer.train()
        theirs = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    weights = torch.tensor([1.0, 4.0, 0.5])
    loss = torch.nn.CrossEntropyLoss(weight=weights)
    with made(tmp_path / "ours", loss_fn=loss) as trainer:
        trainer.train()
        ours = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"loss_fn": F.cross_entropy}, "loss_fn would have no effect beside a compute_loss"),
        ({"options": {"label_smoothing_factor": 0.1}}, "label_smoothing_factor would have no"),
    ],
    ids=["loss_fn", "smoothing"],
)
def test_a_second_loss_is_refused(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    kind = type("Own", (Trainer,), {"compute_loss": penalised})
    with made(tmp_path, kind=kind, **given) as trainer:
        with pytest.raises(ValueError, match=text):
            trainer.train()


def test_the_best_of_a_script_s_own_evaluations_is_refused(tmp_path: Path) -> None:
    options = {
        "load_best_model_at_end": True,
        "save_strategy": "epoch",
        "metric_for_best_model": "exact_match",
    }
    with closing(answer(tmp_path, Trainer, options=options)) as trainer:
        with pytest.raises(ValueError, match="metric_for_best_model.* evaluations in the run are"):
            trainer.train()


def test_a_loader_of_the_script_s_own_is_refused(tmp_path: Path) -> None:
    with made(tmp_path) as trainer:
        loader: Any = torch.utils.data.DataLoader(rows(4), shuffle=True)
        with pytest.raises(ValueError, match="given a DataLoader, whose sampler and"):
            trainer.evaluation_loop(loader)


def test_a_loader_gives_batches_without_columns_that_the_model_does_not_take(
    tmp_path: Path,
) -> None:
    with made(tmp_path) as trainer:
        odd = [{**row, "sentence": "text"} for row in rows(9)]
        batches = list(trainer.get_test_dataloader(odd))
        assert [len(one["labels"]) for one in batches] == [8, 1]
        assert trainer.get_eval_dataloader().dataset is trainer.eval_dataset
