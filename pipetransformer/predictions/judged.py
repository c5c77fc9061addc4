"""Judge predictions as a whole by the user's function, on rank 0 for all."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor

from autodp import broadcast_json
from pipetransformer.config import EVALUATION_FIELDS, ComputeMetrics
from pipetransformer.errors import CallbackError

Array = np.ndarray[Any, Any]
Labels = Array | tuple[Array, ...] | None


class EvalPrediction(NamedTuple):
    """Hold what `compute_metrics` judges; `predictions, label_ids = eval_prediction` works.

    Args:
        predictions: (N, ...) of the model's last output.
        label_ids: (N, ...) targets, or a tuple of them in the model's order.
    """

    predictions: Array
    label_ids: Labels


class PredictionOutput(NamedTuple):
    """Hold predictions of a data set, in its order.

    Args:
        predictions: (N, ...) of the model's last output, floating numbers as float32.
        label_ids: (N, ...) targets, a tuple of them in the model's order where it has several, or
            None for data without.
        metrics: loss and metrics; none without targets.
    """

    predictions: Array
    label_ids: Labels
    metrics: dict[str, float]


def judge(
    compute_metrics: ComputeMetrics, prediction: EvalPrediction, *, group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Return on every rank what the function says on rank 0. Collective.

    Raises:
        CallbackError: on every rank: the function raised.
        TypeError, ValueError: on every rank: it returned something else than numbers by names, or
            took a name that records need.
    """
    answer: dict[str, Any] = {}
    cause: Exception | None = None
    if group is None or dist.get_rank() == 0:
        try:
            answer = _as_plain(compute_metrics(prediction))
        except Exception as error:
            cause, answer = error, {"raised": f"{type(error).__name__}: {error}"}
    answer = broadcast_json(answer, group=group)
    if "raised" in answer:
        raise CallbackError(f"compute_metrics raised {answer['raised']}") from cause
    if "wrong" in answer:
        raise TypeError(
            f"compute_metrics returned {answer['wrong']}; return a dict of numbers by name, such "
            "as {'f1': 0.8}"
        )
    metrics: dict[str, float] = answer["metrics"]
    if taken := sorted(metrics.keys() & set(EVALUATION_FIELDS)):
        raise ValueError(
            f"compute_metrics returned {taken}, which records of an evaluation hold beside the "
            "metrics; choose other names"
        )
    return metrics


def _as_plain(found: Any) -> dict[str, Any]:
    """Return metrics as floats, or what is wrong with them."""
    if not isinstance(found, Mapping):
        return {"wrong": f"a {type(found).__name__}"}
    arrays = (Tensor, np.ndarray, np.generic)
    numbers = {
        name: value.item() if isinstance(value, arrays) and value.ndim == 0 else value
        for name, value in found.items()
    }
    for name, value in numbers.items():
        if not isinstance(name, str) or not isinstance(value, Real):
            return {"wrong": f"a {type(value).__name__} under {name!r}"}
    return {"metrics": {name: float(value) for name, value in numbers.items()}}
