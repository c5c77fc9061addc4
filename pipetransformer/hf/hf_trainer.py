"""Train by transformers.Trainer's interface; whatever trains is our Trainer."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from torch import Tensor
from torch.optim import Optimizer
from transformers import TrainingArguments
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator
from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor
from transformers.integrations import get_reporting_integration_callbacks
from transformers.modelcard import TrainingSummary
from transformers.trainer_pt_utils import log_metrics, save_metrics, save_state
from transformers.trainer_utils import EvalPrediction, PredictionOutput, TrainOutput, speed_metrics

from freeze import FreezePolicy, PolicyFunction
from pipetransformer.checkpoint import CHECKPOINTS, published
from pipetransformer.data import SizedDataset, check_dataset
from pipetransformer.hf.callback_bridge import CallbackBridge, prefixed
from pipetransformer.hf.training_arguments import optimizer_of, refuse_unknown, settings_of
from pipetransformer.hf.unhonoured import (
    refuse_given,
    refuse_more_outputs,
    refuse_overrides,
    refuse_shares,
    refuse_unlabelled,
)
from pipetransformer.model_files import BEST_FOLDER
from pipetransformer.predictions import EvalPrediction as OwnPrediction
from pipetransformer.processes import world_size
from pipetransformer.trainer import Trainer

_MADE_OF = (
    "model", "train_dataset", "eval_dataset", "data_collator", "compute_metrics",
    "preprocess_logits_for_metrics",
)  # fmt: skip
"""Attributes of which our Trainer is made."""


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
        preprocess_logits_for_metrics: makes of a batch's logits and labels what is kept of them.
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
        preprocess_logits_for_metrics: Callable[[Any, Any], Tensor] | None = None,
        *,
        freeze: FreezePolicy | PolicyFunction | None = None,
        **settings: Any,
    ) -> None:
        unhonoured = {
            "model_init": model_init,
            "compute_loss_func": compute_loss_func,
            "optimizers": None if tuple(optimizers) == (None, None) else optimizers,
        }
        refuse_given(unhonoured)
        if model is None or args is None:
            raise ValueError("model and args are needed; give both")
        refuse_overrides(type(self), HFTrainer)
        refuse_unknown(args)
        refuse_more_outputs(model)
        refuse_shares(args, settings)
        transformers.logging.set_verbosity(args.get_process_log_level())
        self.model, self.args, self.folder = model, args, str(args.output_dir)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class, self.compute_metrics = processing_class, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        pads = isinstance(
            processing_class, (transformers.PreTrainedTokenizerBase, SequenceFeatureExtractor)
        )
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
        self._made_of: dict[str, Any] = {}

    @property
    def state(self) -> transformers.TrainerState:
        """Return what has been logged, and how far the run is."""
        return self._bridge.state

    def train(
        self, resume_from_checkpoint: str | PathLike[str] | bool | None = None
    ) -> TrainOutput:
        """Train to the end.

        Args:
            resume_from_checkpoint: True, or output_dir or its newest checkpoint, goes on from
                there.
        Raises:
            ValueError: there is no training set, another folder or an older checkpoint is named,
                or something was changed since `evaluate` or `predict` were called.
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
        trainer, bridge, start = self._begun(resumes, trains=True), self._bridge, time.time()
        if trainer.is_over:
            raise ValueError("train() has been called before; make another Trainer to go on")
        samples_before = trainer.report.samples
        trainer.fit()
        self._write_best(trainer)
        steps = len(bridge.results)
        mean_loss = sum(one.loss for one in bridge.results) / max(1, steps)
        num_samples = trainer.report.samples - samples_before
        metrics = speed_metrics("train", start, num_samples=num_samples, num_steps=steps)
        metrics |= {"total_flos": 0.0, "train_loss": mean_loss}
        bridge.log(trainer, metrics)
        bridge.tell(trainer, "on_train_end")
        return TrainOutput(trainer.global_step, mean_loss, {**metrics, "epoch": self.state.epoch})

    def evaluate(
        self,
        eval_dataset: SizedDataset | Mapping[str, SizedDataset] | str | None = None,
        ignore_keys: None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return loss and metrics of a data set, or of each of several, under a prefix.

        A name stands for one of several that the Trainer was given.
        """
        refuse_given({"ignore_keys": ignore_keys})
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = _one_of(self.eval_dataset, dataset)
        if dataset is None:
            raise ValueError("there is no eval_dataset; give one")
        if isinstance(dataset, Mapping):
            of_all: dict[str, float] = {}
            for name, member in dataset.items():
                of_all |= self.evaluate(member, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return of_all
        trainer, start = self._begun(stand_in=dataset), time.time()
        with self._bridge.asked_for(metric_key_prefix):
            metrics = trainer.evaluate(dataset)
        self.model.eval()  # As transformers leaves it.
        named = self._named(metrics, metric_key_prefix, start, len(dataset))
        return {**named, "epoch": self.state.epoch}

    def predict(
        self,
        test_dataset: SizedDataset,
        ignore_keys: None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Return the model's outputs as transformers shapes them, targets and metrics.

        On every process, in the order of the data set.
        """
        refuse_given({"ignore_keys": ignore_keys})
        trainer, start = self._begun(stand_in=test_dataset), time.time()
        with self._bridge.asked_for(metric_key_prefix):
            output: Any = trainer.predict(test_dataset)
        self.model.eval()
        metrics = self._named(output.metrics, metric_key_prefix, start, len(test_dataset))
        self._bridge.tell(trainer, "on_predict", metrics=metrics)
        return PredictionOutput(self._kept(output.predictions), output.label_ids, metrics)

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

    def _begun(
        self,
        resumes: bool = False,
        *,
        trains: bool = False,
        stand_in: SizedDataset | None = None,
    ) -> Trainer:
        """Return our Trainer, made when it is first needed."""
        if self._trainer is None:
            known = (self.train_dataset, self.eval_dataset, stand_in)
            usable = (one for one in known if not isinstance(one, Mapping | None))
            dataset = next(usable, None)
            if dataset is None:
                raise ValueError("there is no data set to begin with; give a train_dataset")
            if dataset is stand_in:
                refuse_unlabelled(dataset, self.args)
            self._trainer, self._made_of = self._make(dataset, resumes=resumes), self._given()
            atexit.register(self._close_at_exit)
        self._refuse_changed(trains=trains)
        return self._trainer

    def _given(self) -> dict[str, Any]:
        """Return what a Trainer of ours is made of."""
        return {**{name: getattr(self, name) for name in _MADE_OF}, "args": self.args.to_dict()}

    def _refuse_changed(self, *, trains: bool) -> None:
        """Raise a ValueError for what was exchanged since our Trainer was made."""
        given, before = self._given(), self._made_of
        same = {name: value is before[name] for name, value in given.items()}
        same["args"] = given["args"] == before["args"]
        if not trains or self.args.eval_strategy == "no":
            del same["eval_dataset"]  # `evaluate` takes what there is by then.
        if changed := [name for name, is_same in same.items() if not is_same]:
            raise ValueError(
                f"{', '.join(changed)} is not what the first train, evaluate or predict began "
                "with, and would have no effect; make another Trainer with it"
            )

    def _make(self, dataset: SizedDataset, *, resumes: bool) -> Trainer:
        args = self.args
        check_dataset(dataset, "train_dataset" if dataset is self.train_dataset else "dataset")
        self._bridge.num_samples = len(dataset)
        settings = settings_of(args, len(dataset), self._optimizer)
        evaluated = None if isinstance(self.eval_dataset, Mapping) else self.eval_dataset
        if self.train_dataset is not None and evaluated is None and args.eval_strategy != "no":
            lacks = "eval_dataset is a dict" if self.eval_dataset else "there is no eval_dataset"
            raise ValueError(
                f"eval_strategy is {getattr(args.eval_strategy, 'value', args.eval_strategy)!r}, "
                f"but {lacks}; give one data set, or leave eval_strategy out and evaluate after "
                "training"
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
                "callbacks": [self._bridge],
                "collate_fn": self.data_collator,
                "compute_metrics": self._judge if self.compute_metrics else None,
                "preprocess_logits_for_metrics": (
                    self._preprocess if self.preprocess_logits_for_metrics else None
                ),
                "resume": resumes,
                **self._settings,
            },
        )

    def _write_best(self, trainer: Trainer) -> None:
        """Write the best model, which `fit` has ended with, for `from_pretrained`. Collective."""
        config = trainer.config
        if config.load_best_model_at_end and trainer.report.best_step is not None:
            # Beside the weights from which a run that goes on takes the best.
            folder = Path(str(config.folder), BEST_FOLDER)
            trainer.save_pretrained(folder, self.processing_class)
            self.state.best_model_checkpoint = str(folder)

    def _judge(self, prediction: OwnPrediction) -> Mapping[str, float]:
        assert self.compute_metrics is not None
        labels: Any = prediction.label_ids
        given = EvalPrediction(self._kept(prediction.predictions), labels)
        prefix = f"{self._bridge.prefix}_"  # Which `prefixed` gives to those that lack it.
        metrics = self.compute_metrics(given)
        if not isinstance(metrics, Mapping):
            return metrics  # And be told what it is.
        return {name.removeprefix(prefix): value for name, value in metrics.items()}

    def _preprocess(self, output: Tensor, labels: Any) -> Tensor:
        assert self.preprocess_logits_for_metrics is not None
        return self.preprocess_logits_for_metrics(self._shaped(output), labels)

    def _kept(self, predictions: np.ndarray[Any, Any]) -> Any:
        """Return predictions in transformers' shape, or as they were preprocessed."""
        return predictions if self.preprocess_logits_for_metrics else self._shaped(predictions)

    def _shaped(self, output: Any) -> Any:
        """Give outputs the shape that transformers' model returns them in."""
        if type(self.model).__name__.endswith("ForQuestionAnswering"):
            return output[..., 0], output[..., 1]
        return output

    def _named(
        self, metrics: Mapping[str, float], prefix: str, start: float, num_samples: int
    ) -> dict[str, float]:
        batch = self.args.per_device_eval_batch_size * world_size()
        steps = -(-num_samples // batch)
        named = prefixed(metrics, prefix)
        speed = speed_metrics(prefix, start, num_samples=num_samples, num_steps=steps)
        return {**named, **speed}

    def _resumes(self, given: str | PathLike[str] | bool | None) -> bool:
        """Tell whether a run goes on; a folder must be the run's own."""
        if given is None or isinstance(given, bool):
            return bool(given)
        output = Path(self.folder).resolve()
        saved = output / CHECKPOINTS
        newest = [folder.resolve() for folder in published(saved)[:1]] if saved.exists() else []
        if Path(given).resolve() not in (output, saved, *newest):
            raise ValueError(
                f"resume_from_checkpoint is {str(given)!r}, but a run goes on from the newest "
                f"checkpoint in output_dir={self.folder!r}; give True, or output_dir the folder "
                "in which that run was"
            )
        return True

    def _close_at_exit(self) -> None:
        if self._trainer is not None:
            failed = getattr(sys, "last_type", None) is not None
            self._trainer.__exit__(sys.last_type if failed else None)


def _one_of(datasets: Any, name: str) -> SizedDataset:
    if not isinstance(datasets, Mapping) or name not in datasets:
        known = sorted(datasets) if isinstance(datasets, Mapping) else "one without a name"
        raise ValueError(f"there is no eval_dataset named {name!r}; there is {known}")
    found: SizedDataset = datasets[name]
    return found
