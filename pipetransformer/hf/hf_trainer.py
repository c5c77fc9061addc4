"""Offer transformers.Trainer's interface; our Trainer does the training."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import transformers
from torch import Tensor
from torch.optim import Optimizer
from transformers import TrainingArguments
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator
from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor
from transformers.integrations import get_reporting_integration_callbacks
from transformers.modelcard import TrainingSummary
from transformers.trainer_pt_utils import log_metrics, save_metrics, save_state
from transformers.trainer_utils import EvalPrediction, TrainOutput, speed_metrics

from autopipe.loss import Loss, choose_loss
from freeze import FreezeChoice
from pipetransformer.checkpoint import BEST_FOLDER, CHECKPOINTS, holds_checkpoint, published
from pipetransformer.checks import naming_first_samples
from pipetransformer.feed import Batch, SizedDataset, check_dataset, first_samples
from pipetransformer.hf.callback_bridge import CallbackBridge
from pipetransformer.hf.evaluations import (
    Evaluations,
    Measured,
    MeasuredCollate,
    loss_without_targets,
)
from pipetransformer.hf.label_counts import divided_by_labels
from pipetransformer.hf.log_history import was_over
from pipetransformer.hf.pretrained_checkpoints import pretrained
from pipetransformer.hf.script_loss import ScriptLoss
from pipetransformer.hf.training_arguments import (
    optimizer_of,
    refuse_arguments,
    refuse_given,
    refuse_overrides,
    refuse_own_loss,
    refuse_unselected,
    settings_of,
    why_missing,
)
from pipetransformer.model import DTYPES, EntryNames, LayeredModel, adapt, refuse_no_module
from pipetransformer.trainer import Trainer

_MADE_OF = (
    "model", "train_dataset", "eval_dataset", "data_collator", "preprocess_logits_for_metrics",
)  # fmt: skip
"""Attributes that our Trainer is made with; a script may set them until then."""

_OVERRIDABLE = ("evaluate", "evaluation_loop")
"""Methods that evaluations in a run must call if a subclass overrides them."""


class HFTrainer(Evaluations):
    """Fine-tune a transformers model elastically, from a script written for transformers.Trainer.

    Every process runs the script. Nothing is started before `train`, `evaluate` or `predict`.
    TrainingArguments are honoured, or refused by name. Frozen layers and pipelines follow from
    `freeze` and the settings.

    Args:
        model: known to an adapter.
        args: TrainingArguments.
        data_collator: makes batches. By default it pads if there is a tokenizer, else it stacks.
        train_dataset, eval_dataset: with a length; several evaluation sets are a dict.
        processing_class: a tokenizer or processor, saved beside the model.
        compute_metrics: takes a transformers EvalPrediction.
        callbacks: of transformers, without events within a step.
        optimizers: (None, None), as optimizers here are built over parts of a model.
        preprocess_logits_for_metrics: (logits, labels) of a batch -> what is kept of them.
        optimizer_cls_and_kwargs: the optimizer's class and keywords; None is args.optim.
        freeze: as the Trainer's; None freezes nothing.
        save_pretrained_checkpoints: beside each checkpoint, write output_dir/checkpoint-STEP for
            `from_pretrained`; meanwhile training waits.
        settings: further fields of `TrainConfig`, and `loss_fn`; they win over args.
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
        freeze: FreezeChoice | None = None,
        save_pretrained_checkpoints: bool = False,
        **settings: Any,
    ) -> None:
        refuse_given(
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            optimizers=None if tuple(optimizers) == (None, None) else optimizers,
        )
        if model is None or args is None:
            raise ValueError("model and args are needed; give both")
        if not isinstance(model, LayeredModel):
            refuse_no_module(model)
        refuse_overrides(type(self), HFTrainer)
        refuse_arguments(args, model, settings)
        if save_pretrained_checkpoints and args.save_strategy == "no":
            raise ValueError(
                "save_pretrained_checkpoints=True, but save_strategy is 'no'; give another one, "
                "or leave it out"
            )
        transformers.logging.set_verbosity(args.get_process_log_level())
        self.model, self.args, self.folder = model, args, str(args.output_dir)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class, self.compute_metrics = processing_class, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.data_collator = data_collator or _usual_collator(processing_class)
        reporting = get_reporting_integration_callbacks(args.report_to)
        self._bridge = CallbackBridge(
            args,
            [*reporting, *(callbacks or [])],
            model=model,
            processing_class=processing_class,
            writes_pretrained=save_pretrained_checkpoints,
        )
        self._freeze, self._settings = freeze, settings
        self._optimizer = optimizer_of(args, model, optimizer_cls_and_kwargs)
        if self.is_world_process_zero():  # A script may write there before anything is trained.
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        self._trainer: Trainer | None = None
        self._at_exit: Callable[[], None] = partial(_close_at_exit, lambda: None)
        self._script_loss: ScriptLoss | None = None
        self._made_of: dict[str, Any] = {}

    if not TYPE_CHECKING:  # Else a type checker would accept any name.

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(why_missing(type(self), name))

    def train(
        self, resume_from_checkpoint: str | PathLike[str] | bool | None = None
    ) -> TrainOutput:
        """Train to the end.

        Args:
            resume_from_checkpoint: True, output_dir or its newest checkpoint (step-00000012 or
                checkpoint-12) goes on from there. None begins anew, and replaces a run in
                output_dir that is over.
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
        with self._training():
            trainer.fit()
        self._write_best(trainer)
        steps, mean_loss = bridge.losses.num_steps, bridge.losses.mean()
        num_samples = trainer.report.samples - bridge.samples_before
        metrics = speed_metrics("train", start, num_samples=num_samples, num_steps=steps)
        metrics |= {"total_flos": 0.0, "train_loss": mean_loss}
        bridge.finish(trainer, metrics)
        return TrainOutput(trainer.global_step, mean_loss, {**metrics, "epoch": self.state.epoch})

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the model's own loss; a subclass may compute another one.

        Args:
            model: a callable that returns the stages' logits and, with labels, the model's loss.
            inputs: the targets.
        """
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def save_model(self, output_dir: str | None = None) -> None:
        """Write model and tokenizer, for `from_pretrained`."""
        self._begun().save_pretrained(output_dir or self.folder, self.processing_class)

    def log(self, logs: dict[str, float]) -> None:
        """Add numbers to the log at this step, with its epoch, and tell callbacks.

        Raises:
            ValueError: `compute_loss` calls it.
        """
        if self._script_loss is not None and self._script_loss.is_computing:
            raise ValueError(
                "compute_loss calls log, but it is called for micro-batches, to measure and to "
                "probe, and on the last stage alone, so that its numbers are of no step; leave it "
                "out: the loss is logged as logging_steps say"
            )
        logs["epoch"] = self.state.epoch
        self._bridge.log(self._begun(), logs)

    def add_callback(self, callback: Any) -> None:
        """Add a callback of transformers, before training."""
        self._bridge.add(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or all of a class."""
        self._bridge.remove(callback)

    def is_world_process_zero(self) -> bool:
        """Return whether this process is rank 0."""
        return bool(self.state.is_world_process_zero)

    def is_local_process_zero(self) -> bool:
        """Return whether this process is the first of its node."""
        return bool(self.state.is_local_process_zero)

    def create_model_card(self, **facts: Any) -> None:
        """Write output_dir/README.md on rank 0; arguments are transformers'."""
        if self.is_world_process_zero():
            card = TrainingSummary.from_trainer(self, **facts).to_model_card()
            Path(self.folder, "README.md").write_text(card, encoding="utf-8")

    def close(self) -> None:
        """Leave the other processes; the script's end does so, too."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            atexit.unregister(self._at_exit)
            trainer.close()

    def _begun(
        self,
        resumes: bool = False,
        *,
        trains: bool = False,
        stand_in: SizedDataset | None = None,
    ) -> Trainer:
        """Return our Trainer, made at the first call.

        Args:
            stand_in: data set to measure with, if the script has given none.
        """
        if self._trainer is None:
            known = (self.train_dataset, self.eval_dataset, stand_in)
            usable = (dataset for dataset in known if not isinstance(dataset, Mapping | None))
            dataset = next(usable, None)
            if dataset is None:
                raise ValueError("there is no data set to begin with; give a train_dataset")
            made = self._make(dataset, resumes=resumes, trains=trains)
            self._trainer, self._made_of = made, self._given()
            # Alone, a Trainer that a notebook drops lets go of its folder; ranks end together.
            reach = weakref.ref(self) if made.world.size == 1 else lambda: self
            self._at_exit = partial(_close_at_exit, reach)
            atexit.register(self._at_exit)
        self._refuse_changed(trains=trains)
        return self._trainer

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Call `evaluate` at due evaluations if our Trainer does not evaluate by itself."""
        self._trains = True
        self._bridge.evaluate = self.evaluate if self._evaluates_itself() else None
        try:
            yield
        finally:
            self._bridge.evaluate, self._trains = None, False

    def _given(self) -> dict[str, Any]:
        """Return what our Trainer is made with, as it is now."""
        return {**{name: getattr(self, name) for name in _MADE_OF}, "args": self.args.to_dict()}

    def _refuse_changed(self, *, trains: bool) -> None:
        """Raise a ValueError for attributes that were set since our Trainer was made."""
        made_of, before = self._given(), self._made_of
        same = {name: value is before[name] for name, value in made_of.items()}
        same["args"] = made_of["args"] == before["args"]
        if not trains or self.args.eval_strategy == "no":
            del same["eval_dataset"]  # `evaluate` reads it at each call.
        if changed := [name for name, is_same in same.items() if not is_same]:
            raise ValueError(
                f"{', '.join(changed)} is not what the first train, evaluate or predict began "
                "with, and would have no effect; make another Trainer with it"
            )

    def _make(self, dataset: SizedDataset, *, resumes: bool, trains: bool) -> Trainer:
        args = self.args
        check_dataset(dataset, "train_dataset" if dataset is self.train_dataset else "dataset")
        read_of = partial(
            first_samples,
            collate_fn=self.data_collator,
            drops_unknown=args.remove_unused_columns,
            seed=args.seed,
        )
        settings = settings_of(args, len(dataset), self._optimizer)
        layered = self._layered(dataset, read_of, settings)
        self._bridge.num_samples = len(dataset)
        evaluated = self._evaluated_in_a_run()
        if self._evaluates_itself():
            refuse_unselected(args, {**settings, **self._settings})
            settings |= {"evaluate_every_epochs": 0, "evaluate_every_steps": 0}
        loss = self._loss(layered, partial(read_of, dataset))
        collate = self.data_collator
        if self.train_dataset is None:  # Nothing is trained, and nothing written.
            settings |= {"folder": None, "checkpoint_every_steps": 0, "checkpoint_every_epochs": 0}
            dataset = Measured(dataset, layered.targets)
            collate = MeasuredCollate(collate, layered.targets)
            loss = replace(loss.wrapped(loss_without_targets), takes_unread=False)
        return Trainer(
            layered,
            dataset,
            eval_dataset=evaluated,
            optimizer=self._optimizer,
            freeze=self._freeze,
            **{
                **settings,
                "callbacks": [self._bridge],
                "collate_fn": collate,
                # A script may still set one before `train`, so a Trainer that was made earlier
                # is always able to judge.
                "compute_metrics": self._judge if self.compute_metrics or not trains else None,
                "preprocess_logits_for_metrics": (
                    self._preprocess if self.preprocess_logits_for_metrics else None
                ),
                "resume": self._replaces(settings) if trains and not resumes else resumes,
                **self._settings,
                "loss_fn": loss,
            },
        )

    def _layered(
        self, dataset: SizedDataset, read_of: Callable[..., Batch], settings: Mapping[str, Any]
    ) -> LayeredModel:
        """Return the script's model in layers, by its first samples."""
        own = self._settings
        with naming_first_samples(self.model, dataset, read_of):
            return adapt(
                self.model,
                partial(read_of, dataset),
                loss_fn=own.get("loss_fn"),
                unties=own.get("tied_weights") == "untie",
                parts=own.get("parts", ()),
                computes_in=DTYPES[{**settings, **own}["precision"]],
            )

    def _evaluated_in_a_run(self) -> Any:
        """Return the data set that our Trainer evaluates by itself, if any."""
        dataset: Any = self.eval_dataset
        if self._evaluates_itself() or isinstance(dataset, Mapping | None):
            return None
        return dataset if self._is_labelled(dataset) else None

    def _evaluates_itself(self) -> bool:
        """Return whether evaluations in a run are calls of `evaluate`, not our Trainer's own.

        Raises:
            ValueError: there is nothing to evaluate.
        """
        if self.train_dataset is None or self.args.eval_strategy == "no":
            return False
        if self.eval_dataset is None:
            strategy = self.args.eval_strategy
            raise ValueError(
                f"eval_strategy is {getattr(strategy, 'value', strategy)!r}, but there is no "
                "eval_dataset; give one, or leave eval_strategy out"
            )
        kind = type(self)
        is_overridden = any(getattr(kind, n) is not getattr(Evaluations, n) for n in _OVERRIDABLE)
        is_one = not isinstance(self.eval_dataset, Mapping)
        return is_overridden or not is_one or not self._is_labelled(self.eval_dataset)

    def _loss(self, layered: LayeredModel, read: Callable[[EntryNames], Batch]) -> Loss:
        """Return the loss of the script or the model."""
        loss_fn, name = self._settings.get("loss_fn"), type(self.model).__name__
        if type(self).compute_loss is HFTrainer.compute_loss:
            loss = choose_loss(loss_fn, layered.loss_fn, model=name)
            return divided_by_labels(loss, layered, read) if loss_fn is None else loss
        refuse_own_loss(self.args, loss_fn)
        model_loss = choose_loss(None, layered.loss_fn, model=name)
        self._script_loss = ScriptLoss(
            self.compute_loss, model=self.model, own=model_loss, targets=layered.targets
        )
        return Loss(self._script_loss)

    def _write_best(self, trainer: Trainer) -> None:
        """Write the best model, with which `fit` ended, for `from_pretrained`. Collective."""
        config = trainer.config
        if config.load_best_model_at_end and trainer.report.best_step is not None:
            # This folder also holds the best weights for a run that goes on.
            folder = Path(str(config.folder), BEST_FOLDER)
            trainer.save_pretrained(folder, self.processing_class)
            self.state.best_model_checkpoint = str(folder)

    def _replaces(self, settings: Mapping[str, Any]) -> Literal["replace", False]:
        """Return the setting `resume` of a run that begins anew.

        A run that is over or saved nothing is replaced, as in transformers. A run that could go on
        is not: our Trainer refuses its folder.
        """
        folder = {**settings, **self._settings}["folder"]
        if folder is None:
            return False
        can_go_on = holds_checkpoint(Path(folder, CHECKPOINTS)) and not was_over(Path(folder))
        return False if can_go_on else "replace"

    def _resumes(self, given: str | PathLike[str] | bool | None) -> bool:
        """Return whether a run goes on; a folder must be the run's own."""
        as_words = {"true": True, "false": False}  # As command lines give them.
        if isinstance(given, str) and given.lower() in as_words and not Path(given).exists():
            return as_words[given.lower()]
        if given is None or isinstance(given, bool):
            return bool(given)
        output = Path(self.folder).resolve()
        saved = output / CHECKPOINTS
        newest = [folder.resolve() for folder in published(saved)[:1]] if saved.exists() else []
        # Names that transformers would give them, whether such folders were written or not.
        named = [output / f"checkpoint-{int(folder.name.split('-')[1])}" for folder in newest]
        usable = (output, saved, *newest, *named, *pretrained(output)[-1:] * len(newest))
        if Path(given).resolve() not in usable:
            raise ValueError(
                f"resume_from_checkpoint is {str(given)!r}, but a run goes on from the newest "
                f"checkpoint in output_dir={self.folder!r}; give True, or output_dir the folder "
                "in which that run was"
            )
        return True


def _close_at_exit(reach: Callable[[], HFTrainer | None]) -> None:
    hf_trainer = reach()
    if hf_trainer is not None and hf_trainer._trainer is not None:
        failed = getattr(sys, "last_type", None) is not None
        hf_trainer._trainer.__exit__(sys.last_type if failed else None)


def _usual_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    """Return a collator that pads to the longest if there is a tokenizer, else stacks."""
    kinds = transformers.PreTrainedTokenizerBase, SequenceFeatureExtractor
    pads = isinstance(processing_class, kinds)
    return DataCollatorWithPadding(processing_class) if pads else default_data_collator
