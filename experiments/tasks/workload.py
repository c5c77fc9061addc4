"""Say what is fine-tuned, and how it is judged: the same for the Trainer and for its rivals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pipetransformer import EvalPrediction
from pipetransformer.config import CollateFunction
from pipetransformer.feed import SizedDataset


@dataclass(frozen=True)
class Workload:
    """Hold a task.

    Args:
        name: such as "sst2".
        build: makes the model, with the same weights on every call; with half of its layers,
            the lower ones, where it is asked for a small one.
        train_dataset: what is trained on.
        eval_dataset: every sample once, in the order that `judge` expects.
        forward: (model, batch) -> loss and outputs, as a plain loop has them.
        judge: of the predictions for the evaluation set; metrics in percent, correlations times
            100.
        metric: the main one of them; higher is better.
        write_predictions: (name, prediction, path without its suffix) writes the answers to an
            evaluation set, "" or one of `further`, in the task's own format.
        further: other evaluation sets by name, judged alike.
        collate_fn: makes batches; None stacks.
        processing_class: a tokenizer, saved beside the model.
        num_views: of each training sample where it is augmented, 0 for new ones in every epoch;
            None where it is not.
        names: entries of a batch, where samples are tuples.
        length_entry: of a sample, as long as that is; None where all are equally long.
        options: the script's own, as plain values, for the summary.
    """

    name: str
    build: Callable[[bool], nn.Module]
    train_dataset: SizedDataset
    eval_dataset: SizedDataset
    forward: Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, Tensor]]
    judge: Callable[[EvalPrediction], Mapping[str, float]]
    metric: str
    write_predictions: Callable[[str, Any, Path], None]
    further: Mapping[str, SizedDataset]
    collate_fn: CollateFunction | None = None
    processing_class: Any = None
    num_views: int | None = None
    names: tuple[str, ...] = ()
    length_entry: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
