"""Language models log the losses, and come to the weights, of transformers' own Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from pipetransformer.hf import Trainer
from tests.helpers.any_models import KINDS, build
from tests.helpers.peft_models import MODELS

LENGTH, WORDS = 8, 20
PLAIN: dict[str, Any] = {"per_device_train_batch_size": 4}
ACCUMULATED: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
SMOOTHED: dict[str, Any] = {**PLAIN, "label_smoothing_factor": 0.1}


def gpt2() -> Any:
    return build(KINDS["gpt2"]).float()


def llama() -> Any:
    return build(KINDS["llama"]).float()


class OwnMean(transformers.GPT2LMHeadModel):
    """Compute a mean without a look at what it is told of the batch."""

    def forward(self, input_ids: Any = None, labels: Any = None, **more: Any) -> Any:
        more.pop("num_items_in_batch", None)
        logits = super().forward(input_ids, **more).logits
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def own_mean() -> Any:
    model = gpt2()
    model.__class__ = OwnMean
    return model


def texts(*, is_cut: bool) -> Dataset:
    """Make texts of which all labels count, or some do not: a prompt's, or padding's."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, WORDS, (12, LENGTH), generator=generator)
    labels = ids.clone()
    for row, label in enumerate(labels if is_cut else ()):
        label[LENGTH - row % 5 :] = -100
        label[: row % 3] = -100
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})


@dataclass(frozen=True)
class Run:
    """Hold what a Trainer logs, and the weights that it comes to."""

    losses: list[float]
    evaluated: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def run(kind: Any, model: Any, folder: Path, data: Any, **given: Any) -> Run:
    """Train by one of both Trainers; `given` are TrainingArguments, and settings of ours."""
    settings = {name: given.pop(name) for name in ("micro_batch_size",) if name in given}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, per_device_eval_batch_size=12, optim="sgd",
        learning_rate=0.1, logging_steps=1, eval_strategy="epoch", save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, **given,
    )  # fmt: skip
    trainer = kind(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, **settings,
        data_collator=transformers.default_data_collator,
    )  # fmt: skip
    trainer.train()
    logs = trainer.state.log_history
    losses, evaluated, norms = (
        [entry[name] for entry in logs if name in entry]
        for name in ("loss", "eval_loss", "grad_norm")
    )
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return Run(losses, evaluated, norms, weights)


# In the story, a script with GPT-2 and texts of 64 tokens logged 64/63 of transformers' losses,
# and took steps as much larger: transformers counts first labels there, which nothing predicts.
@pytest.mark.parametrize(
    ("model", "options", "is_cut"),
    [
        pytest.param(gpt2, PLAIN, False, id="gpt2", marks=pytest.mark.slow),
        pytest.param(gpt2, ACCUMULATED, True, id="gpt2, cut and accumulated"),
        pytest.param(llama, SMOOTHED, True, id="llama, cut and smoothed"),
        pytest.param(lambda: MODELS["lora of GPT-2"]().float(), PLAIN, True, id="lora of gpt2"),
        pytest.param(lambda: MODELS["prompt"]().float(), PLAIN, False, id="prompt of llama"),
        pytest.param(own_mean, PLAIN, True, id="a mean of its own"),
    ],
)
def test_losses_and_weights_are_those_of_transformers(
    tmp_path: Path, model: Callable[[], Any], options: dict[str, Any], is_cut: bool
) -> None:
    data = texts(is_cut=is_cut)
    theirs = run(transformers.Trainer, model(), tmp_path / "theirs", data, **options)
    # Two micro-batches with unequal counts a step.
    ours = run(Trainer, model(), tmp_path / "ours", data, micro_batch_size=2, **options)
    assert len(theirs.losses) == 6
    assert len(theirs.evaluated) == 2
    # Both compute in float32, and sum in another order.
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert ours.evaluated == pytest.approx(theirs.evaluated, rel=1e-6)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-5)
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-5, atol=1e-6)


def test_a_given_loss_is_divided_by_its_own_count(tmp_path: Path) -> None:
    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        value = F.cross_entropy(
            output[:, :-1].flatten(0, 1), target[:, 1:].flatten(), reduction="sum"
        )
        return value, (target[:, 1:] != -100).sum()

    model, data = gpt2(), texts(is_cut=True)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(model=model, args=arguments, eval_dataset=data, loss_fn=loss)
    found = trainer.evaluate()["eval_loss"]
    batch = {name: torch.tensor(data[name]) for name in ("input_ids", "labels")}
    # The model itself takes the mean over predicted tokens where it is told of no count.
    assert found == pytest.approx(float(model.eval()(**batch).loss.detach()), rel=1e-6)


def with_labels(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = torch.tensor([item["input_ids"] for item in items])
    return {"input_ids": ids, "labels": ids}


def test_labels_that_the_collator_makes_are_evaluated(tmp_path: Path) -> None:
    data = texts(is_cut=False).remove_columns("labels")
    found = {}
    for kind in (transformers.Trainer, Trainer):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=1, per_device_train_batch_size=4,
            eval_strategy="epoch", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = kind(
            model=gpt2(), args=arguments, train_dataset=data, eval_dataset=data,
            data_collator=with_labels,
        )  # fmt: skip
        trainer.train()
        assert any("eval_loss" in entry for entry in trainer.state.log_history)
        found[kind] = trainer.evaluate()["eval_loss"]
    assert found[Trainer] == pytest.approx(found[transformers.Trainer], rel=1e-5)
