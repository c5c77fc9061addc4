"""Train a layered model elastically: the loop that everything else serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autopipe.plan import PlanRequest
from autopipe.trace import Trace
from freeze import FreezePolicy, PolicyFunction
from pipetransformer.adapters import LayeredModel
from pipetransformer.checkpoint import Saved
from pipetransformer.data import Batch, SizedDataset, own_random_numbers
from pipetransformer.durable_files import replace_tensors
from pipetransformer.events import Callback, Events, check_callbacks
from pipetransformer.loss import LossFunction
from pipetransformer.measure import Measurements
from pipetransformer.model_files import write_model_folder
from pipetransformer.optimizer import OptimizerFactory
from pipetransformer.predictions import PredictionOutput
from pipetransformer.processes import on_rank_0
from pipetransformer.refusals import refuse_surroundings
from pipetransformer.report import FitReport
from pipetransformer.run import Run
from pipetransformer.stage import StepResult
from pipetransformer.transition import Decision
from pipetransformer.verification import Verification


class Trainer:
    """Train a model on all processes that were started, elastically.

    Every process runs the same script. Rank 0's weights win at the start; a rank keeps only the
    layers it trains, the others become meta tensors; `fit` ends by gathering the weights into rank
    0's model.

    Args:
        model: a timm or transformers model that an adapter knows, an nn.Sequential, or a
            LayeredModel.
        train_dataset: has a length and items by index: (x, y), or a mapping of entries.
        eval_dataset: evaluated after every epoch, or as set.
        loss_fn: (output, targets) -> a 0-dim mean over the samples, or (sum, count).
        optimizer: builds an optimizer over a list of (name, parameter); None is AdamW at a
            rate of 1e-3, `adamw()`.
        freeze: a FreezePolicy, a function of a FreezeContext, or a policy's name such as
            "schedule:0,2,4", as commands take it; None freezes nothing.
        settings: the fields of `TrainConfig`.
    Raises:
        TypeError, ValueError: before anything is started: an unknown setting, a model no adapter
            knows, a dataset without a length, an impossible pipeline length, a batch smaller than
            the replicas, a folder that holds another run.
    """

    def __init__(
        self,
        model: nn.Module | LayeredModel,
        train_dataset: SizedDataset,
        *,
        eval_dataset: SizedDataset | None = None,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerFactory | None = None,
        freeze: FreezePolicy | PolicyFunction | str | None = None,
        **settings: Any,
    ) -> None:
        check_callbacks(settings.get("callbacks"))
        self._run = run = Run(
            model,
            train_dataset,
            eval_dataset=eval_dataset,
            loss_fn=loss_fn,
            optimizer=optimizer,
            freeze=freeze,
            **settings,
        )
        self._is_closed = self._has_own_numbers = False
        self.config, self.world, self.report = run.task.config, run.world, run.log.report
        self._events = Events(
            self, run.task.config.callbacks, world=run.world, timeline=run.timeline
        )
        if run.task.config.callbacks:
            run.log.listen(self._events.log)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None = None,
        trace: object = None,
    ) -> None:
        self._is_closed = True
        self._run.close(failed=error_type is not None)
        if isinstance(error, KeyboardInterrupt) and not self.is_over:
            self._say_where(error)

    def close(self) -> None:
        """Wait for a checkpoint, and let go of all but rank 0's model, which stays usable."""
        self.__exit__(None)

    def fit(self) -> FitReport:
        """Train to the end, and gather the weights into rank 0's model.

        Those that do not fit on its device go into host memory, with a warning. The model is then
        as it came, but for its weights: the same parameters need gradients, and modules are in the
        modes they were in.

        Returns:
            what the run took and reached.
        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; on rank 0 it says at which step, which
                checkpoint is the newest, and how to go on.
        """
        run, events = self._run, self._events
        refuse_surroundings(trains=True)
        try:
            with own_random_numbers(self.world.device):
                first_change = run.begin(trains=True)
            events.tell(Callback.on_train_begin)
            events.tell_of_change(first_change)
            with self._own_numbers():  # Once, and not at each step.
                while not self.is_over:
                    self.step()
            self._note_save(run.state.finish())
            run.transitions.look_back()
            run.log.finish()
            run.deployment.refuse_partial_edits()
            run.deployment.gather_weights(run.deployment.roomy_device())
            run.selection.put_best_weights()
        except KeyboardInterrupt as error:
            self._say_where(error)
            raise
        finally:
            run.log.stop_showing()
            run.give_model_back()
        events.tell(Callback.on_train_end, self.report)
        return self.report

    def begin(self) -> None:
        """Restore or prepare, measure and decide; otherwise the first step does. Collective.

        From then on `is_over` and `global_step` hold for a run that is continued, too.
        """
        with self._ready(trains=True):
            pass

    def stop(self) -> None:
        """Ask, on any rank, for the run to end after the step: all ranks end after the same one.

        In an event that is the step it belongs to, elsewhere the coming one. The run is then over
        as at its end, checkpoint included; a resume goes on.
        """
        self._events.ask_to_stop()

    def step(self) -> StepResult:
        """Train on the next global batch; decide before it, evaluate and save after it, where due.

        Returns:
            the loss and more of the training step alone.
        Raises:
            RuntimeError: the run is over, or the one that is continued had ended already.
            ValueError: before the first step: another run trains in the folder, or what it holds
                cannot be continued.
        """
        return self._step()

    def trace_step(self) -> Trace:
        """Train on the next global batch, as `step` does, and take down what ran when. Collective.

        Returns:
            what the first pipeline's stages did, on every rank.
        Raises:
            ValueError: steps have no beginning and end, with weight_versions=.
        """
        if self.config.weight_versions is not None:
            raise ValueError("a step of a pipeline without flushes has no trace of its own")
        trace = Trace()
        self._step(trace)
        return self._run.joined_trace(trace)

    def evaluate(self, dataset: SizedDataset | None = None) -> dict[str, float]:
        """Return loss and metrics over a dataset, the eval_dataset by default. Collective.

        Raises:
            ValueError: there is no dataset to evaluate.
        """
        dataset = self._run.evaluator.choose(dataset)
        with self._ready():
            metrics = self._run.evaluator.evaluate(dataset)
        self._events.tell(Callback.on_evaluate, metrics)
        return metrics

    def predict(self, dataset: SizedDataset) -> PredictionOutput:
        """Return the model's output for every sample, on every rank, in their order. Collective.

        Samples without targets have no metrics. Rows of unequal length are padded with -100.

        Raises:
            CallbackError: `compute_metrics` raised.
            ValueError: outputs differ in more than their second dimension.
        """
        dataset = self._run.evaluator.choose(dataset)
        with self._ready():
            return self._run.evaluator.predict(dataset)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state under its own names on rank 0, {} elsewhere. Collective.

        Until the run is over these are copies in host memory, as training goes on with its own.
        """
        with self._ready():
            return self._run.state_dict()

    def save_model(self, path: str | Path) -> None:
        """Write the weights as one safetensors file under the model's own names. Collective."""
        state = self.state_dict()
        on_rank_0(lambda: replace_tensors(Path(path), state), group=self.world.group)

    def save_pretrained(self, folder: str | Path, processing_class: Any = None) -> None:
        """Write what `from_pretrained` loads: weights, configuration, tokenizer. Collective.

        One of timm's factory is loaded by timm.create_model("local-dir:FOLDER", pretrained=True),
        with the img_size=, patch_size=, ... that it was built with, which are not in the folder;
        of others there is model.safetensors alone.

        Args:
            folder: created if missing, on rank 0's node.
            processing_class: a tokenizer or a processor to be saved beside it.
        """
        model, state = self._run.task.model.model, self.state_dict()
        write = partial(write_model_folder, model, state, Path(folder), processing_class)
        on_rank_0(write, group=self.world.group)

    def verify(self, batch: Batch | None = None) -> Verification:
        """Compare what is trained with the model's own forward and a plain loop. Collective.

        On a few samples, without dropout and in float64 where the model computes in it, whatever
        precision= says: outputs, loss, gradients and updated weights, in pipelines over all
        processes. Twins of the model are trained; this run is as it was. Each rank has room for
        two of them in host memory.

        Args:
            batch: entries by name, (N, ...) each with N >= 2; None takes the first of the
                training set.
        Raises:
            VerificationError: on every rank: they differ; the message names the first sublayer,
                parameter or buffer.
            ValueError: the batch has fewer than two samples.
        """
        refuse_surroundings(trains=True)
        with own_random_numbers(self.world.device):
            return self._run.verify(batch)

    def measure(self) -> Measurements:
        """Measure sublayers, optimizer and links anew, for the decisions to come. Collective."""
        with self._ready():
            return self._run.transitions.measure()

    def plan_request(self, num_frozen: int) -> PlanRequest:
        """Return what a decision before the coming step would ask of its planner with so many
        frozen layers, from what `measure` has found.
        """
        return self._run.transitions.plan_request(num_frozen)

    @property
    def is_main_process(self) -> bool:
        """Tell whether this process is rank 0, which decides, records and saves."""
        return self.world.is_main

    @property
    def global_step(self) -> int:
        """Return how many steps are done.

        Before the first collective call of a resumed run this is not known yet: see `begin`.
        """
        return self._run.timeline.position.step

    @property
    def epoch(self) -> float:
        """Return how many epochs are done, with the share of the coming one's steps."""
        return self._run.timeline.epochs_done(self._run.transitions.replicas)

    @property
    def learning_rate(self) -> float:
        """Return the last step's rate, of the first parameter group; the first's before any."""
        return self._run.learning_rate

    @property
    def max_steps(self) -> int:
        """Return how many steps the whole run has, if the global batch stays what it is."""
        return self._run.timeline.max_steps(self._run.transitions.replicas)

    @property
    def is_over(self) -> bool:
        """Tell whether all epochs are done, or the run was stopped before.

        Before the first collective call of a resumed run this is not known yet: see `begin`.
        """
        return self._run.timeline.is_over

    @property
    def measurements(self) -> Measurements | None:
        """Return what decisions are based on; None before the first step."""
        return self._run.transitions.measurements

    @property
    def decision(self) -> Decision | None:
        """Return what holds now: frozen layers and pipeline; None before the first step."""
        return self._run.transitions.decision

    @contextmanager
    def _ready(self, *, trains: bool = False) -> Iterator[None]:
        """Begin the run if need be, and leave the caller's random numbers alone meanwhile."""
        if self._is_closed:
            raise RuntimeError("the Trainer is closed; evaluate, predict and train before")
        refuse_surroundings(trains=trains)
        with self._own_numbers():
            self._events.tell_of_change(self._run.begin(trains=trains))
            if not trains:
                self._run.settle()
            yield
            if self.is_over:  # Its user may go on with the model.
                self._run.give_model_back()

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Leave the caller's random numbers alone meanwhile, once for all that is within."""
        if self._has_own_numbers:
            yield
            return
        self._has_own_numbers = True
        try:
            with own_random_numbers(self.world.device):
                yield
        finally:
            self._has_own_numbers = False

    def _step(self, trace: Trace | None = None) -> StepResult:
        run, recorder = self._run, None
        had_begun = run.transitions.have_begun
        with self._ready(trains=True):
            if self.is_over:
                raise RuntimeError(
                    f"all {self.config.epochs} epochs are done, or the run was stopped; give a "
                    "larger epochs=, or resume, to go on"
                    if had_begun
                    else "the run that was continued had ended already, at step "
                    f"{self.global_step}; give a larger epochs= to go on. A loop that asks "
                    "is_over calls begin() before it"
                )
            run.borrow_model()
            self._events.tell_of_change(run.decide_if_due())
            coming, next_ids = run.next_two()
            stage, clock = run.deployment.active_stage, run.transitions.clock()
            if trace is not None:
                recorder = trace.recorder(stage.index, device=self.world.device)
            if self.config.weight_versions is not None:
                result = run.train_in_stream(stops=self._events.wants_stop)
            else:
                result = stage.train_step(
                    coming,
                    run.feed.rows(clock.epoch, is_last=run.timeline.sees_samples_last),
                    next_ids=next_ids,
                    stops=self._events.wants_stop,
                    recorder=recorder,
                )
            run.note_step(result, clock, len(coming.ids))
            self._events.tell(Callback.on_step_end, result)
            metrics = run.evaluate_if_due()
            if metrics is not None:
                self._events.tell(Callback.on_evaluate, metrics)
            run.note_end()
            self._note_save(run.state.save_if_due())
            return result

    def _say_where(self, error: KeyboardInterrupt) -> None:
        """Have an interrupt say where it has stopped the run, as the last line of its trace."""
        if not error.args and self._run.transitions.have_begun:
            error.args = tuple(filter(None, [self._run.where_it_stopped()]))

    def _note_save(self, saved: Saved | None) -> None:
        self._run.log.checkpoint(saved)
        self._events.tell_of_save(saved)
