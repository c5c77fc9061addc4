"""Prove that a sample which ends a run in its middle is named: torch says what, and not whose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForSequenceClassification, GPT2ForSequenceClassification

from pipetransformer import Trainer

_NUM, _BAD = 32, 21
BERT, GPT2 = BertForSequenceClassification, GPT2ForSequenceClassification


class Items:
    """Give samples, one of which is bad."""

    def __init__(self, bad: Callable[[Tensor, Tensor], Any]) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return _NUM

    def __getitem__(self, index: int) -> Any:
        x, y = torch.full((4,), index % 7), torch.tensor(index % 3)
        return self._bad(x, y) if index == _BAD else (x, y)


def truncated(x: Tensor, y: Tensor) -> Any:
    raise OSError("image file is truncated")


def run(data: Any, **settings: Any) -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), head)
    settings = {"sample_order": lambda epoch: range(_NUM), "global_batch_size": 8, **settings}
    with Trainer(model, data, loss_fn=nn.CrossEntropyLoss(), **settings) as trainer:
        trainer.fit()


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (truncated, r"step 2: the data set cannot give sample 21: OSError: image file is trunc"),
        (
            lambda x, y: (x + 9, y),
            r"step 2: the model cannot take sample 21: index out of range.* x is \(4,\) int64 "
            "from 9 to 9",
        ),
        (
            lambda x, y: (x, y + 5),
            r"step 2: the loss .* cannot take sample 21: Target 5 is out of bounds.* target is "
            r"\(\) int64 from 5 to 5",
        ),
    ],
)
def test_a_bad_sample_in_the_middle_of_a_run_is_named(
    bad: Callable[[Tensor, Tensor], Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        run(Items(bad))


@pytest.mark.parametrize(
    ("build", "places", "name", "value", "text"),
    [
        (BERT, [0], "labels", torch.tensor(5), "has the label 5, .* num_labels=2 classes"),
        (GPT2, [16], "labels", torch.tensor(5), "has the label 5, .* num_labels=2 classes"),
        (BERT, [3], "labels", torch.tensor(1.0), "has the label 1, a float32, .* int64"),
        (GPT2, [3], "labels", None, r"lacks \['labels'\]|\] lack the entry 'labels'"),
        (GPT2, range(8), "input_ids", torch.ones(9).long(), "has 9 tokens, .* positions for 8"),
        (BERT, [16], "input_ids", torch.ones(9).long(), "has 9 tokens, .* positions for 8: tok"),
        (BERT, range(8), "input_ids", torch.full((6,), 50), "has tokens from 50 to 50"),
        (GPT2, [0], "input_ids", torch.full((6,), 50), "has tokens from 50 to 50"),
    ],
)
def test_a_text_or_a_label_outside_of_the_model_is_named_wherever_it_stands(
    build: Any, name: str, value: Any, text: str, places: Sequence[int]
) -> None:
    data = [
        {"input_ids": torch.ones(6).long(), "labels": torch.tensor(i % 2)} for i in range(_NUM)
    ]
    for place in places:
        data[place][name] = value
    named = "|".join(map(str, places))
    with pytest.raises(ValueError, match=rf"samples? \[?({named})\]? ?({text})"):
        with Trainer(small(build), data, global_batch_size=1, epochs=1) as trainer:
            trainer.fit()


def test_several_labels_in_integers_are_refused() -> None:
    data = [
        {"input_ids": torch.ones(6).long(), "labels": torch.tensor([0, 1])} for _ in range(_NUM)
    ]
    model = small(BERT)
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(ValueError, match="sample 0 has labels in int64, .*: give float32"):
        with Trainer(model, data, epochs=1) as trainer:
            trainer.fit()


def test_a_target_is_offered_where_labels_are_missing() -> None:
    data = [{"input_ids": torch.ones(6).long(), "target": i % 2} for i in range(_NUM)]
    with pytest.raises(ValueError, match="; did you mean 'target'[?] rename it to 'labels'$"):
        with Trainer(small(BERT), data, epochs=1) as trainer:
            trainer.fit()


def test_a_regression_of_whole_numbers_has_no_accuracy() -> None:
    data = [{"input_ids": torch.ones(6).long(), "labels": i % 3} for i in range(_NUM)]
    with Trainer(small(BERT, num_labels=1), data, eval_dataset=data, epochs=1) as trainer:
        assert list(trainer.evaluate()) == ["loss"]


def small(build: Any, num_labels: int = 2) -> nn.Module:
    """Build a model of 20 tokens, 8 positions and some labels."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
    config = build.config_class(
        max_position_embeddings=8, pad_token_id=0, num_labels=num_labels, **sizes
    )
    model: nn.Module = build(config)
    return model


def test_a_first_sample_of_a_model_without_a_configuration_is_named() -> None:
    data = [(torch.full((4,), index % 7), torch.tensor(index % 3)) for index in range(_NUM)]
    data[1] = data[1][0], torch.tensor(5)
    with pytest.raises(ValueError, match="cannot take sample 1: Target 5 is out of bounds"):
        run(data)


def test_a_first_sample_to_evaluate_is_named() -> None:
    good = [{"input_ids": torch.ones(6).long(), "labels": torch.tensor(1)} for _ in range(4)]
    bad = [{**good[0], "labels": torch.tensor(7)}, *good]
    model = small(BertForSequenceClassification)
    with pytest.raises(ValueError, match="^the eval_dataset's sample 0 has the label 7, but"):
        with Trainer(model, good, eval_dataset=bad, global_batch_size=2) as trainer:
            trainer.fit()


def test_a_worker_names_it_too() -> None:
    with pytest.raises(ValueError, match=r"step 2:(.|\n)*the data set cannot give sample 21"):
        run(Items(truncated), num_workers=1)


def test_an_evaluation_names_it_without_a_step() -> None:
    with pytest.raises(ValueError, match=r"^the data set cannot give sample 21"):
        run(Items(lambda x, y: (x, y)), eval_dataset=Items(truncated))


def test_what_no_sample_is_to_blame_for_stays_as_it_was() -> None:
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        if len(calls) > 40:
            raise ArithmeticError("at no sample's fault")
        return nn.functional.cross_entropy(output, target)

    head = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), head)
    with pytest.raises(ArithmeticError, match="at no sample's fault"):
        with Trainer(model, Items(lambda x, y: (x, y)), loss_fn=loss, epochs=60) as trainer:
            trainer.fit()
