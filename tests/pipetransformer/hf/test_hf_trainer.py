"""Prove that a script written for transformers.Trainer comes to the same numbers with ours."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import TrainerCallback

from pipetransformer import CallbackError, FreezeSchedule
from pipetransformer.hf import Trainer, evaluations
from tests.helpers.adapted import hf_vit
from tests.helpers.hf_runs import accuracy, arguments, made, rows
from tests.helpers.inspection import is_labelled
from tests.helpers.pool import Pool
from tests.helpers.texts import tiny_bert


def run(folder: Path, kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Train, evaluate and predict as a script does; return what it sees."""
    with made(folder, kind=kind, options=options) as trainer:
        output = trainer.train()
        metrics = trainer.evaluate(metric_key_prefix="final")
        predicted = trainer.predict(rows(9))
        return {
            "logs": trainer.state.log_history,
            "train_loss": output.training_loss,
            "steps": output.global_step,
            "metrics": metrics,
            "predictions": predicted.predictions,
            "labels": predicted.label_ids,
            "test": predicted.metrics,
        }


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 5, "lr_scheduler_type": "cosine", "max_grad_norm": 0.1},
        {"num_train_epochs": 1.5, "label_smoothing_factor": 0.1, "optim": "sgd"},
        {"eval_strategy": "steps", "eval_steps": 3, "data_seed": 11, "logging_steps": 2},
        {"max_steps": 3, "logging_strategy": "no", "logging_first_step": True},
    ],
    ids=str,
)
def test_losses_metrics_and_predictions_are_those_of_transformers(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    theirs = run(tmp_path / "theirs", transformers.Trainer, options)
    ours = run(tmp_path / "ours", Trainer, options)
    assert ours["steps"] == theirs["steps"]
    assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=1e-4)
    for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
        for name in mine.keys() & other.keys() - {"total_flos"}:
            if "runtime" not in name and "second" not in name:
                assert mine[name] == pytest.approx(other[name], abs=1e-4), (name, mine, other)
        assert {n for n in other if "_second" not in n and "runtime" not in n} <= mine.keys()
    assert ours["metrics"].keys() == theirs["metrics"].keys()
    for name in ("final_loss", "final_accuracy", "epoch"):
        assert ours["metrics"][name] == pytest.approx(theirs["metrics"][name], abs=1e-4)
    np.testing.assert_allclose(ours["predictions"], theirs["predictions"], atol=1e-4)
    np.testing.assert_array_equal(ours["labels"], theirs["labels"])
    assert ours["test"].keys() == theirs["test"].keys()


def test_a_run_is_resumed_saved_and_described(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "no"}
    with made(tmp_path / "whole", options=saves) as trainer:
        trainer.train()
        expected = {n: p.clone() for n, p in trainer.model.named_parameters()}
    stop = {**saves, "callbacks": [StopAt(5)]}
    callbacks = stop.pop("callbacks")
    with made(tmp_path / "parts", options=stop, callbacks=callbacks) as trainer:
        assert trainer.train().global_step == 5
    with made(tmp_path / "parts", options=saves) as trainer:
        output = trainer.train(resume_from_checkpoint=True)
        assert output.global_step == 8
        # From step 5 on: 8 + 8 + 6 samples in 3 steps; those of before the resume were counted.
        seconds = output.metrics["train_runtime"]
        for name, num in (("samples", 22), ("steps", 3)):
            per_s = output.metrics[f"train_{name}_per_second"]
            assert per_s == pytest.approx(num / seconds, rel=0.05, abs=5e-4), name
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter, expected[name]), name
        trainer.save_model()
        trainer.log_metrics("train", output.metrics)
        trainer.save_metrics("train", output.metrics)
        trainer.save_state()
        trainer.create_model_card(tasks="text-classification")
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "parts")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    for name in ("train_results.json", "all_results.json", "trainer_state.json", "README.md"):
        assert (tmp_path / "parts" / name).exists()
    with made(tmp_path / "parts", options=saves) as trainer:
        with pytest.raises(ValueError, match="resume_from_checkpoint is '/elsewhere'"):
            trainer.train(resume_from_checkpoint="/elsewhere")


class StopAt(TrainerCallback):  # type: ignore[misc]
    """Ask for the end after so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> Any:
        control.should_training_stop = state.global_step >= self.step
        return control


def test_several_evaluation_sets_are_judged_in_a_run_as_in_transformers(tmp_path: Path) -> None:
    several, logged = {"matched": rows(8), "other": rows(5)}, []
    for kind in (transformers.Trainer, Trainer):
        with made(tmp_path / kind.__module__, kind=kind, eval_dataset=several) as trainer:
            trainer.train()
            logged.append([log for log in trainer.state.log_history if "loss" not in log][:-1])
    assert len(logged[0]) == 4
    for theirs, ours in zip(*logged, strict=True):
        for name in theirs.keys() | ours.keys():
            if "second" not in name and not name.endswith("time"):
                assert ours[name] == pytest.approx(theirs[name], abs=1e-4), name


def test_evaluation_alone_needs_no_training_set_and_leaves_the_folder_empty(
    tmp_path: Path,
) -> None:
    with made(tmp_path / "none", train_dataset=None) as trainer:
        assert trainer.evaluate().keys() >= {"eval_loss", "eval_accuracy"}
        with pytest.raises(ValueError, match="there is no train_dataset"):
            trainer.train()
    assert list((tmp_path / "none").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_delay": 2}, "eval_delay=2"),
        (
            {"torch_compile_mode": "reduce-overhead"},
            "torch_compile_mode is 'reduce-overhead'; cho",
        ),
        ({"dataloader_drop_last": True}, "dataloader_drop_last=True"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy is 'best'"),
    ],
    ids=str,
)
def test_arguments_that_would_not_be_honoured_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        with made(tmp_path, options=options):
            pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, "optimizers would not be"),
        ({"model_init": tiny_bert}, "model_init would not be honoured"),
        ({"train_dataset": iter([1])}, r"train_dataset \(list_iterator\) has no length"),
        ({"callbacks": [3]}, "3 is no transformers.TrainerCallback"),
        ({"settings": 3}, "unknown setting"),
    ],
    ids=["optimizers", "model_init", "stream", "callbacks", "settings"],
)
def test_what_would_be_left_aside_is_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        with made(tmp_path, **given) as trainer:
            trainer.train()


class Asks(TrainerCallback):  # type: ignore[misc]
    """Ask for an evaluation, as no setting says."""

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> Any:
        control.should_evaluate = True
        return control


class Hears(TrainerCallback):  # type: ignore[misc]
    """Want to hear of what is not told."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        pass


def test_callbacks_that_ask_for_what_is_not_done_are_refused(tmp_path: Path) -> None:
    with made(tmp_path, callbacks=[Asks()]) as trainer:
        with pytest.raises(CallbackError, match="should_evaluate in on_step_end"):
            trainer.train()
    with pytest.raises(ValueError, match="Hears overrides on_pre_optimizer_step"):
        with made(tmp_path, callbacks=[Hears()]):
            pass


class Heard(TrainerCallback):  # type: ignore[misc]
    """Take down the beginning, predictions, and whether this rank writes."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_init_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self.events.append(("init", state.is_world_process_zero, facts["model"] is not None))

    def on_predict(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self.events.append(("predict", state.is_world_process_zero, set(facts["metrics"])))


def predict_alone(folder: Path) -> list[Any]:
    heard = Heard()
    with made(folder, train_dataset=None, callbacks=[heard]) as trainer:
        trainer.predict(rows(4), metric_key_prefix="mine")
    return heard.events


def test_callbacks_hear_of_the_beginning_and_of_predictions_on_a_rank_they_know(
    two_ranks: Pool, tmp_path: Path
) -> None:
    for rank, events in enumerate(two_ranks.run(predict_alone, tmp_path)):
        (begin, predicted) = events
        assert begin == ("init", rank == 0, True)
        assert predicted[:2] == ("predict", rank == 0)
        assert {"mine_loss", "mine_accuracy", "mine_runtime"} <= predicted[2]


def test_evaluations_adapt_a_model_once_whatever_their_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted, entry_names = list[Any](), evaluations.entry_names

    def noting(model: Any) -> Any:
        adapted.append(model)
        return entry_names(model)

    monkeypatch.setattr(evaluations, "entry_names", noting)
    bare = [{name: value for name, value in row.items() if "label" not in name} for row in rows(4)]
    with made(tmp_path, compute_metrics=None) as trainer:
        losses = ["eval_loss" in trainer.evaluate(one) for one in (rows(9), bare, rows(9))]
        assert losses == [True, False, True]
        assert adapted == [trainer.model]
        trainer.model = other = tiny_bert().float()
        assert is_labelled(trainer, rows(4)) and not is_labelled(trainer, bare)
        assert adapted[1:] == [other]


def images(num: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(num)
    pixels = torch.randn(num, 3, 8, 8, generator=generator)
    return [{"pixel_values": one, "labels": index % 3} for index, one in enumerate(pixels)]


def trainer_of(kind: Any, folder: Path, **given: Any) -> Any:
    torch.manual_seed(0)
    return kind(
        model=hf_vit(),
        args=arguments(folder, num_train_epochs=3),
        train_dataset=images(30),
        eval_dataset=images(13),
        compute_metrics=accuracy,
        **given,
    )


def losses(trainer: Any) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_a_vit_trains_as_with_transformers_until_it_freezes_and_then_keeps_what_is_frozen(
    tmp_path: Path,
) -> None:
    theirs = trainer_of(transformers.Trainer, tmp_path / "theirs")
    theirs.train()
    with closing(trainer_of(Trainer, tmp_path / "ours", freeze=FreezeSchedule([0, 1]))) as ours:
        before = {name: p.clone() for name, p in ours.model.named_parameters()}
        kept: dict[str, torch.Tensor] = {}

        class AfterEpoch(transformers.TrainerCallback):  # type: ignore[misc]
            def on_epoch_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
                if state.epoch == 1:
                    kept.update({n: p.clone() for n, p in facts["model"].named_parameters()})

        ours.add_callback(AfterEpoch)
        ours.train()
        after = dict(ours.model.named_parameters())
        hits = ours._trainer.report.cache_hits
    assert len(losses(ours)) == 12
    assert losses(ours)[:4] == pytest.approx(losses(theirs)[:4], abs=1e-5)
    first = {n for n in kept if "embeddings" in n or ".0." in n}
    moving = {n for n in kept if "key.bias" not in n}  # Whose gradients are rounding alone.
    assert {n for n in moving if torch.equal(after[n], kept[n])} == first & moving
    assert not any(torch.equal(before[n], kept[n]) for n in moving)
    assert hits > 0
