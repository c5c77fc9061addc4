"""Prove that predictions are the model's own, for any pipelines, and what metrics make of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipetransformer import (
    CallbackError,
    EvalPrediction,
    LayeredModel,
    PredictionOutput,
    Sublayer,
    Trainer,
)
from tests.helpers.adapted import answerer
from tests.helpers.models import Entries, tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import Pool

NUM_ROWS = 23
"""Neither the replicas nor the rounds divide it."""


def answerer_rows(labels: bool = True) -> Entries:
    """Make texts with two targets."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 20, (NUM_ROWS, 6), generator=generator)
    spans = torch.randint(0, 6, (2, NUM_ROWS), generator=generator)
    targets = {"start_positions": spans[0], "end_positions": spans[1]}
    return Entries({"input_ids": ids, **(targets if labels else {})})


class Scale(nn.Module):
    """Multiply by a weight of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden


class Steps(Scale):
    """Put out as many columns as the longest sample of the micro-batch asks for."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden[:, : int(hidden.max())])


def uneven() -> LayeredModel:
    """Build a model whose output's second dimension differs from micro-batch to micro-batch."""
    model = nn.Sequential(Scale(), Steps())
    sublayers = [Sublayer(str(i), i, module) for i, module in enumerate(model)]
    return LayeredModel(
        model, sublayers, inputs=("x",), targets=("y",), loss_fn=lambda out, y: out.mean()
    )


def uneven_rows() -> TensorDataset:
    """Make row i ask for 1 + i // 4 columns, the first of which holds how many."""
    widths = 1 + torch.arange(NUM_ROWS) // 4
    x = torch.zeros(NUM_ROWS, 8)
    x[:, 0] = widths
    return TensorDataset(x, widths)


def trainer_of(
    length: int, model: Any, data: Any, loss_fn: Any = None, **settings: Any
) -> Trainer:
    """Build a trainer of pipelines of a length."""
    return Trainer(
        model,
        data,
        loss_fn=loss_fn,
        pipeline_length=length,
        **{"global_batch_size": 8, "progress": False, **settings},
    )


def predicted(length: int, case: str) -> PredictionOutput:
    """Predict a case's rows; the outcome is this rank's."""
    torch.manual_seed(0)
    if case == "uneven":
        model, rows, loss = uneven(), uneven_rows(), None
    elif case.startswith("answerer"):
        model, rows, loss = answerer(), answerer_rows(labels=case == "answerer"), None
    else:
        data = tiny_data(num_samples=NUM_ROWS)
        x, _ = data.tensors
        rows = {"tiny": data, "no labels": TensorDataset(x), "entries": Entries({"x": x})}[case]
        model, loss = tiny_model(), nn.CrossEntropyLoss()
    train = tiny_data() if loss else rows
    if case == "answerer, no labels":
        train = answerer_rows()
    with trainer_of(length, model, train, loss, micro_batch_size=2) as trainer:
        return trainer.predict(rows)


def pools(request: pytest.FixtureRequest, num_ranks: int) -> Callable[..., list[Any]]:
    """Return what runs a function on so many ranks."""
    if num_ranks == 1:
        return lambda function, *arguments: [function(*arguments)]
    pool: Pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[num_ranks])
    return pool.run


_PREDICTED: dict[tuple[int, int, str], list[PredictionOutput]] = {}


def found_by(
    request: pytest.FixtureRequest, length: int, replicas: int, case: str
) -> list[PredictionOutput]:
    """Return what each rank predicts; each case is predicted once, and nobody may change it."""
    key = (length, replicas, case)
    if key not in _PREDICTED:
        _PREDICTED[key] = pools(request, length * replicas)(predicted, length, case)
    return _PREDICTED[key]


SHAPES = {"1x1": (1, 1), "1x2": (1, 2), "2x1": (2, 1), "2x2": (2, 2)}


shapes = pytest.mark.parametrize(
    ("length", "replicas"),
    [
        pytest.param(*shape, id=name, marks=[pytest.mark.slow] * (name == "2x2"))
        for name, shape in SHAPES.items()
    ],
)


@shapes
def test_predictions_equal_a_plain_forward_on_every_rank(
    request: pytest.FixtureRequest, length: int, replicas: int
) -> None:
    model, (x, y) = tiny_model().eval(), tiny_data(num_samples=NUM_ROWS).tensors
    with torch.no_grad():
        expected = model(x)
    for found in found_by(request, length, replicas, "tiny"):
        assert found.predictions.dtype == np.float32
        # float64 rounded to float32.
        np.testing.assert_allclose(found.predictions, expected.numpy(), rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(found.label_ids, y.numpy())
        loss = nn.functional.cross_entropy(expected, y).item()
        assert found.metrics["loss"] == pytest.approx(loss, rel=1e-9)
        assert found.metrics["accuracy"] == pytest.approx(
            (expected.argmax(1) == y).double().mean().item()
        )


@shapes
def test_several_targets_come_in_the_model_s_order(
    request: pytest.FixtureRequest, length: int, replicas: int
) -> None:
    torch.manual_seed(0)
    model, rows = answerer().eval(), answerer_rows()
    with torch.no_grad():
        output = model(rows.tensors["input_ids"])
        expected = torch.stack([output.start_logits, output.end_logits], dim=-1)
    for found in found_by(request, length, replicas, "answerer"):
        np.testing.assert_allclose(found.predictions, expected.numpy(), rtol=1e-5, atol=1e-6)
        starts, ends = found.label_ids
        np.testing.assert_array_equal(starts, rows.tensors["start_positions"].numpy())
        np.testing.assert_array_equal(ends, rows.tensors["end_positions"].numpy())


@shapes
def test_rows_of_unequal_width_are_padded_to_the_longest(
    request: pytest.FixtureRequest, length: int, replicas: int
) -> None:
    widths = 1 + np.arange(NUM_ROWS) // 4
    # Micro-batches of two rows: all of a micro-batch are as wide as its widest.
    of_batch = np.maximum(widths, np.append(widths[1:], 0) * (np.arange(NUM_ROWS) % 2 == 0))
    expected = np.where(np.arange(widths.max()) < of_batch[:, None], 0.0, -100.0)
    expected[:, 0] = widths
    for found in pools(request, length * replicas)(predicted, length, "uneven"):
        np.testing.assert_array_equal(found.predictions, expected)


def test_truth_values_of_unequal_width_are_padded_as_numbers() -> None:
    # True, which is what -100 is as a truth value, would count as a right answer.
    settings = {"micro_batch_size": 2, "preprocess_logits_for_metrics": lambda out, _: out > 0}
    with trainer_of(1, uneven(), uneven_rows(), **settings) as trainer:
        found = trainer.predict(uneven_rows()).predictions
    assert found.dtype == np.int64
    assert (found[:, 0] == 1).all() and set(found[:, 1:].flatten()) == {0, -100}


@pytest.mark.parametrize("case", ["no labels", "entries", "answerer, no labels"])
@shapes
def test_rows_without_labels_have_predictions_alone(
    request: pytest.FixtureRequest, length: int, replicas: int, case: str
) -> None:
    labelled = "answerer" if case.startswith("answerer") else "tiny"
    for found, other in zip(
        found_by(request, length, replicas, case),
        found_by(request, length, replicas, labelled),
        strict=True,
    ):
        assert (found.label_ids, found.metrics) == (None, {})
        np.testing.assert_array_equal(found.predictions, other.predictions)


def test_an_eval_dataset_without_labels_can_be_predicted() -> None:
    x, _ = tiny_data().tensors
    rows = TensorDataset(x)
    model, loss_fn = tiny_model(), nn.CrossEntropyLoss()
    with trainer_of(1, model, tiny_data(), loss_fn, eval_dataset=rows) as trainer:
        assert trainer.predict(rows).metrics == {}


def test_an_evaluation_of_rows_without_labels_is_refused() -> None:
    x, _ = tiny_data().tensors
    with trainer_of(1, tiny_model(), tiny_data(), nn.CrossEntropyLoss()) as trainer:
        with pytest.raises(ValueError, match=r"give a mapping with the entries \['x', 'y'\]"):
            trainer.evaluate([(one,) for one in x])


def shares(prediction: EvalPrediction) -> dict[str, Any]:
    """Judge as users write it."""
    logits, labels = prediction
    assert prediction[0] is logits is prediction.predictions
    right = logits.argmax(-1) == labels
    found = {"right": right.mean(), "array": np.array(0.5), "tensor": torch.tensor(0.5)}
    return {**found, "all": right.all(), "rows": np.int64(len(labels))}


def broken(prediction: EvalPrediction) -> dict[str, float]:
    raise KeyError("no such column")


def judged(length: int, compute_metrics: Any) -> Any:
    """Evaluate and predict with a function; return the metrics of both, or the error."""
    data = tiny_data(num_samples=NUM_ROWS)
    options = {"compute_metrics": compute_metrics, "eval_dataset": data}
    trainer = trainer_of(length, tiny_model(), tiny_data(), nn.CrossEntropyLoss(), **options)
    with trainer:
        try:
            return trainer.evaluate(), trainer.predict(data).metrics
        except (CallbackError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error} <- {type(error.__cause__).__name__}"


def test_compute_metrics_sees_the_whole_data_set_once(four_ranks: Pool) -> None:
    for evaluated, of_prediction in four_ranks.run(judged, 2, shares):
        assert evaluated == of_prediction
        assert evaluated["rows"] == NUM_ROWS
        assert evaluated["right"] == pytest.approx(evaluated["accuracy"])
        assert evaluated["array"] == evaluated["tensor"] == 0.5
        assert list(evaluated)[:3] == ["accuracy", "loss", "right"]


def test_what_compute_metrics_raises_ends_all_ranks_by_name(two_ranks: Pool) -> None:
    text = "CallbackError: compute_metrics raised KeyError: 'no such column'"
    assert two_ranks.run(judged, 2, broken) == [f"{text} <- KeyError", f"{text} <- NoneType"]


def a_list(prediction: EvalPrediction) -> Any:
    return [0.5]


def a_text(prediction: EvalPrediction) -> Any:
    return {"f1": "0.5"}


def an_epoch(prediction: EvalPrediction) -> Any:
    return {"epoch": 1.0}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (a_list, "TypeError: compute_metrics returned a list; return a dict of numbers by name"),
        (a_text, "TypeError: compute_metrics returned a str under 'f1'; return a dict of numb"),
        (an_epoch, r"ValueError: compute_metrics returned \['epoch'\], which records .* other"),
    ],
)
def test_metrics_that_are_no_numbers_by_name_are_refused(
    function: Any, message: str, two_ranks: Pool
) -> None:
    for text in two_ranks.run(judged, 1, function):
        assert re.match(message, text)


def likeliest(logits: Tensor, labels: Any) -> Tensor:
    """Keep the class alone, and write into what it is given, as users' functions may."""
    classes = logits.argmax(-1)
    logits.zero_()
    labels += 1
    return classes


def reduced(length: int, preprocess: Any) -> Any:
    """Predict with a function that makes of outputs what is kept, or return the error."""
    data = tiny_data(num_samples=NUM_ROWS)
    options = {"preprocess_logits_for_metrics": preprocess, "compute_metrics": of_classes}
    trainer = trainer_of(length, tiny_model(), tiny_data(), nn.CrossEntropyLoss(), **options)
    with trainer:
        try:
            return trainer.predict(data)
        except (CallbackError, TypeError) as error:
            return f"{type(error).__name__}: {error}"


def of_classes(prediction: EvalPrediction) -> dict[str, float]:
    predicted, labels = prediction
    return {"right": (predicted == labels).mean()}


@shapes
def test_what_is_kept_of_outputs_may_be_less(
    request: pytest.FixtureRequest, length: int, replicas: int
) -> None:
    run = pools(request, length * replicas)
    for found, whole in zip(
        run(reduced, length, likeliest), found_by(request, length, replicas, "tiny"), strict=True
    ):
        np.testing.assert_array_equal(found.predictions, whole.predictions.argmax(-1))
        np.testing.assert_array_equal(found.label_ids, whole.label_ids)
        assert found.metrics == {
            **whole.metrics,
            "right": pytest.approx(whole.metrics["accuracy"]),
        }


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logits, labels: logits.nothing, r"CallbackError: .* raised AttributeError: "),
        (
            lambda logits, labels: None,
            r"TypeError: .* returned NoneType for outputs of \(\d+, 3\)",
        ),
        (lambda logits, labels: logits.mean(), r"TypeError: .* returned \(\) for outputs of"),
        (lambda logits, labels: logits[1:], r"TypeError: .* returned \(\d+, 3\) for outputs of"),
    ],
)
def test_what_is_kept_must_be_a_row_for_each_sample(function: Any, message: str) -> None:
    assert re.match(message, reduced(1, function))


def mean(output: Tensor, target: Tensor) -> Tensor:
    """Return what torch's users would."""
    return (output.argmax(1) == target).double().mean()


@pytest.mark.parametrize(
    ("metric", "what"),
    [(mean, "Tensor"), (lambda output, target: 0.5, "float"), (lambda *_: (1, 2, 3), "tuple")],
    ids=["tensor", "number", "three"],
)
def test_a_metric_without_sum_and_count_is_named(metric: Callable[..., Any], what: str) -> None:
    with tiny_trainer(metrics={"acc": metric}) as trainer:
        wanted = rf"metric 'acc' returned a {what}; return \(sum, count\) of the batch"
        with pytest.raises(TypeError, match=wanted):
            trainer.evaluate(tiny_data())
