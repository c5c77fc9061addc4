"""Keep a run's position, and derive from it what is due, lengths and learning rates."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

from pipetransformer.config import TrainConfig, named_schedule


@dataclass
class Position:
    """Say how far a run has come: steps and epochs done, and samples of the current epoch."""

    step: int = 0
    epoch: int = 0
    sample: int = 0


@dataclass(frozen=True)
class Clock:
    """Describe the coming step; lengths are at the current batch size.

    Args:
        learning_rate, peak_learning_rate: of the first parameter group, now and at a factor of 1,
            before layer_decay.
    """

    step: int
    epoch: int
    max_steps: int
    steps_per_epoch: int
    learning_rate: float
    peak_learning_rate: float


class Timeline:
    """Advance a position through the epochs of a training set.

    Args:
        peak_learning_rate: of the first parameter group, at a factor of 1.
    """

    def __init__(self, config: TrainConfig, num_samples: int, peak_learning_rate: float) -> None:
        self._config = config
        self.num_samples = num_samples
        self._peak_learning_rate = peak_learning_rate
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
        """Return whether all epochs or steps are done, or `stop` has ended the run."""
        return self._is_complete or (self._end is not None and self.position.step >= self._end)

    @property
    def _is_complete(self) -> bool:
        most = self._config.max_steps
        done = most is not None and self.position.step >= most
        return done or self.position.epoch >= self._config.epochs

    def stop(self) -> None:
        """End the run; after the last trained step where a stream has trained steps ahead."""
        if self._end is None:
            self._end = max(self.position.step, self._num_trained)

    def note_trained(self, step: int) -> None:
        """Note that a stream has trained all steps up to this one already."""
        self._num_trained = step + 1

    @property
    def at_epoch_start(self) -> bool:
        """Return whether the coming step is an epoch's first."""
        return self.position.sample == 0

    def decision_due(self, last_decision_step: int) -> bool:
        """Return whether a decision precedes the coming step."""
        # A checkpoint may have been written right after the decision, which a resume has, too.
        if last_decision_step == self.position.step:
            return False
        interval = self._decision_interval
        epochs = self._config.freeze_interval_epochs if interval is None else 0
        return self._comes_round(interval or 0, epochs)

    @property
    def pauses(self) -> bool:
        """Return whether something comes between the last step and the coming one."""
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
        other.position = replace(self.position)  # `copy` shares it, and `advance` writes into it.
        return other

    def decision_follows(self) -> bool:
        """Return whether a decision precedes the step after the coming one, in the same epoch."""
        interval = self._decision_interval
        return interval is not None and (self.position.step + 1) % interval == 0

    @property
    def sees_samples_last(self) -> bool:
        """Return whether no later epoch sees this epoch's samples in the same view."""
        last, position, most = self._config.epochs, self.position, self._config.max_steps
        if most is not None:
            size, per_epoch = self._config.global_batch_size, self._unscaled_per_epoch
            to_come = -(-position.sample // size) + most - position.step
            last = min(last, position.epoch + -(-to_come // per_epoch))
        # Views take turns: an epoch's view comes again cache_views epochs later.
        return position.epoch + (self._config.cache_views or 1) >= last

    def save_due(self) -> bool:
        """Return whether to save after the last step; always at the end."""
        config = self._config
        steps, epochs = config.checkpoint_every_steps, config.checkpoint_every_epochs
        return self.is_over or self._comes_round(steps, epochs)

    def evaluation_due(self) -> bool:
        """Return whether an evaluation follows the last step; always at a complete run's end."""
        steps, epochs = self._config.evaluate_every_steps, self._config.evaluate_every_epochs
        return self._comes_round(steps, epochs) or (steps + epochs > 0 and self._is_complete)

    def _comes_round(self, steps: int, epochs: int) -> bool:
        """Return whether steps or epochs done are a multiple of an interval; 0 is never."""
        at = self.position
        by_epochs = epochs > 0 and self.at_epoch_start and at.epoch % epochs == 0
        return by_epochs or (steps > 0 and at.step % steps == 0)

    def global_batch(self, replicas: int) -> int:
        return self._config.global_batch(replicas)

    def epochs_done(self, replicas: int) -> float:
        """Return the epochs done, and the share of the coming one's steps, at their size now."""
        position, size = self.position, self.global_batch(replicas)
        # Earlier batches may have had other sizes, so the share is known from what is left.
        per_epoch = self._steps_per_epoch(size)
        left = -(-(self.num_samples - position.sample) // size)
        return position.epoch + (per_epoch - left) / per_epoch

    def max_steps(self, replicas: int) -> int:
        """Return the steps of the whole run, if the batch size stays what it is."""
        if self.is_over:
            return self.position.step
        by_epochs = self._end_of_epochs(self.global_batch(replicas))
        return min(by_epochs, self._config.max_steps or by_epochs)

    def learning_rate_factor(self, replicas: int) -> float:
        """Return the factor on the learning rates in the coming step.

        The schedule is evaluated where batches of global_batch_size would be, and the factor grows
        with the batch.
        """
        size = self._config.global_batch_size
        step: float = self.position.step
        # Where epochs end the run, its share that is done is that of samples, not of steps.
        if not self._ends_by_steps:
            step = self.position.epoch * self._unscaled_per_epoch + self.position.sample / size
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
        return -(-self.num_samples // size)  # The last batch may be smaller.

    def _end_of_epochs(self, size: int) -> int:
        """Return the step after which all epochs are done, in batches of a size from now on."""
        position = self.position
        this_epoch = -(-(self.num_samples - position.sample) // size)
        epochs_after = self._config.epochs - position.epoch - 1
        return position.step + this_epoch + epochs_after * self._steps_per_epoch(size)

    @property
    def _ends_by_steps(self) -> bool:
        """Return whether max_steps ends the run before its epochs do."""
        most = self._config.max_steps
        return most is not None and most < self._end_of_epochs(self._config.global_batch_size)

    @property
    def _unscaled_steps(self) -> int:
        """Return the steps of the whole run in batches of global_batch_size."""
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
        return Clock(
            self.position.step,
            self.position.epoch,
            self.max_steps(replicas),
            self._steps_per_epoch(self.global_batch(replicas)),
            self._peak_learning_rate * self.learning_rate_factor(replicas),
            self._peak_learning_rate,
        )

    def advance(self, num_samples: int) -> None:
        """Note that a step over `num_samples` samples is done."""
        self.position.step += 1
        self.position.sample += num_samples
        if self.position.sample >= self.num_samples:
            self.position.epoch, self.position.sample = self.position.epoch + 1, 0
