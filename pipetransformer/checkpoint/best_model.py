"""Find the best of a run's evaluations, and keep its weights.

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
    """Follow a metric from evaluation to evaluation; all ranks get the same metrics.

    Files are named by their step. A run that goes back to an older checkpoint needs the best
    weights of that time, not those of a step that it takes again.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.name = config.metric_for_best_model
        self._sign = metric_sign(self.name, config.greater_is_better)
        self._threshold = config.early_stopping_threshold
        self._patience = config.early_stopping_patience
        self._folder = None if config.folder is None else Path(config.folder) / BEST_FOLDER
        self.value: float | None = None
        self.step: int | None = None
        self._num_without = 0
        self._step_of_checkpoint: int | None = None

    @property
    def is_out_of_patience(self) -> bool:
        return self._patience is not None and self._num_without >= self._patience

    def note(self, metrics: Mapping[str, float], step: int) -> bool:
        """Record the evaluation after a step; return whether it is the best so far.

        Raises:
            ValueError: the metric is missing.
        """
        if self.name not in metrics:
            raise ValueError(
                f"metric_for_best_model is {self.name!r}, but an evaluation has "
                f"{', '.join(sorted(metrics)) or 'no metrics'}; choose one of them, or add it by "
                "compute_metrics="
            )
        value = metrics[self.name]
        gain = math.inf if self.value is None else self._sign * (value - self.value)
        is_best = not math.isnan(value) and gain > 0
        # The threshold is for patience alone: a smaller gain is still the best.
        self._num_without = 0 if is_best and gain > self._threshold else self._num_without + 1
        if is_best:
            self.value, self.step = value, step
        return is_best

    def write(self, state: Mapping[str, Tensor]) -> None:
        """Write the weights of the best evaluation, and delete files that are no longer needed."""
        path = self._path()
        replace_tensors(path, state)
        # A resume from the last checkpoint asks for the weights that were best then.
        needed = {path, self._path(self._step_of_checkpoint)}
        for other in path.parent.iterdir():
            if other not in needed and _OWN_FILE.fullmatch(other.name) and other.is_file():
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
        """Return why the best evaluation's weights cannot be read, "" if they can."""
        try:
            if self.step is not None:
                self.read()
        except CorruptCheckpointError as error:
            return str(error)
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint, whose best weights `write` keeps from now on."""
        self._step_of_checkpoint = self.step
        return {
            "metric": [self.name, self._sign],
            "value": self.value,
            "step": self.step,
            "num_without": self._num_without,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, if that followed the same metric."""
        if state["metric"] == [self.name, self._sign]:
            self.value, self.step = state["value"], state["step"]
            self._num_without = state["num_without"]
            self._step_of_checkpoint = self.step

    def _path(self, step: int | None = None) -> Path:
        """Return the file of a step's evaluation; None is the best's."""
        assert self._folder is not None
        return self._folder / f"step-{step or self.step or 0:08d}.safetensors"


@final
class Selection:
    """Follow a run's evaluations and keep the best weights; all methods are collective."""

    def __init__(self, config: TrainConfig, world: World, deployment: Deployment) -> None:
        self.best = BestModel(config)
        self._keeps_weights = config.load_best_model_at_end
        self._world, self._deployment = world, deployment
        self._why_lost, self._has_warned = "", False

    def forget_if_lost(self) -> None:
        """Forget a checkpoint's best evaluation if its weights can no longer be read."""
        if not self._keeps_weights:
            return
        self._why_lost = told_by_rank_0(self.best.why_lost, group=self._world.group)
        if self._why_lost:
            if self._world.is_main:
                text = "%s. The best is looked for among the evaluations to come"
                _LOGGER.warning(text, self._why_lost)
            self.best.value, self.best.step = None, None

    def judge(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the evaluation after a step, and write its weights if it is the best."""
        best = self.best
        former = best.value, best.step
        is_nan = math.isnan(metrics.get(best.name, 0.0))
        if self._world.is_main and not self._has_warned and is_nan:
            self._has_warned = True
            _LOGGER.warning(
                "%s is NaN in the evaluation after step %d, and such a one is never the best; a "
                "run without any other ends with its last weights",
                best.name,
                step,
            )
        if best.note(metrics, step) and self._keeps_weights:
            state = self._deployment.copy_weights(movable=True)
            try:
                on_rank_0(lambda: best.write(state), group=self._world.group)
            except OSError as error:
                # On every rank, as `on_rank_0` agrees: all forget it alike.
                best.value, best.step = former
                if self._world.is_main:
                    text = "the weights of step %d, the best so far, cannot be kept: %s"
                    _LOGGER.warning(text, step, error)

    def put_best_weights(self) -> None:
        """Put the best evaluation's weights into the model, if the config asks for that.

        Raises:
            CorruptCheckpointError: they cannot be read, or were lost before a resume after which
                no evaluation came.
        """
        if self._why_lost and self.best.step is None:
            raise CorruptCheckpointError(self._why_lost)
        if self._keeps_weights and self.best.step is not None:
            weights = on_rank_0(self.best.read, group=self._world.group)
            self._deployment.put_weights(weights or {})
