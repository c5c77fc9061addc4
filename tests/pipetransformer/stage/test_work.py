"""Prove that a metric which answers wrongly is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from pipetransformer import Trainer
from tests.models import tiny_data, tiny_model


def mean(output: Tensor, target: Tensor) -> Tensor:
    """Return what torch's users would."""
    return (output.argmax(1) == target).double().mean()


@pytest.mark.parametrize(
    ("metric", "what"),
    [(mean, "Tensor"), (lambda output, target: 0.5, "float"), (lambda *_: (1, 2, 3), "tuple")],
    ids=["tensor", "number", "three"],
)
def test_a_metric_without_sum_and_count_is_named(metric: Callable[..., Any], what: str) -> None:
    with Trainer(
        tiny_model(),
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        metrics={"acc": metric},
        progress=False,
    ) as trainer:
        wanted = rf"metric 'acc' returned a {what}; return \(sum, count\) of the batch"
        with pytest.raises(TypeError, match=wanted):
            trainer.evaluate(tiny_data())
