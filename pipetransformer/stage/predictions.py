"""Keep outputs and targets of a data set, bring all replicas' together, and judge them.

A replica's samples are a contiguous slice, and replicas are in order. A stage's workers take
micro-batches in turn, so their rows are sorted in the end:

    rank 1, last stage of replica 0    rows 0 1 2 3    padded to the widest of all
    rank 3, last stage of replica 1    rows 4 5 6
    every rank                         rows 0 1 2 3 4 5 6
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from autodp import broadcast_json, broadcast_tensor, gather_json
from pipetransformer.config import EVALUATION_FIELDS, ComputeMetrics, PreprocessLogits
from pipetransformer.errors import CallbackError

# Entries beside the targets, which have names of their own; the second says whose a row is.
OUTPUT, IDS = "output of the model", "place in the data set"
PADDING = -100
"""What fills rows that are shorter than others: transformers' choice."""

Array = np.ndarray[Any, Any]
Labels = Array | tuple[Array, ...] | None

_Entry = TypeVar("_Entry")


def as_labels(targets: Iterable[_Entry]) -> _Entry | tuple[_Entry, ...] | None:
    """Return a model's only target, a tuple of several, or None for none."""
    labels = tuple(targets)
    return (labels[0] if len(labels) == 1 else labels) if labels else None


@final
class KeptOutputs:
    """Hold outputs and targets of a replica's last stage, in host memory.

    Floating numbers become float32: numpy knows no bfloat16.

    Args:
        preprocess: maps a micro-batch's outputs and targets to what is kept of the outputs.
    """

    def __init__(self, preprocess: PreprocessLogits | None = None) -> None:
        self._preprocess = preprocess
        self.parts: dict[str, list[Tensor]] = {}

    def add(self, output: Tensor, targets: Mapping[str, Tensor], ids: Tensor) -> None:
        """Keep a micro-batch's output, targets and samples, (n, ...) each.

        Raises:
            CallbackError: `preprocess` raised.
            TypeError: it returned no tensor of as many rows.
        """
        if self._preprocess is not None:
            # Copies: the loss and the metrics still need the model's own output.
            labels = as_labels(target.clone() for target in targets.values())
            output = _call_preprocess(self._preprocess, output.detach().clone(), labels)
        for name, tensor in {OUTPUT: output, IDS: ids, **targets}.items():
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            # Always a copy: the loss comes later, and may write into its arguments.
            copy = tensor.detach().to("cpu", dtype, copy=True)
            self.parts.setdefault(name, []).append(copy)

    def describe(self) -> dict[str, Any]:
        """Describe each entry's rows in plain values."""
        return {
            name: {
                "rows": sum(map(len, parts)),
                "dtype": str(parts[0].dtype).removeprefix("torch."),
                "shapes": [list(shape) for shape in {part.shape[1:] for part in parts}],
            }
            for name, parts in self.parts.items()
        }


def _call_preprocess(preprocess: PreprocessLogits, output: Tensor, labels: Any) -> Tensor:
    try:
        made = preprocess(output, labels)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise CallbackError(f"preprocess_logits_for_metrics raised {what}") from error
    if not isinstance(made, Tensor) or made.ndim == 0 or len(made) != len(output):
        shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise TypeError(
            f"preprocess_logits_for_metrics returned {shape} for outputs of "
            f"{tuple(output.shape)}; return a tensor of as many rows"
        )
    return made


def gather_outputs(kept: KeptOutputs, *, group: dist.ProcessGroup | None) -> dict[str, Array]:
    """Return outputs and targets by name, (N, ...) each, on every rank. Collective.

    Rows of unequal second dimension are padded with -100; bool and unsigned numbers, which cannot
    be -100, become int64 then. What was kept is freed as it is copied.

    Raises:
        ValueError: on every rank: outputs differ in dtype, or in another dimension.
        PeerError: a rank is gone, or silent for longer than the group's time limit.
    """
    described = gather_json(kept.describe(), group=group)
    rank = 0 if group is None else dist.get_rank()
    arrays = {}
    for name in dict.fromkeys(name for one in described for name in one):
        parts = {source: one[name] for source, one in enumerate(described) if name in one}
        whole, first = _make_whole(name, list(parts.values())), 0
        for source, part in parts.items():
            rows = whole[first : first + part["rows"]]
            if source == rank:
                _copy_into(rows, kept.parts.pop(name))
            broadcast_tensor(rows, source, group=group, what=f"its {name}")
            first += len(rows)
        arrays[name] = whole.numpy()
    ids = arrays.pop(IDS)
    if (ids[1:] < ids[:-1]).any():  # Only workers that take turns leave rows out of order.
        places = ids.argsort()
        arrays = {name: array[places] for name, array in arrays.items()}
    return arrays


def _make_whole(name: str, parts: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return an empty tensor for all ranks' rows, filled with padding if widths differ."""
    dtypes = {part["dtype"] for part in parts}
    shapes = {tuple(shape) for part in parts for shape in part["shapes"]}
    widest = tuple(map(max, zip(*shapes, strict=False)))
    rests = {(len(shape), shape[1:]) for shape in shapes}
    if len(dtypes) > 1 or len(rests) > 1:
        raise ValueError(
            f"{name} of one data set have the dtypes {sorted(dtypes)} and, for a sample, the "
            f"shapes {sorted(shapes)}; only the first dimension of a sample may differ: pad the "
            "others"
        )
    size = sum(part["rows"] for part in parts), *widest
    dtype = getattr(torch, dtypes.pop())
    if len(shapes) == 1:
        return torch.empty(size, dtype=dtype)
    return torch.full(size, PADDING, dtype=dtype if dtype.is_signed else torch.int64)


def _copy_into(rows: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy parts one below the other, each to the left of its rows."""
    first = 0
    for part in parts:
        place = rows[first : first + len(part)]
        if part.ndim > 1:
            place = place[:, : part.shape[1]]
        place.copy_(part)
        first += len(part)


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
    """Return what the function returns on rank 0, on every rank. Collective.

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
    """Return {"metrics": floats by name}, or {"wrong": what else it is}."""
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
