"""Hold that odd but plausible uses come to transformers' numbers, or are refused with a reason."""

from __future__ import annotations

import gc
import weakref
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset, Subset
from transformers import BertForQuestionAnswering, TrainerCallback

from pipetransformer import CallbackError
from pipetransformer.hf import Trainer
from pipetransformer.hf.callback_bridge import CallbackBridge
from tests.helpers.hf_runs import KINDS, SAVES, arguments, made, numbers, questions, reader, rows
from tests.helpers.marks import slow

BEST = {"save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 3}


class StopIn(TrainerCallback):  # type: ignore[misc]
    """End the run in an event of step 3 or later."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._stop)

    def _stop(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        control.should_training_stop = state.global_step >= 3


def found(folder: Path, kind: Any, options: dict[str, Any], **given: Any) -> dict[str, Any]:
    given = {name: value() if callable(value) else value for name, value in given.items()}
    with made(folder / kind.__module__, kind=kind, options=options, **given) as trainer:
        output = trainer.train()
        state = trainer.state
        return {
            "logs": [numbers(one) for one in state.log_history],
            "loss": output.training_loss,
            "ended": (output.global_step, state.epoch, state.best_metric, state.best_global_step),
        }


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"eval_strategy": "steps", "eval_steps": 0.4, "logging_steps": 0.3}, {}),
        slow({"train_sampling_strategy": "sequential", "logging_strategy": "epoch"}, {}),
        ({"per_device_train_batch_size": 100, "num_train_epochs": 3}, {}),
        ({**SAVES, "save_total_limit": 0}, {}),
        ({**BEST, "learning_rate": 0.0, "metric_for_best_model": "accuracy"}, {}),
        slow({**BEST, "save_total_limit": 1}, {}),
        (
            {"label_names": ["labels"], "eval_accumulation_steps": 1},
            {"train_dataset": Subset(rows(40), range(5, 30))},
        ),
        *(
            (slow if event != "on_evaluate" else pytest.param)(
                {"eval_strategy": "steps", "eval_steps": 2},
                {"callbacks": lambda e=event: [StopIn(e)]},
            )
            for event in ("on_log", "on_evaluate", "on_epoch_end")
        ),
    ],
)  # fmt: skip
def test_a_run_is_transformers_own(
    tmp_path: Path, options: dict[str, Any], given: dict[str, Any]
) -> None:
    theirs, ours = (found(tmp_path, kind, options, **given) for kind in KINDS)
    assert ours["ended"] == pytest.approx(theirs["ended"], abs=1e-4)
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
    assert [one["step"] for one in ours["logs"]] == [one["step"] for one in theirs["logs"]]
    for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
        mine.pop("total_flos", None), other.pop("total_flos", None)
        assert mine == pytest.approx(other, abs=2e-4)


def test_what_was_logged_before_a_run_is_not_of_it(tmp_path: Path) -> None:
    """Evaluations before `train` stayed in its history, which transformers begins anew."""
    logged = []
    for kind in KINDS:
        with made(tmp_path / kind.__module__, kind=kind) as trainer:
            trainer.evaluate()
            trainer.train()
            trainer.evaluate()
            logged.append([one["step"] for one in trainer.state.log_history])
    assert logged[1] == logged[0]


@pytest.mark.parametrize("names", [["label"], [], ["start_positions"], ["labels", "label"]])
def test_labels_by_other_names_are_refused(tmp_path: Path, names: list[str]) -> None:
    """They were taken, and evaluated what transformers leaves out."""
    text = r"label_names has .*, but a BertForSequenceClassification calls its labels \['labels'\]"
    with pytest.raises(ValueError, match=text), made(tmp_path, options={"label_names": names}):
        pass


def test_answers_by_names_in_another_order_are_refused(tmp_path: Path) -> None:
    given = arguments(tmp_path, label_names=["end_positions", "start_positions"])
    with pytest.raises(ValueError, match="calls its labels .'start_positions', 'end_positions'"):
        Trainer(model=reader(), args=given)


class OwnReader(BertForQuestionAnswering):  # type: ignore[misc]
    """Have a name of its own."""


def test_a_subclass_of_a_model_that_answers_predicts_starts_and_ends(tmp_path: Path) -> None:
    """Its class's name decided, and its predictions were one array."""
    predicted = []
    for kind in KINDS:
        model = reader()
        model.__class__ = OwnReader
        given = arguments(tmp_path, label_names=["start_positions", "end_positions"])
        trainer = kind(model=model, args=given, eval_dataset=questions(4, answered=True))
        with nullcontext() if kind is transformers.Trainer else closing(trainer):
            predicted.append(trainer.predict(questions(4, answered=True)))
    theirs, ours = predicted
    for mine, other in zip(ours.predictions, theirs.predictions, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("hyperparameter_search", "make a Trainer for each trial, in an output_dir of its own"),
        ("push_to_hub", "call save_model"),
        ("optimizer", "each stage has its own; give args.optim or optimizer_cls_and_kwargs"),
        ("get_train_dataloader", "training here is not transformers' loop"),
    ],
)
def test_what_is_missing_says_why(tmp_path: Path, name: str, why: str) -> None:
    with made(tmp_path) as trainer:
        with pytest.raises(AttributeError, match=f"no attribute '{name}': {why}"):
            getattr(trainer, name)


def test_what_nobody_has_is_missing_as_ever(tmp_path: Path) -> None:
    with made(tmp_path) as trainer:
        with pytest.raises(AttributeError, match="no attribute 'evaluat'$"):
            trainer.evaluat()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows(30))


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_a_stream_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    options = {"max_steps": 4, "eval_strategy": "no"}
    with made(tmp_path, options=options, **{name: Stream()}) as trainer:
        with pytest.raises(TypeError, match=r"\(Stream\) has no length; .* list\(dataset\)"):
            trainer.train() if name == "train_dataset" else trainer.evaluate()


def counted(self: Any, model: Any, inputs: Any, num_items_in_batch: Any, **more: Any) -> Any:
    assert num_items_in_batch is None or isinstance(num_items_in_batch, torch.Tensor)
    outputs = model(**inputs)
    return (outputs.loss, outputs) if more.get("return_outputs") else outputs.loss


def test_a_loss_that_insists_on_the_number_of_items_is_given_none(tmp_path: Path) -> None:
    """It was called without, and failed."""
    logged = []
    for base in KINDS:
        kind = type("Own", (base,), {"compute_loss": counted})
        with made(tmp_path / base.__module__, kind=kind) as trainer:
            trainer.train()
            logged.append([one["loss"] for one in trainer.state.log_history if "loss" in one])
            if base is Trainer:
                trainer.close()
    assert logged[1] == pytest.approx(logged[0], abs=1e-4)


def telling(self: Any, model: Any, inputs: Any, **more: Any) -> Any:
    loss = model(**inputs).loss
    self.log({"part": float(loss.detach())})
    return loss


def test_a_loss_that_logs_is_refused(tmp_path: Path) -> None:
    """Its history had 52 entries of measuring, and four of every step, of micro-batches."""
    with made(tmp_path, kind=type("Own", (Trainer,), {"compute_loss": telling})) as trainer:
        with closing(trainer), pytest.raises(ValueError, match="compute_loss calls log, but"):
            trainer.train()


def test_a_run_holds_no_results_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were kept to the end, on a GPU with their tensors."""
    results, usual = [], CallbackBridge.on_step_end

    def watched(self: Any, trainer: Any, result: Any) -> None:
        results.append(weakref.ref(result))
        usual(self, trainer, result)

    monkeypatch.setattr(CallbackBridge, "on_step_end", watched)
    with made(tmp_path, options={"logging_strategy": "no"}) as trainer:
        trainer.train()
        gc.collect()
        assert len(results) == 8
        assert sum(one() is not None for one in results) <= 1


class FailAt(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if state.global_step == 9:
            raise ValueError("killed")


def test_a_run_that_was_over_and_went_on_is_not_replaced(tmp_path: Path) -> None:
    """It counted as over until its first save, and what it could go on from was removed."""
    options = {**SAVES, "save_steps": 8}
    with made(tmp_path, options=options) as trainer:
        trainer.train()
    options["num_train_epochs"] = 4
    with made(tmp_path, options=options, callbacks=[FailAt()]) as trainer:
        with pytest.raises(CallbackError, match="killed"):
            trainer.train(resume_from_checkpoint=True)
    with made(tmp_path, options=options) as trainer:
        with pytest.raises(ValueError, match="already holds a run"):
            trainer.train()
