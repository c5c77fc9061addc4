"""A script that gives a peft model to transformers' Trainer has the same run here."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from pipetransformer.hf import Trainer
from tests.helpers.adapted import text_model
from tests.helpers.hf_runs import arguments
from tests.helpers.marks import slow
from tests.helpers.peft_models import CAUSAL, CLASSES, bert, llama, lora, samples_for

MODELS = {"classes": (bert, CLASSES), "causal": (llama, CAUSAL)}


def tuned(task: str) -> Any:
    """Build a model with adapters, in float32."""
    build, options = MODELS[task]
    torch.manual_seed(0)
    return get_peft_model(build(), lora(**options))


def train(kind: Any, task: str, folder: Path, resume: bool = False, **given: Any) -> Any:
    """Train by a Trainer of either library; return it."""
    model = tuned(task)
    options = {
        "per_device_train_batch_size": 4,
        "save_strategy": "epoch",
        "eval_strategy": "no",
        "weight_decay": 0.1,
    }
    trainer = kind(
        model=model, args=arguments(folder, **options), train_dataset=samples_for(model), **given
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("task", [slow(n) if n == "classes" else n for n in MODELS])
def test_the_run_and_the_adapter_are_those_of_transformers(tmp_path: Path, task: str) -> None:
    theirs = train(transformers.Trainer, task, tmp_path / "theirs")
    ours = train(Trainer, task, tmp_path / "ours", save_pretrained_checkpoints=True)
    torch.testing.assert_close(logged(ours), logged(theirs), rtol=1e-4, atol=1e-5)
    for trainer, name in ((ours, "ours"), (theirs, "theirs")):
        trainer.save_model(str(tmp_path / f"{name} at the end"))
    for place in ("{}/checkpoint-2", "{}/checkpoint-4", "{} at the end"):
        adapters = [
            load_file(tmp_path / place.format(name) / "adapter_model.safetensors")
            for name in ("ours", "theirs")
        ]
        assert adapters[0].keys() == adapters[1].keys()
        for name, tensor in adapters[1].items():
            torch.testing.assert_close(adapters[0][name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    assert not (tmp_path / "ours at the end" / "model.safetensors").exists()
    ours.close()


def test_checkpoints_hold_adapters_that_do_not_train_as_they_were(tmp_path: Path) -> None:
    model = tuned("classes")
    model.add_adapter("other", lora(**CLASSES))
    before = get_peft_model_state_dict(model)
    before = {name: tensor.clone() for name, tensor in before.items()}
    model.set_adapter("other")
    options = {"eval_strategy": "no", "save_strategy": "epoch"}
    with closing(
        Trainer(
            model=model,
            args=arguments(tmp_path, **options),
            train_dataset=samples_for(model),
            save_pretrained_checkpoints=True,
        )
    ) as trainer:
        trainer.train()
        trained = get_peft_model_state_dict(model, adapter_name="other")
    written = tmp_path / "checkpoint-2"
    for folder, expected in ((written, before), (written / "other", trained)):
        saved = load_file(folder / "adapter_model.safetensors")
        assert saved.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(saved[name], tensor), name


class Stops(transformers.TrainerCallback):
    """Ends a run after three of its four steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        control.should_training_stop = state.global_step == 3


def test_a_run_of_adapters_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    with closing(train(Trainer, "classes", tmp_path / "whole")) as trainer:
        expected = dict(trainer.model.state_dict())
    folder = tmp_path / "run"
    train(Trainer, "classes", folder, callbacks=[Stops()]).close()
    with closing(train(Trainer, "classes", folder, resume=True)) as trainer:
        assert trainer.state.global_step == 4
        for name, tensor in trainer.model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name


def test_predictions_of_a_peft_model_without_a_task_are_those_of_its_base(tmp_path: Path) -> None:
    model = get_peft_model(
        text_model(transformers.BertForQuestionAnswering), lora(target_modules=["query"])
    )
    rows = [{**row, "start_positions": 1, "end_positions": 2} for row in samples_for(model)]
    with closing(
        Trainer(model=model, args=arguments(tmp_path, eval_strategy="no"), train_dataset=rows)
    ) as trainer:
        starts, ends = trainer.predict(rows).predictions
    batch = {
        name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask")
    }
    with torch.no_grad():
        answer = model.eval()(**batch)
    torch.testing.assert_close(torch.as_tensor(starts), answer.start_logits)
    torch.testing.assert_close(torch.as_tensor(ends), answer.end_logits)
