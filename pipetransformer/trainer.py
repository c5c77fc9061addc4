"""Train a layered model elastically: the loop that everything else serves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from autodp import gather_json
from autopipe.trace import Span, Trace
from pipetransformer.adapters import LayeredModel
from pipetransformer.data import Batch, SizedDataset, check_dataset, own_random_numbers
from pipetransformer.loss import LossFunction
from pipetransformer.measure import Measurements
from pipetransformer.optimizer import OptimizerFactory
from pipetransformer.refusals import refuse_surroundings
from pipetransformer.report import FitReport
from pipetransformer.run import Run
from pipetransformer.stage import LossSums, StepResult
from pipetransformer.transition import Decision
from pipetransformer.verification import Verification, verify


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
        optimizer: builds an optimizer over a list of (name, parameter); AdamW by default.
        freeze: a FreezePolicy or a function of a FreezeContext; None freezes nothing.
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
        freeze: Any = None,
        **settings: Any,
    ) -> None:
        self._run = run = Run(
            model,
            train_dataset,
            eval_dataset=eval_dataset,
            loss_fn=loss_fn,
            optimizer=optimizer,
            freeze=freeze,
            **settings,
        )
        self.config, self.world, self.report = run.task.config, run.world, run.log.report
        self._eval_dataset = eval_dataset
        self._trace: Trace | None = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        self._run.close(failed=error_type is not None)

    def close(self) -> None:
        """Wait for a checkpoint, and let go of all but rank 0's model, which stays usable."""
        self._run.close(failed=False)

    def fit(self) -> FitReport:
        """Train to the end, and gather the weights into rank 0's model.

        Those that do not fit on its device go into host memory, with a warning.

        Returns:
            what the run took and reached.
        """
        run = self._run
        refuse_surroundings(trains=True)
        run.begin()
        while not self.is_over:
            self.step()
        run.log.checkpoint(run.state.finish())
        run.deployment.gather_weights(run.deployment.roomy_device())
        return self.report

    def step(self) -> StepResult:
        """Train on the next global batch; decide before it, evaluate and save after it, where due.

        Returns:
            the loss and more of the training step alone.
        Raises:
            RuntimeError: the run is over.
            ValueError: before the first step: another run trains in the folder, or what it holds
                cannot be continued.
        """
        with own_random_numbers(self.world.device):
            return self._step()

    def trace_step(self) -> Trace:
        """Train on the next global batch, as `step` does, and take down what ran when. Collective.

        Returns:
            what the first pipeline's stages did, on every rank.
        """
        self._trace = Trace()
        try:
            self.step()
            topology = self._run.deployment.active_stage.topology
            is_first = topology.replica_of(self.world.rank) == 0
            spans = [span.to_json() for span in self._trace.spans] if is_first else []
        finally:
            self._trace = None
        gathered = gather_json(spans, group=self.world.group)
        return Trace.of(Span.from_json(span) for spans in gathered for span in spans)

    def evaluate(self, dataset: SizedDataset | None = None) -> dict[str, float]:
        """Return loss and metrics over a dataset, the eval_dataset by default. Collective.

        Raises:
            ValueError: there is no dataset to evaluate.
        """
        dataset = self._eval_dataset if dataset is None else dataset
        if dataset is None:
            raise ValueError(
                "there is no eval_dataset; give one to Trainer, or a dataset to evaluate"
            )
        check_dataset(dataset, "dataset")
        refuse_surroundings(trains=False)
        run, sums = self._run, LossSums()
        with own_random_numbers(self.world.device):
            run.begin()
            own = run.evaluation_feed
            feed = own if own and own.dataset is dataset else run.feed_of(dataset, once=True)
            feed.follow_prefix()
            rows = feed.rows(0, is_last=self.is_over or feed is not own)
            run.deployment.active_stage.evaluate(len(dataset), rows, sums)
            if feed is not own:
                feed.close()
        return LossSums.joined(gather_json(sums.totals, group=self.world.group)).means()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state under its own names on rank 0, {} elsewhere. Collective.

        Until the run is over these are copies in host memory, as training goes on with its own.
        """
        refuse_surroundings(trains=False)
        run, deployment = self._run, self._run.deployment
        run.begin()
        if not self.is_over:
            return deployment.copy_weights()
        deployment.gather_weights(deployment.roomy_device())
        return dict(run.task.model.model.state_dict()) if self.world.is_main else {}

    def save_model(self, path: str | Path) -> None:
        """Write the weights as one safetensors file under the model's own names. Collective."""
        state = self.state_dict()
        if self.world.is_main:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            safetensors.torch.save_file(
                {name: t.detach().cpu().contiguous().clone() for name, t in state.items()}, path
            )

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
        run, task = self._run, self._run.task
        with run.deployment.whole_on_rank_0(), own_random_numbers(self.world.device):
            batch = run.first_samples() if batch is None else batch
            return verify(
                task, self.world, model=task.model, loss_fn=run.given_loss_fn, batch=batch
            )

    def measure(self) -> Measurements:
        """Measure sublayers, optimizer and links anew, for the decisions to come. Collective."""
        refuse_surroundings(trains=False)
        self._run.begin()
        return self._run.transitions.measure()

    @property
    def is_main_process(self) -> bool:
        """Tell whether this process is rank 0, which decides, records and saves."""
        return self.world.is_main

    @property
    def global_step(self) -> int:
        """Return how many steps are done."""
        return self._run.timeline.position.step

    @property
    def max_steps(self) -> int:
        """Return how many steps the whole run has, if the global batch stays what it is."""
        return self._run.timeline.max_steps(self._run.transitions.replicas)

    @property
    def is_over(self) -> bool:
        """Tell whether all epochs are done."""
        return self._run.timeline.is_over

    @property
    def measurements(self) -> Measurements | None:
        """Return what decisions are based on; None before the first step."""
        transitions = self._run.transitions
        return transitions.decider.planner.measurements if transitions.have_begun else None

    @property
    def decision(self) -> Decision | None:
        """Return what holds now: frozen layers and pipeline; None before the first step."""
        transitions = self._run.transitions
        return transitions.decider.current if transitions.have_begun else None

    def _step(self) -> StepResult:
        refuse_surroundings(trains=True)
        run, timeline = self._run, self._run.timeline
        run.begin()
        if timeline.is_over:
            raise RuntimeError(
                f"all {self.config.epochs} epochs are done; give a larger epochs= to go on"
            )
        run.decide_if_due()
        ids, next_ids = run.batches()
        stage, clock = run.deployment.active_stage, run.transitions.clock()
        if self._trace is not None:
            stage.recorder = self._trace.recorder(stage.index, device=self.world.device)
        result = stage.train_step(
            ids,
            run.feed.rows(clock.epoch, is_last=timeline.sees_samples_last),
            step=clock.step,
            next_ids=next_ids,
            learning_rate_factor=timeline.learning_rate_factor(run.transitions.replicas),
        )
        stage.recorder = None
        run.note_step(result, clock, len(ids))
        timeline.advance(len(ids))
        if timeline.at_epoch_start:
            self._end_epoch()
        run.log.checkpoint(run.state.save_if_due())
        return result

    def _end_epoch(self) -> None:
        """Record and evaluate after an epoch."""
        log, position = self._run.log, self._run.timeline.position
        log.epoch(position.step, position.epoch)
        if self._eval_dataset is not None and self._run.timeline.evaluation_due():
            start = time.perf_counter()
            metrics = self.evaluate()
            seconds = time.perf_counter() - start
            log.evaluation(position.step, position.epoch, metrics, seconds)
