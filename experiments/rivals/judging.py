"""Join a model's outputs over a data set, and judge them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer import EvalPrediction
from pipetransformer.stage import PredictionOutput

_LABELS = ("y", "labels", "start_positions", "end_positions")
_PADDING = -100


def judged(
    outputs: Iterable[tuple[Mapping[str, Tensor], Tensor]],
    judge: Callable[[EvalPrediction], Mapping[str, float]],
) -> PredictionOutput:
    """Return all outputs with the metrics of them.

    Args:
        outputs: batches, with the model's (N, S, ...) or (N, C) output for each.
        judge: of the whole.
    """
    found, labels = [], []
    for batch, output in outputs:
        found.append(output.float().cpu())
        labels.append([batch[name].cpu() for name in _LABELS if name in batch])
    widest = max(one.shape[1] for one in found)
    predictions = torch.cat([_widened(one, widest) for one in found]).numpy()
    columns = [torch.cat(column).numpy() for column in zip(*labels, strict=True)]
    label_ids: Any = columns[0] if len(columns) == 1 else tuple(columns) or None
    metrics = dict(judge(EvalPrediction(predictions, label_ids)))
    return PredictionOutput(predictions, label_ids, metrics)


def _widened(output: Tensor, width: int) -> Tensor:
    missing = (0, 0) * (output.ndim - 2) + (0, width - output.shape[1])
    return nn.functional.pad(output, missing, value=_PADDING)
