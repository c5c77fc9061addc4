"""Hold that a run is what the script says, or is refused: never another one in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import EarlyStoppingCallback, ViTForImageClassification, ViTImageProcessor

from pipetransformer.hf import Trainer
from pipetransformer.model import adapt
from tests.helpers.adapted import hf_vit
from tests.helpers.hf_runs import SAVES, StopAt, accuracy, arguments, made, rows


def rates(trainer: Any) -> list[float]:
    logs = trainer.state.log_history
    return [log["learning_rate"] for log in logs if "learning_rate" in log]


def trained_at(folder: Path) -> list[float]:
    lines = (folder / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [one["learning_rate"] for one in records if one["kind"] == "step"]


@pytest.mark.parametrize(
    "name", ["model", "args", "train_dataset", "data_collator", "preprocess_logits_for_metrics"]
)
def test_what_is_changed_after_the_first_evaluation_is_refused(tmp_path: Path, name: str) -> None:
    with made(tmp_path, train_dataset=None) as trainer:
        trainer.evaluate()
        trainer.train_dataset = rows(30)
        if name == "args":
            trainer.args.num_train_epochs = 5
        else:
            setattr(trainer, name, {"train_dataset": rows(30)}.get(name, list))
        with pytest.raises(ValueError, match=f"{name}.* would have no effect|args is not what"):
            trainer.train()


def test_an_evaluation_set_may_be_changed_where_training_does_not_evaluate(tmp_path: Path) -> None:
    with made(tmp_path, options={"eval_strategy": "no"}) as trainer:
        first = trainer.evaluate()
        trainer.eval_dataset = rows(5)
        assert trainer.evaluate()["eval_loss"] != first["eval_loss"]
        assert trainer.train().global_step == 8


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
def test_evaluations_without_a_set_are_refused(tmp_path: Path, strategy: str) -> None:
    with made(tmp_path, options={"eval_strategy": strategy}, eval_dataset=None) as trainer:
        with pytest.raises(ValueError, match=f"'{strategy}', but there is no eval_dataset"):
            trainer.train()


@pytest.mark.parametrize("name", ["prediction_step", "get_train_dataloader", "log"])
def test_methods_that_training_would_not_call_are_refused(tmp_path: Path, name: str) -> None:
    kind = type("Weighted", (Trainer,), {name: lambda self, *given: None})
    with pytest.raises(ValueError, match=f"Weighted overrides {name}, which training"):
        kind(model=hf_vit(), args=arguments(tmp_path))


def test_with_max_steps_rates_follow_steps_as_in_transformers(tmp_path: Path) -> None:
    logged = {}
    for kind in (transformers.Trainer, Trainer):
        folder = tmp_path / kind.__module__
        options = {**SAVES, "max_steps": 8}
        with made(folder, kind=kind, options=options, callbacks=[StopAt(4)]) as trainer:
            trainer.train()
        options["per_device_train_batch_size"] = 4
        with made(folder, kind=kind, options=options) as trainer:
            trainer.train(resume_from_checkpoint=True)
            logged[kind] = rates(trainer)[-4:]
    assert logged[Trainer] == pytest.approx(logged[transformers.Trainer])
    assert trained_at(folder)[-4:] == pytest.approx(logged[Trainer])


def test_another_folder_or_an_older_checkpoint_is_refused(tmp_path: Path) -> None:
    with made(tmp_path / "own", options=SAVES) as trainer:
        trainer.train()
    older = tmp_path / "own" / "checkpoints" / "step-00000002"
    assert older.exists()
    named = (tmp_path / "own" / f"checkpoint-{step}" for step in (2, 999))
    for given in (tmp_path, *named, older):
        with made(tmp_path / "own", options=SAVES) as trainer:
            with pytest.raises(ValueError, match="from the newest checkpoint in output_dir"):
                trainer.train(resume_from_checkpoint=given)


def test_settings_win_over_what_arguments_stand_for(tmp_path: Path) -> None:
    settings = {"epochs": 3, "global_batch_size": 4, "learning_rate_schedule": "cosine"}
    with made(tmp_path, **settings) as trainer:
        assert trainer.train().global_step == 24
        assert rates(trainer) == pytest.approx(trained_at(tmp_path))
        assert trainer.state.epoch == 3.0


def test_a_share_that_warms_up_is_one_of_the_run_that_settings_make(tmp_path: Path) -> None:
    with made(tmp_path, options={"warmup_steps": 0.5}, epochs=4) as trainer:
        trainer.train()
        logged = rates(trainer)
    assert (len(logged), logged.index(max(logged))) == (16, 8)


def test_an_optimizer_s_own_rate_is_the_one_that_trains_and_is_logged(tmp_path: Path) -> None:
    options = {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 5e-3},
        "warmup_steps": 0,
    }
    given = (torch.optim.SGD, {"lr": 0.1})
    logged = []
    for kind in (transformers.Trainer, Trainer):
        folder = tmp_path / kind.__module__
        with made(folder, kind=kind, options=options, optimizer_cls_and_kwargs=given) as trainer:
            trainer.train()
            logged.append(rates(trainer))
    assert logged[1] == pytest.approx(logged[0])
    assert trained_at(folder) == pytest.approx(logged[0])


def test_a_script_s_own_evaluations_are_not_the_best_of_the_run(tmp_path: Path) -> None:
    options = {
        "learning_rate": 3.0,
        "num_train_epochs": 4,
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "optim": "sgd",
    }
    found = []
    for kind in (transformers.Trainer, Trainer):
        stop = EarlyStoppingCallback(2)
        with made(tmp_path / kind.__module__, kind=kind, options=options, callbacks=[stop]) as one:
            one.evaluate()
            one.train()
            found.append((one.state.global_step, one.state.best_global_step))
    assert found[1] == found[0]


def test_an_evaluation_alone_begins_with_what_it_is_given(tmp_path: Path) -> None:
    nothing = {"train_dataset": None, "eval_dataset": None}
    found = []
    for kind in (transformers.Trainer, Trainer):
        options = {"eval_strategy": "no"}
        with made(tmp_path / "one", kind=kind, options=options, **nothing) as trainer:
            found.append(trainer.evaluate(rows(5)))
    assert found[1]["eval_loss"] == pytest.approx(found[0]["eval_loss"], abs=1e-4)
    assert found[1]["epoch"] == found[0]["epoch"]
    several = {"a": rows(5), "b": rows(6)}
    with made(tmp_path / "two", train_dataset=None, eval_dataset=several) as trainer:
        assert trainer.evaluate()["eval_a_loss"] == found[1]["eval_loss"]


def test_samples_without_labels_are_predicted_beside_labelled_ones(tmp_path: Path) -> None:
    labelled = [{**row, "input_ids": row["input_ids"][:3]} for row in rows(6)]
    labelled = [{**row, "attention_mask": [1, 1, 1]} for row in labelled]
    bare = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in labelled]
    given = {"train_dataset": None, "data_collator": None}
    with made(tmp_path, eval_dataset=labelled, **given) as trainer:
        predicted = trainer.predict(bare)
        assert predicted.label_ids is None and "test_loss" not in predicted.metrics
        assert (predicted.predictions == trainer.predict(labelled).predictions).all()
    with made(tmp_path, eval_dataset=None, **given) as trainer:
        np.testing.assert_allclose(
            trainer.predict(bare).predictions, predicted.predictions, atol=1e-6
        )


def test_accumulated_steps_log_the_epochs_that_the_documentation_says(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "eval_strategy": "no"}
    logged = {}
    for kind in (transformers.Trainer, Trainer):
        folder = tmp_path / kind.__module__
        with made(folder, kind=kind, options=options, train_dataset=rows(100)) as trainer:
            trainer.train()
            logged[kind] = [log["epoch"] for log in trainer.state.log_history]
    assert (logged[Trainer][0], logged[Trainer][-1]) == (1 / 7, 1)
    assert (logged[transformers.Trainer][0], logged[transformers.Trainer][-1]) == (2 / 13, 1)
    assert len(logged[Trainer]) == len(logged[transformers.Trainer])


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_a_model_that_returns_more_than_logits_is_refused(tmp_path: Path, name: str) -> None:
    model = hf_vit()
    model.set_attn_implementation("eager")
    setattr(model.config, name, True)
    with pytest.raises(ValueError, match=f"model.config.{name} is True, but predictions hold"):
        Trainer(model=model, args=arguments(tmp_path))


def test_shares_of_a_run_that_settings_make_longer_are_refused(tmp_path: Path) -> None:
    given = arguments(tmp_path, eval_strategy="steps", eval_steps=0.5)
    with pytest.raises(ValueError, match="eval_steps is a share of the run, which epochs changes"):
        Trainer(model=hf_vit(), args=given, epochs=4)


def test_metrics_that_are_not_returned_are_told_apart_from_an_error(tmp_path: Path) -> None:
    with made(tmp_path, compute_metrics=lambda prediction: None) as trainer:
        with pytest.raises(TypeError, match="compute_metrics returned a NoneType; return a dict"):
            trainer.evaluate()


def test_the_model_is_left_in_eval_mode_and_knows_its_problem(tmp_path: Path) -> None:
    with made(tmp_path) as trainer:
        trainer.train()
        trainer.evaluate()
        assert not trainer.model.training
        trainer.save_model()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["problem_type"] == "single_label_classification"


def test_a_prefixed_metric_and_a_named_set_are_understood(tmp_path: Path) -> None:
    def judge(prediction: Any) -> dict[str, float]:
        return {f"eval_{name}": value for name, value in accuracy(prediction).items()}

    options = {"metric_for_best_model": "accuracy", "load_best_model_at_end": True}
    options["save_strategy"] = "epoch"
    with made(tmp_path, options=options, compute_metrics=judge) as trainer:
        trainer.train()
        assert trainer.state.best_metric == max(
            log["eval_accuracy"] for log in trainer.state.log_history if "eval_accuracy" in log
        )
    sets = {"a": rows(5), "b": rows(6)}
    with made(tmp_path / "b", options={"eval_strategy": "no"}, eval_dataset=sets) as trainer:
        assert "eval_accuracy" in trainer.evaluate("b")
        with pytest.raises(ValueError, match=r"no eval_dataset named 'c'; there is \['a', 'b'\]"):
            trainer.evaluate("c")


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config"),
        ({"label_names": ["other"]}, "label_names has"),
    ],
)
def test_other_batches_and_labels_are_refused(
    tmp_path: Path, option: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Trainer(model=hf_vit(), args=arguments(tmp_path, **option))


def test_an_image_processor_pads_nothing(tmp_path: Path) -> None:
    with made(tmp_path, data_collator=None, processing_class=ViTImageProcessor()) as trainer:
        assert trainer.data_collator is transformers.default_data_collator


def test_a_vit_with_a_loss_of_its_own_is_refused() -> None:
    model: ViTForImageClassification = hf_vit()
    model.loss_function = lambda *given: torch.zeros(())
    with pytest.raises(ValueError, match="model.loss_function was set"):
        adapt(model)


def test_what_is_made_of_logits_is_kept_as_in_transformers(tmp_path: Path) -> None:
    def likeliest(logits: Tensor, labels: Tensor) -> Tensor:
        assert len(labels) == len(logits)
        return logits.argmax(-1)

    def right(prediction: Any) -> dict[str, float]:
        return {"right": (prediction.predictions == prediction.label_ids).mean()}

    given = {"preprocess_logits_for_metrics": likeliest, "compute_metrics": right}
    found = []
    for kind in (Trainer, transformers.Trainer):
        with made(tmp_path / kind.__name__, kind=kind, **given) as trainer:
            trainer.train()
            found.append((trainer.evaluate()["eval_right"], trainer.predict(rows(9)).predictions))
    (ours, mine), (theirs, other) = found
    assert ours == theirs and mine.shape == (9,)
    np.testing.assert_array_equal(mine, other)


def test_torch_compile_has_the_losses_and_metrics_of_a_run_without(tmp_path: Path) -> None:
    logged, graphs = [], []
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    for number, options in enumerate(({}, {**compiled, "torch_compile_mode": "default"})):
        before = int(counters["stats"]["unique_graphs"])
        with made(tmp_path / str(number), options=options) as trainer:
            names = list(trainer.model.state_dict())
            trainer.train()
            assert list(trainer.model.state_dict()) == names
            logs = trainer.state.log_history
        told = ("loss", "eval_loss", "eval_accuracy")
        logged.append([{k: v for k, v in log.items() if k in told} for log in logs])
        graphs.append(int(counters["stats"]["unique_graphs"]) - before)
    assert len(logged[1]) == len(logged[0])
    for mine, expected in zip(logged[1], logged[0], strict=True):
        assert mine == pytest.approx(expected, rel=1e-6)
    assert graphs[0] == 0 < graphs[1]
