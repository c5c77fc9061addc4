"""Tell the best of a run's evaluations, and keep the weights that it was of.

evaluation    loss   best   without improvement
step  100     0.9    0.9            0
step  200     0.7    0.7            0
step  300     0.8    0.7            1
step  400     0.7    0.7            2             early_stopping_patience=2 ends the run
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from torch import Tensor

from freeze.policies import metric_sign
from pipetransformer.config import TrainConfig
from pipetransformer.durable_files import read_tensors, replace_tensors
from pipetransformer.elastic import Deployment
from pipetransformer.errors import CorruptCheckpointError
from pipetransformer.processes import World, on_rank_0, told_by_rank_0

_LOGGER = logging.getLogger(__name__)

BEST_FOLDER = "best"
_OWN_FILE = re.compile(r"step-\d{8,}\.safetensors(\.tmp)?")


@final
class BestModel:
    """Follow a metric from evaluation to evaluation; all ranks see the same and find the same.

    Files are named by their step: a run that goes on from an older checkpoint must find the best
    of that time, and not one of steps that it takes again.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._name = config.metric_for_best_model
        self._sign = metric_sign(self._name, config.greater_is_better)
        self._threshold = config.early_stopping_threshold
        self._patience = config.early_stopping_patience
        self._folder = None if config.folder is None else Path(config.folder) / BEST_FOLDER
        self.value: float | None = None
        self.step: int | None = None
        self._num_without = 0
        self._step_of_checkpoint: int | None = None

    @property
    def is_out_of_patience(self) -> bool:
        """Tell whether as many evaluations as allowed brought no improvement."""
        return self._patience is not None and self._num_without >= self._patience

    def note(self, metrics: Mapping[str, float], step: int) -> bool:
        """Take the evaluation after a step in; tell whether it is the best so far.

        Raises:
            ValueError: it has no such metric.
        """
        if self._name not in metrics:
            raise ValueError(
                f"metric_for_best_model is {self._name!r}, but an evaluation has "
                f"{', '.join(sorted(metrics)) or 'no metrics'}; choose one of them, or add it by "
                "compute_metrics="
            )
        value = metrics[self._name]
        gain = math.inf if self.value is None else self._sign * (value - self.value)
        # Also false for what is not a number.
        is_best = not math.isnan(value) and gain > 0
        self._num_without = 0 if is_best and gain > self._threshold else self._num_without + 1
        if is_best:
            self.value, self.step = value, step
        return is_best

    def write(self, state: Mapping[str, Tensor]) -> None:
        """Keep the weights of the best evaluation, and those that the last checkpoint asks for."""
        path = self._path()
        replace_tensors(path, state)
        kept = {path, self._path(self._step_of_checkpoint)}
        for other in path.parent.iterdir():
            if other not in kept and _OWN_FILE.fullmatch(other.name) and other.is_file():
                other.unlink()

    def read(self) -> dict[str, Tensor]:
        """Return the weights of the best evaluation, in host memory.

        Raises:
            CorruptCheckpointError: the file is gone, or not what was written.
        """
        try:
            return read_tensors(self._path())
        except (OSError, ValueError) as error:
            raise CorruptCheckpointError(
                f"the weights of step {self.step}, the best, cannot be read: {error}; put back a "
                "copy of that file and resume, or train with load_best_model_at_end=False, which "
                "ends with the weights of the last step"
            ) from error

    def why_lost(self) -> str:
        """Say why the weights of the best evaluation so far are of no use; "" where they are."""
        try:
            if self.step is not None:
                self.read()
        except CorruptCheckpointError as error:
            return str(error)
        return ""

    def forget(self) -> None:
        """Begin anew with the next evaluation."""
        self.value, self.step = None, None

    def state_dict(self) -> dict[str, Any]:
        """Return what is known so far, as plain values; for a checkpoint."""
        self._step_of_checkpoint = self.step
        return {
            "metric": [self._name, self._sign],
            "value": self.value,
            "step": self.step,
            "num_without": self._num_without,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; the best of another metric says nothing about this one."""
        if state["metric"] == [self._name, self._sign]:
            self.value, self.step = state["value"], state["step"]
            self._num_without = state["num_without"]
            self._step_of_checkpoint = self.step

    def _path(self, step: int | None = None) -> Path:
        """Return the file of the best evaluation, or of an earlier one after a step."""
        assert self._folder is not None
        return self._folder / f"step-{step or self.step or 0:08d}.safetensors"


@final
class Selection:
    """Follow a run's evaluations; all of it is collective.

    Attributes:
        best: which evaluation was the best; it saves itself into checkpoints.
    """

    def __init__(self, config: TrainConfig, world: World, deployment: Deployment) -> None:
        self.best = BestModel(config)
        self._keeps_weights = config.load_best_model_at_end
        self._world, self._deployment = world, deployment

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

    def judge(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the evaluation after a step in, and keep the best one's weights."""
        best = self.best
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

    def put_best_weights(self) -> None:
        """Go back to the weights of the best evaluation, if that is asked for."""
        if self._keeps_weights and self.best.step is not None:
            weights = on_rank_0(self.best.read, group=self._world.group)
            self._deployment.put_weights(weights or {})
