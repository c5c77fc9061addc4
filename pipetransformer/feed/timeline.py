"""Keep a run's position, and derive batch size, steps to come and learning rate from it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipetransformer.config import TrainConfig, named_schedule


@dataclass
class Position:
    """Say how far a run has come: steps and epochs done, and samples of the coming epoch."""

    step: int = 0
    epoch: int = 0
    sample: int = 0


@dataclass(frozen=True)
class Clock:
    """Say where in the run a decision is taken.

    Args:
        step, epoch: of the coming step.
        max_steps, steps_per_epoch: lengths at the current batch size.
        learning_rate, peak_learning_rate: of the first parameter group as the user's optimizer
            has it, now and at a factor of 1; layer_decay lowers it in lower layers.
    """

    step: int
    epoch: int
    max_steps: int
    steps_per_epoch: int
    learning_rate: float
    peak_learning_rate: float


class Timeline:
    """Advance a position through the epochs of a training set of so many samples.

    The peak learning rate is the first parameter group's, at a factor of 1.

    Args:
        scale_of: returns a layer's rate over the peak rate at a share of the run, None where the
            run's schedule says it; the layer None is the head.
    """

    def __init__(
        self,
        config: TrainConfig,
        num_samples: int,
        peak_learning_rate: float,
        scale_of: Callable[[int | None, float], float | None] = lambda layer, done: None,
    ) -> None:
        self._config = config
        self.num_samples = num_samples
        self._peak_learning_rate = peak_learning_rate
        self._scale_of = scale_of
        schedule = config.learning_rate_schedule
        if isinstance(schedule, str):
            schedule = named_schedule(
                schedule, warmup=config.warmup, learning_rate=peak_learning_rate
            )
        self._schedule = schedule
        self.position = Position()
        self._num_trained = 0
        self._end: int | None = None

    @property
    def is_over(self) -> bool:
        """Tell whether all epochs or steps are done, or the run has come to where it stops."""
        return self._is_complete or (self._end is not None and self.position.step >= self._end)

    @property
    def _is_complete(self) -> bool:
        most = self._config.max_steps
        done = most is not None and self.position.step >= most
        return done or self.position.epoch >= self._config.epochs

    def stop(self) -> None:
        """End the run where it is, or where weights are already; called on all ranks alike."""
        if self._end is None:
            self._end = max(self.position.step, self._num_trained)

    def note_trained(self, step: int) -> None:
        """Take note that weights have seen a step already, as several are trained at once."""
        self._num_trained = step + 1

    @property
    def at_epoch_start(self) -> bool:
        """Tell whether the coming step is an epoch's first."""
        return self.position.sample == 0

    def decision_due(self, last_decision_step: int) -> bool:
        """Tell whether a decision precedes the coming step; a function of the step number alone.

        A checkpoint may have been written after the last one, which is not taken twice.
        """
        if last_decision_step == self.position.step:
            return False
        interval = self._decision_interval
        epochs = self._config.freeze_interval_epochs if interval is None else 0
        return self._comes_round(interval or 0, epochs)

    @property
    def pauses(self) -> bool:
        """Tell whether something comes between the last step and the coming one."""
        return (
            self.is_over
            or self.at_epoch_start
            or self.save_due()
            or self.evaluation_due()
            or self.decision_due(-1)
        )

    def ahead(self) -> Timeline:
        """Return a timeline that can be advanced by itself."""
        other = copy.copy(self)
        other.position = replace(self.position)
        return other

    def decision_follows(self) -> bool:
        """Tell whether a decision precedes the step after the coming one, in the same epoch."""
        interval = self._decision_interval
        return interval is not None and (self.position.step + 1) % interval == 0

    @property
    def sees_samples_last(self) -> bool:
        """Tell whether the samples of this epoch are not seen again as they are now."""
        last, position, most = self._config.epochs, self.position, self._config.max_steps
        if most is not None:
            size, per_epoch = self._config.global_batch_size, self._unscaled_per_epoch
            to_come = -(-position.sample // size) + most - position.step
            last = min(last, position.epoch + -(-to_come // per_epoch))
        return position.epoch + (self._config.cache_views or 1) >= last

    def save_due(self) -> bool:
        """Tell whether the state after the last step is to be saved: at the end it always is."""
        config = self._config
        steps, epochs = config.checkpoint_every_steps, config.checkpoint_every_epochs
        return self.is_over or self._comes_round(steps, epochs)

    def evaluation_due(self) -> bool:
        """Tell whether an evaluation follows the last step; that of the end is not left out."""
        steps, epochs = self._config.evaluate_every_steps, self._config.evaluate_every_epochs
        return self._comes_round(steps, epochs) or (steps + epochs > 0 and self._is_complete)

    def _comes_round(self, steps: int, epochs: int) -> bool:
        """Tell whether a multiple of so many steps, or of so many epochs, is done; 0 is never."""
        at = self.position
        by_epochs = epochs > 0 and self.at_epoch_start and at.epoch % epochs == 0
        return by_epochs or (steps > 0 and at.step % steps == 0)

    def global_batch(self, replicas: int) -> int:
        """Return the samples of a step at a number of replicas."""
        return self._config.global_batch(replicas)

    def epochs_done(self, replicas: int) -> float:
        """Return the epochs done, and the share of the coming one's steps, at their size now."""
        position, size = self.position, self.global_batch(replicas)
        # Batches of other sizes may have come before: what is left says whether the epoch is done.
        per_epoch = self._steps_per_epoch(size)
        left = -(-(self.num_samples - position.sample) // size)
        return position.epoch + (per_epoch - left) / per_epoch

    def max_steps(self, replicas: int) -> int:
        """Return the steps of the whole run, if the batch size stays what it is."""
        if self.is_over:
            return self.position.step
        by_epochs = self._end_of_epochs(self.global_batch(replicas))
        return min(by_epochs, self._config.max_steps or by_epochs)

    def learning_rate_factor(self, replicas: int, layer: int | None = None) -> float:
        """Evaluate the schedule where an unscaled batch would stand, and scale with the batch.

        Args:
            replicas: how many pipelines train.
            layer: whose; None is the head.
        """
        size = self._config.global_batch_size
        step: float = self.position.step
        # Where the epochs end the run, steps done in batches of another size say nothing of it.
        if not self._ends_by_steps:
            step = self.position.epoch * self._unscaled_per_epoch + self.position.sample / size
        factor = self._scale_of(layer, step / self._unscaled_steps)
        if factor is None:
            factor = self._schedule(step, self._unscaled_steps)
            if not math.isfinite(factor):
                raise ValueError(
                    f"the learning_rate_schedule gives {factor} for step {step:g} of "
                    f"{self._unscaled_steps}; let it return finite numbers"
                )
        return factor * self.global_batch(replicas) / size

    @property
    def _unscaled_per_epoch(self) -> int:
        return self._steps_per_epoch(self._config.global_batch_size)

    def _steps_per_epoch(self, size: int) -> int:
        """Return the steps of an epoch in batches of so many samples, the last one's fewer."""
        return -(-self.num_samples // size)

    def _end_of_epochs(self, size: int) -> int:
        """Return the step after which all epochs are done, in batches of so many samples."""
        position = self.position
        this_epoch = -(-(self.num_samples - position.sample) // size)
        epochs_after = self._config.epochs - position.epoch - 1
        return position.step + this_epoch + epochs_after * self._steps_per_epoch(size)

    @property
    def _ends_by_steps(self) -> bool:
        """Tell whether max_steps ends the run before its epochs do."""
        most = self._config.max_steps
        return most is not None and most < self._end_of_epochs(self._config.global_batch_size)

    @property
    def _unscaled_steps(self) -> int:
        """Return the steps of the whole run, if its batch had always been global_batch_size."""
        whole, most = self._unscaled_per_epoch * self._config.epochs, self._config.max_steps
        return most if most is not None and self._ends_by_steps else whole

    @property
    def _decision_interval(self) -> int | None:
        """Return the steps between decisions; None where they follow epochs."""
        share = self._config.freeze_interval_share
        if share is not None:
            return max(1, round(share * self._unscaled_steps))
        return self._config.freeze_interval_steps

    def clock(self, replicas: int) -> Clock:
        """Describe the coming step, at the present batch size."""
        return Clock(
            self.position.step,
            self.position.epoch,
            self.max_steps(replicas),
            self._steps_per_epoch(self.global_batch(replicas)),
            self._peak_learning_rate * self.learning_rate_factor(replicas),
            self._peak_learning_rate,
        )

    def advance(self, num_samples: int) -> None:
        """Note that a step over so many samples is done."""
        self.position.step += 1
        self.position.sample += num_samples
        if self.position.sample >= self.num_samples:
            self.position.epoch, self.position.sample = self.position.epoch + 1, 0
