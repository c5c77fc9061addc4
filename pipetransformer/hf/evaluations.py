"""Evaluate and predict in the methods of transformers' Trainer, which subclasses override.

evaluate, predict ─► get_..._dataloader ─► evaluation_loop ─► our Trainer, over the data set

A script that never trains may give samples without labels. Our Trainer still measures with them:
their missing targets become (N, 0) behind the script's collate_fn, and the loss ignores those.
"""

from __future__ import annotations

import inspect
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    RemoveColumnsCollator,
    speed_metrics,
)

from autopipe.loss import Loss, LossValue
from pipetransformer.feed import SizedDataset, check_dataset, entry_of, own_random_numbers
from pipetransformer.hf.callback_bridge import CallbackBridge, prefixed
from pipetransformer.hf.script_loss import answers_questions
from pipetransformer.hf.training_arguments import refuse_given
from pipetransformer.model import EntryNames, entry_names
from pipetransformer.processes import world_size
from pipetransformer.stage import EvalPrediction as OwnPrediction
from pipetransformer.stage import judge
from pipetransformer.trainer import Trainer

_LABELS = ("label", "labels", "label_ids", "start_positions", "end_positions")


@final
class EvaluationLoader(DataLoader[Any]):
    """Load a data set's batches for a script; an evaluation only reads its `dataset`."""


class Evaluations(ABC):
    """Evaluate and predict, with the attributes as the script has set them by then."""

    model: Any
    args: TrainingArguments
    eval_dataset: Any
    data_collator: Any
    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    _bridge: CallbackBridge
    _trains = False
    _adapted: tuple[Any, EntryNames] | None = None

    @abstractmethod
    def _begun(
        self, resumes: bool = False, *, trains: bool = False, stand_in: SizedDataset | None = None
    ) -> Trainer:
        """Return our Trainer."""

    @property
    def state(self) -> transformers.TrainerState:
        """Return the log and the run's position."""
        return self._bridge.state

    @property
    def callback_handler(self) -> CallbackHandler:
        return self._bridge.handler

    @property
    def control(self) -> transformers.TrainerControl:
        return self._bridge.control

    @control.setter
    def control(self, control: transformers.TrainerControl) -> None:
        self._bridge.follow(control, self._begun(), "a subclass has set {}")

    def get_eval_dataloader(
        self, eval_dataset: SizedDataset | str | None = None
    ) -> EvaluationLoader:
        """Return a loader of the evaluation set, of one of several by name, or of another set.

        Raises:
            ValueError: there is none.
        """
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = _one_of(self.eval_dataset, dataset)
        if dataset is None:
            raise ValueError("there is no eval_dataset; give one")
        return self.get_test_dataloader(dataset)

    def get_test_dataloader(self, test_dataset: SizedDataset) -> EvaluationLoader:
        """Return a loader of a data set in its order, for `evaluation_loop`."""
        check_dataset(test_dataset, "dataset")
        dataset: Dataset[Any] = test_dataset  # type: ignore[assignment]
        collate = self.data_collator
        if self.args.remove_unused_columns:
            known = inspect.signature(self.model.forward).parameters
            collate = RemoveColumnsCollator(collate, (*known, *_LABELS))
        size = self.args.per_device_eval_batch_size
        return EvaluationLoader(dataset, batch_size=size, collate_fn=collate)

    def evaluate(
        self,
        eval_dataset: SizedDataset | Mapping[str, SizedDataset] | str | None = None,
        ignore_keys: None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return loss and metrics of a data set, or of each of several, under a prefix.

        Args:
            eval_dataset: a data set, several, or the name of one; None is the Trainer's. For
                samples without labels only times are returned.
        """
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, Mapping):
            of_all: dict[str, float] = {}
            for name, member in dataset.items():
                of_all |= self.evaluate(member, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return of_all
        loader, start = self.get_eval_dataloader(dataset), time.time()
        output = self.evaluation_loop(
            loader,
            description="Evaluation",
            prediction_loss_only=True if self.compute_metrics is None else None,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        metrics = self._with_speed(output, metric_key_prefix, start)
        self.log(metrics)
        self._bridge.tell(self._begun(), "on_evaluate", metrics=metrics)
        return metrics

    def predict(
        self,
        test_dataset: SizedDataset,
        ignore_keys: None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Return outputs as transformers shapes them, targets and metrics, on every process.

        Rows are in the data set's order.
        """
        loader, start = self.get_test_dataloader(test_dataset), time.time()
        output = self.evaluation_loop(
            loader,
            description="Prediction",
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        metrics = self._with_speed(output, metric_key_prefix, start)
        self._bridge.tell(self._begun(), "on_predict", metrics=metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: EvaluationLoader,
        description: str = "Evaluation",
        prediction_loss_only: bool | None = None,
        ignore_keys: None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return outputs, labels and metrics of a loader's data set, without telling callbacks.

        Args:
            dataloader: of `get_eval_dataloader` or `get_test_dataloader`.
            description: of no effect.
            prediction_loss_only: only compute the loss, and keep no outputs.
        """
        refuse_given(ignore_keys=ignore_keys)
        if not isinstance(dataloader, EvaluationLoader):
            raise ValueError(
                f"evaluation_loop is given a {type(dataloader).__name__}, whose sampler and "
                "collate_fn would have no effect; give what get_eval_dataloader or "
                "get_test_dataloader returns for the data set"
            )
        dataset: Any = dataloader.dataset
        trainer = self._begun(stand_in=dataset)
        self._bridge.note(trainer)
        with self._bridge.silenced():
            predictions: Any = None
            if prediction_loss_only:
                means = trainer.evaluate(dataset) if self._is_labelled(dataset) else {}
                labels, metrics = None, {"loss": means["loss"]} if "loss" in means else {}
            else:
                predictions, labels, metrics = self._predicted(trainer, dataset, metric_key_prefix)
        if not self._trains:
            self.model.eval()  # As transformers leaves it.
        named = prefixed(metrics, metric_key_prefix)
        return EvalLoopOutput(predictions, labels, named, len(dataset))

    @abstractmethod
    def log(self, logs: dict[str, float]) -> None:
        """Add numbers to the log at this step."""

    def _predicted(
        self, trainer: Trainer, dataset: SizedDataset, prefix: str
    ) -> tuple[Any, Any, dict[str, float]]:
        """Return outputs, labels, and metrics including the script's. Collective."""
        output = trainer.predict(dataset)
        metrics, labels = dict(output.metrics), output.label_ids
        if self.compute_metrics is not None and labels is not None:
            judged = OwnPrediction(output.predictions, labels)
            metrics |= judge(
                lambda one: self._judged(one, prefix), judged, group=trainer.world.group
            )
        return self._kept(output.predictions), labels, metrics

    def _judged(self, prediction: OwnPrediction, prefix: str) -> Mapping[str, float]:
        labels: Any = prediction.label_ids
        theirs = EvalPrediction(self._kept(prediction.predictions), labels)
        metrics = self.compute_metrics(theirs)
        if not isinstance(metrics, Mapping):
            return metrics  # `judge` refuses it with a message.
        # `prefixed` adds the prefix again, also to names that lack it here.
        return {name.removeprefix(f"{prefix}_"): value for name, value in metrics.items()}

    def _judge(self, prediction: OwnPrediction) -> Mapping[str, float]:
        """Judge an evaluation of our Trainer's own, in training."""
        if self.compute_metrics is None or self._bridge.is_silent:
            return {}
        return self._judged(prediction, "eval")

    def _is_labelled(self, dataset: SizedDataset) -> bool:
        """Return whether a data set's first sample has, or is given, all targets of the loss."""
        with own_random_numbers(torch.device("cpu")):  # An augmenting data set may draw some.
            first = dataset[0]
            if not isinstance(first, Mapping):
                return True
            if not self.args.remove_unused_columns:
                first = self.data_collator([first])
            elif missing_targets(first, self._targets()):
                first = self._collated(first)
        return not missing_targets(first, self._targets())

    def _collated(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a batch of one sample: a collator for language models makes its labels."""
        known = self._entry_names().inputs
        try:
            return self.data_collator([{n: v for n, v in item.items() if n in known}])
        except (KeyError, TypeError, ValueError):  # One that needs labels is given none.
            return item

    def _targets(self) -> tuple[str, ...]:
        """Return the names of the loss's targets."""
        return self._entry_names().targets

    def _entry_names(self) -> EntryNames:
        """Return the names of what the model and its loss take.

        Adapting a model takes as long as building it, so the answer is kept for this model.
        """
        if self._adapted is None or self._adapted[0] is not self.model:
            self._adapted = self.model, entry_names(self.model)
        return self._adapted[1]

    def _preprocess(self, output: Tensor, labels: Any) -> Tensor:
        made: Tensor = self.preprocess_logits_for_metrics(self._shaped(output), labels)
        return made

    def _kept(self, predictions: np.ndarray[Any, Any]) -> Any:
        """Return predictions in transformers' shape, or as they were preprocessed."""
        return predictions if self.preprocess_logits_for_metrics else self._shaped(predictions)

    def _shaped(self, output: Any) -> Any:
        """Give outputs the shape that transformers' model returns them in."""
        if answers_questions(self.model):
            return output[..., 0], output[..., 1]
        return output

    def _with_speed(self, output: EvalLoopOutput, prefix: str, start: float) -> dict[str, float]:
        num = output.num_samples or 0
        steps = math.ceil(num / (self.args.per_device_eval_batch_size * world_size()))
        speed = speed_metrics(prefix, start, num_samples=num, num_steps=steps)
        return {**(output.metrics or {}), **speed}


def _one_of(datasets: Any, name: str) -> SizedDataset:
    if not isinstance(datasets, Mapping) or name not in datasets:
        known = sorted(datasets) if isinstance(datasets, Mapping) else "one without a name"
        raise ValueError(f"there is no eval_dataset named {name!r}; there is {known}")
    found: SizedDataset = datasets[name]
    return found


def missing_targets(item: Mapping[str, Any], targets: tuple[str, ...]) -> list[str]:
    """Name the targets that an item or a batch lacks."""
    return [name for name in targets if entry_of(item, name) is None]


@final
@dataclass(frozen=True)
class Measured:
    """Mark the targets that a data set's samples lack."""

    dataset: SizedDataset
    targets: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        if not isinstance(item, Mapping):
            return item
        return {**item, **dict.fromkeys(missing_targets(item, self.targets), _Missing())}


@final
@dataclass(frozen=True)
class MeasuredCollate:
    """Collate by the script's function, without the marks; marked targets become (N, 0)."""

    function: Any
    targets: tuple[str, ...]

    def __call__(self, items: list[Any]) -> Any:
        if not items or not isinstance(items[0], Mapping):
            return self.function(items)
        lacks = any(isinstance(value, _Missing) for value in items[0].values())
        unmarked = [
            {name: value for name, value in item.items() if not isinstance(value, _Missing)}
            for item in items
        ]
        batch = self.function(unmarked)
        if not lacks:
            return batch
        missing = missing_targets(batch, self.targets)
        return {**batch, **dict.fromkeys(missing, torch.empty(len(items), 0))}


class _Missing:
    """Mark a target that a sample lacks. Its class tells, as workers pickle samples."""


def loss_without_targets(loss: Loss, output: Tensor, target: Any) -> LossValue:
    """Return a loss's value; some number where targets have shape (N, 0)."""
    targets = target.values() if isinstance(target, Mapping) else (target,)
    if all(target.shape[1:].numel() for target in targets):
        return loss(output, target)
    return output.float().square().mean()
