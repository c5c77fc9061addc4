"""Keep a replica's outputs and targets in host memory while a data set passes.

Bring the replicas' outputs together, in the order of the data set, on every rank.

A replica's samples are a contiguous slice, and replicas are in order. Workers of one stage have
micro-batches by turns; their rows are put in order in the end::

    rank 1, last stage of replica 0    rows 0 1 2 3    padded to the widest of all
    rank 3, last stage of replica 1    rows 4 5 6
    every rank                         rows 0 1 2 3 4 5 6

Judge predictions as a whole by the user's function, on rank 0 for all.
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

OUTPUT = "output of the model"
"""Its name beside the targets, which have their own."""
IDS = "place in the data set"
"""The name of what says which row is which sample's."""

_Entry = TypeVar("_Entry")


def as_labels(targets: Iterable[_Entry]) -> _Entry | tuple[_Entry, ...] | None:
    """Return a model's only target, a tuple of several, or None for none."""
    labels = tuple(targets)
    return (labels[0] if len(labels) == 1 else labels) if labels else None


@final
class KeptOutputs:
    """Hold the outputs of a replica's last stage and their targets, micro-batch by micro-batch.

    Nothing of it stays on a device. Floating numbers are kept in float32: numpy knows no bfloat16,
    and nobody asks for float64.

    Args:
        preprocess: makes of a micro-batch's outputs and targets what is kept of the outputs.
    """

    def __init__(self, preprocess: PreprocessLogits | None = None) -> None:
        self._preprocess = preprocess
        self.parts: dict[str, list[Tensor]] = {}

    def add(self, output: Tensor, targets: Mapping[str, Tensor], ids: Tensor) -> None:
        """Keep a micro-batch's output and targets, (n, ...) each, and which samples these are.

        Raises:
            CallbackError: `preprocess` raised.
            TypeError: it returned no tensor of as many rows.
        """
        if self._preprocess is not None:
            # Copies, as the loss and the metrics are still to see what the model put out.
            labels = as_labels(target.clone() for target in targets.values())
            output = _preprocessed(self._preprocess, output.detach().clone(), labels)
        for name, tensor in {OUTPUT: output, IDS: ids, **targets}.items():
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            # A copy in any case: a loss may write into what it is given.
            copy = tensor.detach().to("cpu", dtype, copy=True)
            self.parts.setdefault(name, []).append(copy)

    def describe(self) -> dict[str, Any]:
        """Say of each entry, in plain values, how many rows it has, of which dtype and shapes."""
        return {
            name: {
                "rows": sum(map(len, parts)),
                "dtype": str(parts[0].dtype).removeprefix("torch."),
                "shapes": [list(shape) for shape in {part.shape[1:] for part in parts}],
            }
            for name, parts in self.parts.items()
        }


def _preprocessed(preprocess: PreprocessLogits, output: Tensor, labels: Any) -> Tensor:
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


PADDING = -100
"""What fills the rows that are shorter than others: transformers' choice."""


def gather_outputs(
    kept: KeptOutputs, *, group: dist.ProcessGroup | None
) -> dict[str, np.ndarray[Any, Any]]:
    """Return outputs and targets by name, (N, ...) each, on every rank. Collective.

    Where the second dimension differs, rows are padded with -100; truth values and unsigned
    numbers, which cannot be -100, become int64. What was kept is let go of as it is copied.

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
    if (ids[1:] < ids[:-1]).any():
        places = ids.argsort()
        arrays = {name: array[places] for name, array in arrays.items()}
    return arrays


def _make_whole(name: str, parts: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return what holds all ranks' rows; those of unequal width are padded to the widest."""
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
    """Copy parts one below the other, each into the beginning of its rows."""
    first = 0
    for part in parts:
        place = rows[first : first + len(part)]
        if part.ndim > 1:
            place = place[:, : part.shape[1]]
        place.copy_(part)
        first += len(part)


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
