"""Train by transformers.Trainer's interface; whatever trains is our Trainer."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from torch.optim import Optimizer
from transformers import TrainingArguments
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator
from transformers.integrations import get_reporting_integration_callbacks
from transformers.modelcard import TrainingSummary
from transformers.trainer_pt_utils import log_metrics, save_metrics, save_state
from transformers.trainer_utils import EvalPrediction, PredictionOutput, TrainOutput, speed_metrics

from pipetransformer.data import SizedDataset, check_dataset
from pipetransformer.hf.callback_bridge import CallbackBridge, prefixed
from pipetransformer.hf.training_arguments import (
    learning_rate_of,
    length_of,
    optimizer_of,
    refuse_unknown,
    settings_of,
)
from pipetransformer.predictions import EvalPrediction as OwnPrediction
from pipetransformer.processes import world_size
from pipetransformer.trainer import Trainer


class HFTrainer:
    """Fine-tune a transformers model elastically, from a script written for transformers.Trainer.

    Every process runs the script; nothing is started before `train`, `evaluate` or `predict`.
    What TrainingArguments ask for is honoured or refused by name. Frozen layers and pipelines
    follow from `freeze` and the settings.

    Args:
        model: that an adapter knows.
        args: TrainingArguments.
        data_collator: makes batches; pads to the longest where there is a tokenizer, else stacks.
        train_dataset, eval_dataset: with a length; an evaluation set may be a dict of several.
        processing_class: a tokenizer or processor, saved beside the model.
        compute_metrics: of a transformers EvalPrediction.
        callbacks: of transformers; events within a step are not told.
        optimizers: (None, None), as optimizers here are built over parts of a model.
        optimizer_cls_and_kwargs: the optimizer's class and keywords; None is args.optim.
        freeze: a FreezePolicy or a function of a FreezeContext; None freezes nothing.
        settings: further fields of `TrainConfig`; they win over what args stand for.
    Raises:
        TypeError, ValueError: something is asked for that is not honoured; see our Trainer.
    """

    log_metrics = log_metrics
    save_metrics = save_metrics
    save_state = save_state

    def __init__(  # noqa: PLR0913 - the signature is transformers'.
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: SizedDataset | None = None,
        eval_dataset: SizedDataset | Mapping[str, SizedDataset] | None = None,
        processing_class: Any = None,
        model_init: None = None,
        compute_loss_func: None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[None, None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: None = None,
        *,
        freeze: Any = None,
        **settings: Any,
    ) -> None:
        unhonoured = {
            "model_init": model_init,
            "compute_loss_func": compute_loss_func,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
            "optimizers": None if tuple(optimizers) == (None, None) else optimizers,
        }
        _refuse_given(unhonoured)
        if model is None or args is None:
            raise ValueError("model and args are needed; give both")
        refuse_unknown(args)
        self.model, self.args, self.folder = model, args, str(args.output_dir)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class, self.compute_metrics = processing_class, compute_metrics
        pads = hasattr(type(processing_class), "pad")
        self.data_collator = data_collator or (
            DataCollatorWithPadding(processing_class) if pads else default_data_collator
        )
        reporting = get_reporting_integration_callbacks(args.report_to)
        self._bridge = CallbackBridge(
            args,
            [*reporting, *(callbacks or [])],
            model=model,
            processing_class=processing_class,
        )
        self._freeze, self._settings = freeze, settings
        self._optimizer = optimizer_of(args, model, optimizer_cls_and_kwargs)
        self._trainer: Trainer | None = None

    @property
    def state(self) -> transformers.TrainerState:
        """Return what has been logged, and how far the run is."""
        return self._bridge.state

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the end.

        Args:
            resume_from_checkpoint: True, or output_dir or a checkpoint within it, goes on from the
                newest checkpoint there.
        Raises:
            ValueError: there is no training set, or another folder is named.
        """
        if self.train_dataset is None:
            raise ValueError("there is no train_dataset; give one to train")
        resumes = self._resumes(resume_from_checkpoint)
        if resumes:
            self._bridge.refuse_stateful()
        if self._trainer is not None and resumes:
            raise ValueError(
                "the model was evaluated before train(resume_from_checkpoint=...); resume first"
            )
        trainer, bridge, start = self._begun(resumes), self._bridge, time.time()
        if trainer.is_over:
            raise ValueError("train() has been called before; make another Trainer to go on")
        samples_before = trainer.report.samples
        trainer.fit()
        steps, mean_loss = bridge.num_steps, bridge.total_loss / max(1, bridge.num_steps)
        num_samples = trainer.report.samples - samples_before
        metrics = speed_metrics("train", start, num_samples=num_samples, num_steps=steps)
        metrics |= {"total_flos": 0.0, "train_loss": mean_loss}
        bridge.log(trainer, metrics)
        return TrainOutput(trainer.global_step, mean_loss, {**metrics, "epoch": self.state.epoch})

    def evaluate(
        self,
        eval_dataset: SizedDataset | Mapping[str, SizedDataset] | None = None,
        ignore_keys: None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return loss and metrics of a data set, or of each of several, under a prefix."""
        _refuse_given({"ignore_keys": ignore_keys})
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("there is no eval_dataset; give one")
        if isinstance(dataset, Mapping):
            found: dict[str, float] = {}
            for name, one in dataset.items():
                found |= self.evaluate(one, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return found
        trainer, start = self._begun(), time.time()
        self._bridge.prefix = metric_key_prefix
        try:
            metrics = trainer.evaluate(dataset)
        finally:
            self._bridge.prefix = "eval"
        named = self._named(metrics, metric_key_prefix, start, len(dataset))
        return {**named, "epoch": self.state.epoch} if self.state.global_step else named

    def predict(
        self,
        test_dataset: SizedDataset,
        ignore_keys: None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Return the model's outputs as transformers shapes them, targets and metrics.

        On every process, in the order of the data set.
        """
        _refuse_given({"ignore_keys": ignore_keys})
        trainer, start = self._begun(stand_in=test_dataset), time.time()
        found: Any = trainer.predict(test_dataset)
        metrics = self._named(found.metrics, metric_key_prefix, start, len(test_dataset))
        self._bridge.tell(trainer, "on_predict", metrics=metrics)
        return PredictionOutput(self._shaped(found.predictions), found.label_ids, metrics)

    def save_model(self, output_dir: str | None = None) -> None:
        """Write model and tokenizer, for `from_pretrained`."""
        self._begun().save_pretrained(output_dir or self.folder, self.processing_class)

    def log(self, logs: dict[str, float]) -> None:
        """Take down numbers at this step, and tell the callbacks of them."""
        self._bridge.log(self._begun(), logs)

    def add_callback(self, callback: Any) -> None:
        """Add a callback of transformers, before training."""
        self._bridge.add(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or all of a class."""
        self._bridge.remove(callback)

    def is_world_process_zero(self) -> bool:
        """Tell whether this process is rank 0."""
        return bool(self.state.is_world_process_zero)

    def is_local_process_zero(self) -> bool:
        """Tell whether this process is the first of its node."""
        return bool(self.state.is_local_process_zero)

    def create_model_card(self, **facts: Any) -> None:
        """Write output_dir/README.md on rank 0; arguments are those of transformers."""
        if self.is_world_process_zero():
            card = TrainingSummary.from_trainer(self, **facts).to_model_card()
            Path(self.folder, "README.md").write_text(card, encoding="utf-8")

    def close(self) -> None:
        """Leave the other processes; without it that is done at the script's end."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            atexit.unregister(self._close_at_exit)
            trainer.close()

    def _begun(self, resumes: bool = False, *, stand_in: SizedDataset | None = None) -> Trainer:
        """Return our Trainer, made when it is first needed."""
        if self._trainer is None:
            known = (self.train_dataset, stand_in, self.eval_dataset)
            dataset = next((one for one in known if one is not None), None)
            if dataset is None or isinstance(dataset, Mapping):
                raise ValueError("there is no data set to begin with; give a train_dataset")
            self._trainer = self._make(dataset, resumes=resumes)
            atexit.register(self._close_at_exit)
        return self._trainer

    def _make(self, dataset: SizedDataset, *, resumes: bool) -> Trainer:
        args, bridge = self.args, self._bridge
        check_dataset(dataset, "train_dataset" if dataset is self.train_dataset else "dataset")
        length = length_of(args, len(dataset))
        bridge.steps_per_epoch = length.steps_per_epoch
        bridge.learning_rate = learning_rate_of(args, length)
        settings = settings_of(args, len(dataset))
        evaluated = None if isinstance(self.eval_dataset, Mapping) else self.eval_dataset
        if evaluated is not self.eval_dataset and args.eval_strategy != "no":
            raise ValueError(
                f"eval_strategy is {str(args.eval_strategy)!r}, but eval_dataset is a dict; "
                "evaluate several data sets after training, or give one"
            )
        if self.train_dataset is None:  # Nothing is trained, and nothing written.
            settings |= {"folder": None, "checkpoint_every_steps": 0, "checkpoint_every_epochs": 0}
        return Trainer(
            self.model,
            dataset,
            eval_dataset=evaluated,
            optimizer=self._optimizer,
            freeze=self._freeze,
            **{
                **settings,
                "callbacks": [bridge],
                "collate_fn": self.data_collator,
                "compute_metrics": self._judge if self.compute_metrics else None,
                "resume": resumes,
                **self._settings,
            },
        )

    def _judge(self, prediction: OwnPrediction) -> Mapping[str, float]:
        assert self.compute_metrics is not None
        labels: Any = prediction.label_ids
        return self.compute_metrics(EvalPrediction(self._shaped(prediction.predictions), labels))

    def _shaped(self, predictions: np.ndarray[Any, Any]) -> Any:
        """Give outputs the shape that transformers' model returns them in."""
        if type(self.model).__name__.endswith("ForQuestionAnswering"):
            return predictions[..., 0], predictions[..., 1]
        return predictions

    def _named(
        self, metrics: Mapping[str, float], prefix: str, start: float, num_samples: int
    ) -> dict[str, float]:
        batch = self.args.per_device_eval_batch_size * world_size()
        steps = -(-num_samples // batch)
        named = prefixed(metrics, prefix)
        speed = speed_metrics(prefix, start, num_samples=num_samples, num_steps=steps)
        return {**named, **speed}

    def _resumes(self, given: str | bool | None) -> bool:
        """Tell whether a run goes on; a folder must be the run's own."""
        if not isinstance(given, str):
            return bool(given)
        folder, own = Path(given).resolve(), Path(self.folder).resolve()
        if own not in (folder, *folder.parents):
            raise ValueError(
                f"resume_from_checkpoint is {given!r}, but a run goes on where it was, in "
                f"output_dir={self.folder!r}; give True, or that folder as output_dir"
            )
        return True

    def _close_at_exit(self) -> None:
        if self._trainer is not None:
            failed = getattr(sys, "last_type", None) is not None
            self._trainer.__exit__(sys.last_type if failed else None)


def _refuse_given(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that would be left aside."""
    given = sorted(name for name, value in arguments.items() if value is not None)
    if given:
        raise ValueError(
            f"{', '.join(given)} would not be honoured by pipetransformer.hf.Trainer; leave it "
            "out. An optimizer is built by args.optim or optimizer_cls_and_kwargs, a loss by the "
            "model"
        )
