"""Train a layered model elastically: the loop that everything else serves.

    decide ─► batch ─► train ─► note ─► evaluate ─► save        `Trainer._train`

task: what is trained                 world: on which ranks
timeline: where the run is            coming: which samples follow
feed: samples, through the cache      deployment: what this rank holds of the model
elastic: decides, and carries it out  evaluator: loss, metrics, outputs
selection: the best evaluation        state: what checkpoints hold
log: records, progress, report        events: callbacks

Collective: all ranks must call it alike, or the others wait for ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autopipe.loss import LossFunction
from autopipe.plan import PlanRequest
from autopipe.profile import Profile
from autopipe.trace import Trace
from freeze import FreezeChoice
from pipetransformer.checkpoint import Saved, write_model_folder
from pipetransformer.checks import Verification, refuse_surroundings
from pipetransformer.durable_files import replace_tensors
from pipetransformer.elastic import Change, Decision
from pipetransformer.feed import Batch, Clock, ComingStep, SizedDataset, own_random_numbers
from pipetransformer.model import LayeredModel, OptimizerFactory, is_opaque
from pipetransformer.processes import on_rank_0
from pipetransformer.report import Callback, Events, FitReport
from pipetransformer.run_parts import build_parts
from pipetransformer.stage import AsynchronousStage, PredictionOutput, Stage, StepResult

_LOOKS_EVERY = 16
"""Steps between two looks at what was changed, where nothing of the user's runs between steps."""


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
        freeze: a number of layers, or one for each epoch; a FreezePolicy, a function of a
            FreezeContext, or a policy's name, as commands take it. None freezes nothing.
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
        freeze: FreezeChoice | None = None,
        **settings: Any,
    ) -> None:
        parts = build_parts(
            model,
            train_dataset,
            eval_dataset=eval_dataset,
            loss_fn=loss_fn,
            optimizer=optimizer,
            freeze=freeze,
            **settings,
        )
        self._parts, self._task, self._checks = parts, parts.task, parts.checks
        self.config, self.world = parts.task.config, parts.world
        self._timeline, self._coming, self._feed = parts.timeline, parts.coming, parts.feed
        self._deployment, self._evaluator = parts.deployment, parts.evaluator
        self._elastic, self._selection, self._state = parts.elastic, parts.selection, parts.state
        self._log, self.report = parts.log, parts.log.report
        self._events = Events(
            self, self.config.callbacks, world=self.world, timeline=self._timeline
        )
        if self.config.callbacks:
            self._log.listen(self._events.log)
        self._is_closed = self._has_own_numbers = self._is_fitting = False
        # Results of a pipeline without flushes, which trains several steps at once.
        self._stream = deque[StepResult]()
        # Records of steps whose numbers a GPU still computes: reading them would wait for it.
        self._unrecorded = deque[Callable[[], None]]()
        self._last_rate: float | None = None

    def fit(self) -> FitReport:
        """Train to the end, and gather the weights into rank 0's model. Collective.

        Weights that do not fit on its device go into host memory, with a warning. But for its
        weights the model is then as it came: in the modes of its modules, and in which parameters
        need gradients.

        Returns:
            what the run took and reached.
        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; on rank 0 it says at which step, which
                checkpoint is the newest, and how to go on.
        """
        refuse_surroundings(trains=True)
        try:
            with own_random_numbers(self.world.device):
                first_change = self._begin(trains=True)
            if self.is_over:
                self._log.say(
                    f"the run had ended at step {self.global_step}, so nothing is trained; give a "
                    "larger epochs=, or begin anew with another Trainer and resume='replace'"
                )
            self._events.tell(Callback.on_train_begin)
            self._events.tell_of_change(first_change)
            # Once, and not at each step: it copies the states of all generators.
            with self._own_numbers():
                self._is_fitting = True
                while not self.is_over:
                    self._train()
            self._note_save(self._state.finish())
            self._elastic.look_back()
            self._log.finish()
            self._deployment.refuse_partial_edits()
            self._deployment.gather_weights(self._deployment.roomy_device())
            self._selection.put_best_weights()
        except KeyboardInterrupt as error:
            self._say_where(error)
            raise
        finally:
            self._is_fitting = False
            self._log.stop_showing()
            self._give_model_back()
        self._events.tell(Callback.on_train_end, self.report)
        return self.report

    def begin(self) -> None:
        """Restore or prepare, measure and decide, as the first step else does. Collective.

        From then on `is_over` and `global_step` hold for a resumed run, too.
        """
        with self._ready(trains=True):
            pass

    def stop(self) -> None:
        """Ask on any rank for the run to end: all ranks end after the same step.

        In an event that is the event's step, elsewhere the coming one; where GPUs end the steps,
        the one after that. The run is then over as at its end, checkpoint included; a resume goes
        on.
        """
        self._events.ask_to_stop()

    def step(self) -> StepResult:
        """Train on the next global batch. Collective.

        Decisions before it, and evaluations and saves after it, happen where they are due.

        Returns:
            the loss and more of the training step alone.
        Raises:
            RuntimeError: the run is over, or the resumed run had ended already.
            ValueError: before the first step: another run trains in the folder, or its checkpoint
                does not fit.
        """
        return self._train()

    def trace_step(self) -> Trace:
        """Train on the next global batch, as `step` does, and record what ran when. Collective.

        Returns:
            what the first pipeline's stages did, on every rank.
        Raises:
            ValueError: steps have no beginning and end, with weight_versions=.
        """
        if self.config.weight_versions is not None:
            raise ValueError("a step of a pipeline without flushes has no trace of its own")
        trace = Trace()
        self._train(trace)
        return self._stage.gather_trace(trace)

    def _train(self, trace: Trace | None = None) -> StepResult:
        """Train one step, with all that is due before and after it."""
        had_begun = self._elastic.have_begun
        with self._ready(trains=True):
            self._refuse_ended_run(had_begun)
            self._borrow_model()
            self._events.tell_of_change(self._decide_if_due())
            clock = self._elastic.clock()
            coming, next_ids = self._coming.next_two(self._elastic.replicas)
            result = self._train_batch(coming, next_ids, trace)
            self._note_step(result, clock, len(coming.ids))
            self._events.tell(Callback.on_step_end, result)
            self._evaluate_if_due()
            self._note_end()
            self._note_save(self._state.save_if_due())
            return result

    def _decide_if_due(self) -> Change | None:
        """Decide where a decision precedes the coming step, and carry it out."""
        if self._timeline.at_epoch_start:  # Seldom, as the comparison reads all weights.
            self._deployment.refuse_partial_edits()
        report = self.report
        change = self._elastic.decide_if_due(report.metrics, report.evaluated_at)
        if change is not None:
            self._log.change(change)
            self._evaluator.tell_of_rounding(self._feed)
        return change

    def _train_batch(
        self, coming: ComingStep, next_ids: Tensor | None, trace: Trace | None
    ) -> StepResult:
        """Train on the coming global batch, or return its result from a stream."""
        stage, timeline, stops = self._stage, self._timeline, self._events.wants_stop
        if isinstance(stage, AsynchronousStage):
            return self._next_of_stream(stage, stops=stops)
        self._feed.is_undisturbed = self._is_undisturbed
        rows = self._feed.rows(timeline.position.epoch, is_last=timeline.sees_samples_last)
        device = self.world.device
        recorder = None if trace is None else trace.recorder(stage.index, device=device)
        where = f"step {coming.step}: "
        ids = map(int, coming.ids)
        with self._checks.naming_bad(self._feed, ids, where=where, tries=False):
            return stage.train_step(
                coming, rows, next_ids=next_ids, stops=stops, looks=self._looks, recorder=recorder
            )

    @property
    def _looks(self) -> bool:
        """Return whether code of the user's may have run since the last step, or a few have."""
        timeline, step = self._timeline, self._timeline.position.step
        is_due = timeline.at_epoch_start or step < 2 or step % _LOOKS_EVERY == 0
        return is_due or not self._is_undisturbed

    @property
    def _is_undisturbed(self) -> bool:
        return self._is_fitting and not self.config.callbacks

    def _next_of_stream(self, stage: AsynchronousStage, *, stops: bool) -> StepResult:
        """Return the coming step's result from a stream, which is trained to the next pause.

        A run that is asked to stop does so at a stream's end.
        """
        timeline = self._timeline
        if not self._stream:
            rows = self._feed.rows(timeline.position.epoch, is_last=timeline.sees_samples_last)
            elastic = self._elastic
            steps = self._coming.to_next_pause(elastic.replicas, elastic.review_step)
            self._stream = stage.train_stream(steps, rows)
            # The weights have seen all these steps, so the run must not be ended before them.
            timeline.note_trained(steps[-1].step)
        result = self._stream.popleft()
        return result if self._stream else stage.ask_for_stop(result, stops=stops)

    def _note_step(self, result: StepResult, clock: Clock, num_samples: int) -> None:
        """Advance to the next step, and record this one."""
        decision, timeline, report = self._elastic.decision, self._timeline, self.report
        assert decision is not None
        self._last_rate = clock.learning_rate
        report.cache_bytes = max(report.cache_bytes, self._feed.keeper.num_bytes)
        self._unrecorded.append(partial(self._record_step, result, decision, clock, num_samples))
        # On a GPU a step's numbers are read one step late, so that the host stays ahead of it.
        while len(self._unrecorded) > (not result.is_known):
            self._unrecorded.popleft()()
        timeline.advance(num_samples)
        # An evaluation, a save or a decision must not come before the record of this step.
        if timeline.pauses or timeline.position.step == self._elastic.review_step:
            self._settle()
        if timeline.at_epoch_start:
            self._log.epoch(timeline.position.step, timeline.position.epoch)

    def _settle(self) -> None:
        """Wait for the last step's numbers, and record them.

        Raises:
            NonFiniteError: one of them is not finite.
            ValueError: that step was refused.
        """
        if self._deployment.stage is not None:
            self._deployment.stage.settle()
        while self._unrecorded:
            self._unrecorded.popleft()()

    def _record_step(
        self, result: StepResult, decision: Decision, clock: Clock, num_samples: int
    ) -> None:
        result.check()
        if result.stops:
            self._timeline.stop()
        self._log.step(result, decision=decision, clock=clock, num_samples=num_samples)
        usual_s = self._elastic.note_step(result, clock.learning_rate)
        if usual_s is not None:
            self._log.outcome(clock.step, decision, usual_s)

    def _evaluate_if_due(self) -> None:
        """Evaluate, record that, and compare it with the best, if that follows the last step."""
        dataset = self._evaluator.dataset
        if dataset is None or not self._timeline.evaluation_due():
            return
        position = self._timeline.position
        start = time.perf_counter()
        self._deployment.refuse_partial_edits()
        metrics = self._evaluator.evaluate(dataset)
        seconds = time.perf_counter() - start
        self._log.evaluation(position.step, position.epoch, metrics, seconds)
        self._selection.judge(metrics, position.step)
        self._note_best()
        self._events.tell(Callback.on_evaluate, metrics)

    def _note_best(self) -> None:
        """Report the best evaluation so far; end a run that is out of patience."""
        best = self._selection.best
        self.report.best_metric, self.report.best_step = best.value, best.step
        if best.is_out_of_patience:
            self._timeline.stop()

    def _note_end(self) -> None:
        """End the log of a run that is over, with the epoch that it did not complete."""
        timeline, position = self._timeline, self._timeline.position
        if timeline.is_over and not timeline.at_epoch_start:
            self._log.epoch(position.step, position.epoch + 1, partial=True)
        if timeline.is_over:
            self._log.finish()

    def _note_save(self, saved: Saved | None) -> None:
        self._log.checkpoint(saved)
        self._events.tell_of_save(saved)

    @contextmanager
    def _ready(self, *, trains: bool = False) -> Iterator[None]:
        """Begin the run if need be, and keep the caller's random numbers out of the block.

        Args:
            trains: whether the block trains a step.
        """
        if self._is_closed:
            raise RuntimeError("the Trainer is closed; evaluate, predict and train before")
        refuse_surroundings(trains=trains)
        with self._own_numbers():
            self._events.tell_of_change(self._begin(trains=trains))
            if not trains:  # What is asked for between two steps sees the last one recorded.
                self._settle()
            yield
            if self.is_over:  # From now on the user may train the model elsewhere.
                self._give_model_back()

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Keep the caller's random numbers out of the block; within such a block, do nothing."""
        if self._has_own_numbers:
            yield
            return
        self._has_own_numbers = True
        try:
            with own_random_numbers(self.world.device):
                yield
        finally:
            self._has_own_numbers = False

    def _begin(self, *, trains: bool = False) -> Change | None:
        """Restore or prepare, measure, and decide, once; return what that changed. Collective.

        Args:
            trains: whether steps follow, and with them evaluations, and not a prediction alone.
        """
        if self._elastic.have_begun:
            return None
        self._borrow_model()
        try:
            self._deployment.fill_released()
            checkpoint = self._state.open()
            with self._checks.naming_first():
                found = self._checks.check(self._coming, trains=trains)
                self._task.model.plainly_random.update(found.plainly_random)
                self._log.open(found.verified, found.warnings)
                self._state.begin(checkpoint)
            self._log.say(self._state.continues)
            self._selection.forget_if_lost()
            self._note_best()  # A metric other than the checkpoint's has no best yet.
            rows = self._parts.row_budget()
            self._log.start(
                self._elastic.clock(),
                rows=rows,
                saved_share=self._parts.saved_share(rows),
                unused=self._feed.unused_columns() if self.world.is_main else (),
            )
            return self._decide_if_due()
        except BaseException:  # A refused run leaves the user's model as it came.
            self._return_model()
            raise

    def _refuse_ended_run(self, had_begun: bool) -> None:
        if not self.is_over:
            return
        raise RuntimeError(
            f"all {self.config.epochs} epochs are done, or the run was stopped; give a "
            "larger epochs=, or resume, to go on"
            if had_begun
            else "the run that was continued had ended already, at step "
            f"{self.global_step}; give a larger epochs= to go on. A loop that asks "
            "is_over calls begin() before it"
        )

    def evaluate(self, dataset: SizedDataset | None = None) -> dict[str, float]:
        """Return loss and metrics over a dataset, the eval_dataset by default. Collective.

        Raises:
            ValueError: there is no dataset to evaluate.
        """
        dataset = self._evaluator.choose(dataset)
        with self._ready():
            self._deployment.refuse_partial_edits()
            metrics = self._evaluator.evaluate(dataset)
        self._events.tell(Callback.on_evaluate, metrics)
        return metrics

    def predict(self, dataset: SizedDataset) -> PredictionOutput:
        """Return the model's output for every sample, on every rank, in their order. Collective.

        Samples without targets have no metrics. Rows of unequal length are padded with -100.

        Raises:
            CallbackError: `compute_metrics` raised.
            ValueError: outputs differ in more than their second dimension.
        """
        dataset = self._evaluator.choose(dataset)
        with self._ready():
            self._deployment.refuse_partial_edits()
            return self._evaluator.predict(dataset)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state under its own names on rank 0, {} elsewhere. Collective.

        Until the run is over they are copies in host memory, as training changes its own.
        """
        with self._ready():
            if not self.is_over:
                return self._deployment.copy_weights()
            self._deployment.gather_weights(self._deployment.roomy_device())
            return dict(self._task.model.model.state_dict()) if self.is_main_process else {}

    def save_model(self, path: str | Path) -> None:
        """Write the weights as one safetensors file under the model's own names. Collective.

        Raises:
            ValueError: a weight is in no form that such a file has, as torchao's.
        """
        state = self.state_dict()
        if opaque := [name for name, one in state.items() if is_opaque(one)]:
            raise ValueError(
                f"{opaque[0]!r} is a {type(state[opaque[0]]).__name__}, which no safetensors file "
                "holds: write the adapters by save_pretrained"
            )
        on_rank_0(lambda: replace_tensors(Path(path), state), group=self.world.group)

    def save_pretrained(self, folder: str | Path, processing_class: Any = None) -> None:
        """Write what `from_pretrained` loads: weights, configuration, tokenizer. Collective.

        A timm model is loaded by timm.create_model("local-dir:FOLDER", pretrained=True), with the
        img_size=, patch_size=, ... that it was built with, which are not in the folder. For models
        of neither library the folder holds model.safetensors alone.

        Args:
            folder: created if missing, on rank 0's node.
            processing_class: a tokenizer or a processor to be saved beside it.
        """
        model, state = self._task.model.model, self.state_dict()
        write = partial(write_model_folder, model, state, Path(folder), processing_class)
        on_rank_0(write, group=self.world.group)

    def verify(self, batch: Batch | None = None) -> Verification:
        """Compare what is trained with the model's own forward and a plain loop. Collective.

        Outputs, loss, gradients and updated weights are compared, in pipelines over all processes.
        That is done on a few samples, without dropout, and in float64 where the model computes in
        it, whatever precision= says. Twins of the model are trained; this run is as it was. Each
        rank needs room for two of them in host memory. A model of more than 1 GiB has no twins:
        it is compared as it is, on rank 0, and no pipelines are.

        Args:
            batch: entries by name, (N, ...) each with N >= 2; None takes the first of the
                training set.
        Raises:
            VerificationError: on every rank: they differ; the message names the first sublayer,
                parameter or buffer.
            ValueError: the batch has fewer than two samples.
        """
        refuse_surroundings(trains=True)
        with own_random_numbers(self.world.device), self._deployment.whole_on_rank_0():
            return self._checks.verify(batch)

    def measure(self) -> Profile:
        """Measure sublayers, optimizer and links anew, for the decisions to come. Collective."""
        with self._ready():
            return self._elastic.measure()

    def plan_request(self, num_frozen: int) -> PlanRequest:
        """Return what a decision before the coming step would ask its planner.

        Costs are those that `measure` has found.
        """
        return self._elastic.plan_request(num_frozen)

    @property
    def is_main_process(self) -> bool:
        """Return whether this process is rank 0, which decides, records and saves."""
        return self.world.is_main

    @property
    def global_step(self) -> int:
        """Return how many steps are done; of a resumed run, from `begin` on."""
        return self._timeline.position.step

    @property
    def epoch(self) -> float:
        """Return how many epochs are done, with the share of the coming one's steps."""
        return self._timeline.epochs_done(self._elastic.replicas)

    @property
    def learning_rate(self) -> float:
        """Return the last step's rate, of the first parameter group; the first's before any."""
        rate = self._last_rate
        return self._elastic.clock().learning_rate if rate is None else rate

    @property
    def max_steps(self) -> int:
        """Return how many steps the whole run has, if the global batch stays what it is."""
        return self._timeline.max_steps(self._elastic.replicas)

    @property
    def is_over(self) -> bool:
        """Return whether all steps are done, or it was stopped; if resumed, from `begin` on."""
        return self._timeline.is_over

    @property
    def measurements(self) -> Profile | None:
        """Return the measured costs that decisions rest on; None before the first step."""
        return self._elastic.profile

    @property
    def decision(self) -> Decision | None:
        """Return what holds now: frozen layers and pipeline; None before the first step."""
        return self._elastic.decision

    @property
    def _stage(self) -> Stage:
        """Return this rank's stage, another one after each transition."""
        return self._deployment.active_stage

    def _borrow_model(self) -> None:
        """Freeze the model as the last decision says, if it was given back since."""
        decision = self._elastic.decision
        if self._parts.loan.borrow() and decision is not None:
            self._deployment.freeze(decision)
        if self.world.device.type == "cpu":  # A step frees all activations, and needs them again.
            self._parts.memory.keep()

    def _give_model_back(self) -> None:
        """Leave the user's model as it came, but for its weights; see `ModelLoan`."""
        if self._timeline.is_over and self._deployment.stage is not None:
            self._deployment.stage.end_training()
        if self._timeline.is_over:  # A notebook's next Trainer may come before this one's `close`.
            self._state.unlock()
        self._return_model()

    def _return_model(self) -> None:
        self._parts.loan.give_back()
        self._parts.memory.give_back()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None = None,
        trace: object = None,
    ) -> None:
        self._is_closed = True
        self._close(failed=error_type is not None)
        if isinstance(error, KeyboardInterrupt) and not self.is_over:
            self._say_where(error)

    def close(self) -> None:
        """Wait for a checkpoint, and let go of all but rank 0's model, which stays usable."""
        self.__exit__(None)

    def _say_where(self, error: KeyboardInterrupt) -> None:
        """Have an interrupt say where it has stopped the run, as the last line of its trace."""
        if not error.args and self._elastic.have_begun:
            error.args = tuple(filter(None, [self._state.where_it_stopped()]))

    def _close(self, *, failed: bool) -> None:
        """Wait for a checkpoint, and let go of all but rank 0's model.

        After an error only this process's own things are put in order. Leaving the groups would
        end the other ranks' waits with errors, and a launcher would blame those ranks.
        """
        try:
            try:
                if not failed:
                    self._settle()
            finally:  # A checkpoint from before numbers that are not finite stays whole.
                self._state.close(failed=failed)
        finally:
            if not failed:
                self._deployment.close()
            self._parts.loan.give_back()
            self._feed.close()
            self._evaluator.close()
            self._elastic.close()
            self._log.close()
            if not failed:
                self.world.close()
            self._parts.memory.give_back()
