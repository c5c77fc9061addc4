"""Choose the model that a run ends with: of its best evaluation, or of its last step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import final

from pipetransformer.config import TrainConfig
from pipetransformer.model_files import BestModel
from pipetransformer.position import Timeline
from pipetransformer.processes import World, on_rank_0, told_by_rank_0
from pipetransformer.report import FitReport
from pipetransformer.transition import Deployment

_LOGGER = logging.getLogger(__name__)


@final
class Selection:
    """Follow a run's evaluations; all of it is collective.

    Attributes:
        best: which evaluation was the best; it saves itself into checkpoints.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        *,
        deployment: Deployment,
        timeline: Timeline,
        report: FitReport,
    ) -> None:
        self.best = BestModel(config)
        self._keeps_weights = config.load_best_model_at_end
        self._world, self._deployment = world, deployment
        self._timeline, self._report = timeline, report

    def take_up(self) -> None:
        """Go on from a checkpoint's best evaluation, if its weights are still as written."""
        why_lost = ""
        if self._keeps_weights:
            why_lost = told_by_rank_0(self.best.why_lost, group=self._world.group)
        if why_lost:
            if self._world.is_main:
                text = "%s. The best is looked for among the evaluations to come"
                _LOGGER.warning(text, why_lost)
            self.best.forget()
        self._note()  # Of another metric than the checkpoint's there is no best yet.
        self._stop_without_patience()

    def judge(self, metrics: Mapping[str, float]) -> None:
        """Take an evaluation in: keep the best one's weights, and end without improvement."""
        best, step = self.best, self._timeline.position.step
        former = best.value, best.step
        if best.note(metrics, step) and self._keeps_weights:
            state = self._deployment.copy_weights()
            try:
                on_rank_0(lambda: best.write(state), group=self._world.group)
            except OSError as error:
                best.value, best.step = former
                if self._world.is_main:
                    text = "the weights of step %d, the best so far, cannot be kept: %s"
                    _LOGGER.warning(text, step, error)
        self._note()
        self._stop_without_patience()

    def put_best_weights(self) -> None:
        """Go back to the weights of the best evaluation, if that is asked for."""
        if self._keeps_weights and self.best.step is not None:
            weights = on_rank_0(self.best.read, group=self._world.group)
            self._deployment.put_weights(weights or {})

    def _note(self) -> None:
        self._report.best_metric, self._report.best_step = self.best.value, self.best.step

    def _stop_without_patience(self) -> None:
        if self.best.is_out_of_patience:
            self._timeline.stop()
