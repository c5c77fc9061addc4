"""The losses that adapters give are the models' own, however the samples are divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from autopipe.loss import Loss, LossFunction, choose_loss, smooth_labels
from pipetransformer.model import LayeredModel, adapt
from pipetransformer.model.losses import span_loss
from tests.helpers.adapted import (
    LENGTH,
    MODELS,
    NUM_SAMPLES,
    answerer,
    batch_for,
    classifier,
    hf_vit,
    timm_vit,
)


def mean_in_parts(
    layered: LayeredModel, output: Tensor, target: Any, loss_fn: LossFunction | None = None
) -> Tensor:
    """Combine the losses of samples 0 and 1..3 as the trainer does."""
    total, count = torch.zeros(()), torch.zeros(())
    loss_fn = layered.loss_fn if loss_fn is None else loss_fn
    assert loss_fn is not None
    for rows in (slice(0, 1), slice(1, None)):
        part = (
            {name: entry[rows] for name, entry in target.items()}
            if isinstance(target, dict)
            else target[rows]
        )
        value = loss_fn(output[rows], part)
        size = len(output[rows])
        value, number = value if isinstance(value, tuple) else (value * size, size)
        total, count = total + value, count + number
    return total / count


@pytest.mark.parametrize("build", [classifier, hf_vit])
@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({}, torch.tensor([2, -100, 0, 1])),
        ({"num_labels": 1}, torch.tensor([0.5, -1.0, 2.0, 0.0])),
        ({"problem_type": "regression"}, torch.randn(NUM_SAMPLES, 3)),
        ({}, torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])),
    ],
    ids=["classes", "one value", "values", "many labels"],
)
def test_classification_loss_is_the_models_own_in_any_split(
    build: Callable[..., Any], options: dict[str, Any], labels: Tensor
) -> None:
    model = build(**options).eval()
    layered, batch = adapt(model), batch_for(model)
    ours = mean_in_parts(layered, layered.run(batch), labels)
    assert layered.targets == ("labels",)
    torch.testing.assert_close(ours, model(**batch, labels=labels).loss)


@pytest.mark.parametrize("build", [classifier, hf_vit])
def test_regression_with_too_few_values_is_refused_in_words(build: Callable[..., Any]) -> None:
    loss_fn = adapt(build(problem_type="regression", num_labels=2)).loss_fn
    assert loss_fn is not None
    with pytest.raises(ValueError, match=r"shape \(4, 2\), but targets are \(4,\); give each"):
        loss_fn(torch.zeros(4, 2), torch.zeros(4))


@pytest.mark.parametrize(
    "kind", ["bert_tokens", "roberta_tokens", "camembert_tokens", "distilbert_tokens"]
)
def test_token_loss_is_the_models_own_in_any_split(kind: str) -> None:
    model = MODELS[kind]().eval()
    layered, batch = adapt(model), batch_for(model)
    labels = torch.arange(NUM_SAMPLES * LENGTH).reshape(NUM_SAMPLES, LENGTH) % 3
    labels = labels.where(batch["attention_mask"] == 1, -100)
    ours = mean_in_parts(layered, layered.run(batch), labels)
    torch.testing.assert_close(ours, model(**batch, labels=labels).loss)
    smoothed = smooth_labels(choose_loss(None, layered.loss_fn, model=kind), 0.1)
    expected = LabelSmoother(epsilon=0.1)(model(**batch), labels)
    ours = mean_in_parts(layered, layered.run(batch), labels, smoothed)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("starts", [[0, 3, 5, 2], [-1, 3, 9, LENGTH]])
def test_answer_loss_is_the_models_own_in_any_split(starts: list[int]) -> None:
    bert = answerer().eval()
    layered, batch = adapt(bert), batch_for(bert)
    positions = {
        "start_positions": torch.tensor(starts),
        "end_positions": torch.tensor(starts)[:, None],
    }
    ours = mean_in_parts(layered, layered.run(batch), positions)
    torch.testing.assert_close(ours, bert(**batch, **positions).loss)


def test_answers_cut_off_at_their_end_weigh_all_positions_alike() -> None:
    positions = {
        "start_positions": torch.tensor([1, 2]),
        "end_positions": torch.tensor([2, LENGTH]),
    }
    total, count = span_loss(torch.zeros(2, LENGTH, 2), positions)
    assert count == 3
    torch.testing.assert_close(total, 3 * torch.tensor(float(LENGTH)).log())


def test_timm_loss_takes_classes_and_probabilities() -> None:
    layered = adapt(timm_vit())
    output, classes = torch.randn(NUM_SAMPLES, 3), torch.tensor([2, 0, 1, 1])
    expected = nn.functional.cross_entropy(output, classes)
    torch.testing.assert_close(mean_in_parts(layered, output, classes), expected)
    torch.testing.assert_close(mean_in_parts(layered, output, torch.eye(3)[classes]), expected)


def smoothed(layered: LayeredModel) -> Loss:
    """Return the model's own loss with label smoothing."""
    return smooth_labels(choose_loss(None, layered.loss_fn, model="Model"), 0.1)


@pytest.mark.parametrize("build", [classifier, hf_vit, timm_vit])
def test_a_smoothed_loss_is_that_of_transformers_and_torch(build: Callable[..., Any]) -> None:
    layered = adapt(build())
    output, labels = torch.randn(NUM_SAMPLES, 3), torch.tensor([2, -100, 0, 1])
    ours = mean_in_parts(layered, output, labels, smoothed(layered))
    torch.testing.assert_close(ours, LabelSmoother(0.1)({"logits": output}, labels))
    torch.testing.assert_close(ours, nn.CrossEntropyLoss(label_smoothing=0.1)(output, labels))


@pytest.mark.parametrize(
    "layered",
    [
        adapt(answerer()),
        adapt(classifier(num_labels=1)),
        adapt(classifier(problem_type="regression")),
        adapt(hf_vit(problem_type="multi_label_classification")),
    ],
)
def test_a_loss_over_no_classes_is_not_smoothed(layered: LayeredModel) -> None:
    with pytest.raises(ValueError, match=r"label_smoothing is 0.1, but the loss \S+ is not known"):
        smoothed(layered)


def test_targets_that_turn_out_to_be_no_classes_are_not_smoothed() -> None:
    loss = smoothed(adapt(classifier()))
    with pytest.raises(ValueError, match=r"targets are torch.float32; give classes as integers"):
        loss(torch.randn(4, 3), torch.rand(4, 3))
