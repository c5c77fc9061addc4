"""Say which samples the coming steps train on."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch import distributed as dist

from autodp import EpochSampler, checked_order, gather_json, shuffled, shuffled_by_length
from pipetransformer.feed.samples import SizedDataset, read_lengths
from pipetransformer.feed.timeline import Timeline
from pipetransformer.model import Task

_MOST_STEPS_A_STREAM = 64
"""So that results keep coming."""


@dataclass(frozen=True)
class ComingStep:
    """Say what is trained on in a step.

    Args:
        ids: (B,) int64, the whole global batch.
        starts_epoch: whether it is the epoch's first step.
        learning_rate_factor: on the rate of each parameter group as it was built.
    """

    ids: Tensor
    step: int
    epoch: int
    starts_epoch: bool
    learning_rate_factor: float


class BatchForecast:
    """Cut a data set's epochs into global batches, from where the run is."""

    def __init__(self, task: Task, dataset: SizedDataset, timeline: Timeline) -> None:
        config, num = task.config, len(dataset)
        if config.sample_order is not None:
            order = checked_order(num, config.sample_order)
        elif config.group_by_length:
            lengths = read_lengths(dataset, task.model.inputs[0])
            order = shuffled_by_length(
                lengths, seed=config.seed, batch_size=config.global_batch_size
            )
        else:
            order = shuffled(num, seed=config.seed)
        self._is_given = config.sample_order is not None
        self._sampler, self._timeline = EpochSampler(num, order), timeline

    def next_two(self, replicas: int) -> tuple[ComingStep, Tensor | None]:
        """Return the coming step, and the next one's samples unless a pause comes before it."""
        timeline, position = self._timeline, self._timeline.position
        size = timeline.global_batch(replicas)
        ids = self._sampler.global_batch(position.epoch, position.sample, size)
        coming = _coming(ids, timeline, replicas)
        sample = position.sample + len(ids)
        # Behind an epoch's end or a decision this rank may be given other samples.
        if sample >= timeline.num_samples or timeline.decision_follows():
            return coming, None
        return coming, self._sampler.global_batch(position.epoch, sample, size)

    def to_next_pause(self, replicas: int, review_step: int | None) -> list[ComingStep]:
        """Return the steps up to the next pause whose batches have one size.

        Args:
            review_step: a step before which the plan is reviewed, which is a pause, too.
        """
        ahead = self._timeline.ahead()
        steps: list[ComingStep] = []
        while len(steps) < _MOST_STEPS_A_STREAM:
            at = ahead.position
            if steps and (ahead.pauses or at.step == review_step):
                break
            ids = self._sampler.global_batch(at.epoch, at.sample, ahead.global_batch(replicas))
            if steps and len(ids) != len(steps[0].ids):
                break
            steps.append(_coming(ids, ahead, replicas))
            ahead.advance(len(ids))
        return steps

    def to_the_end(self, replicas: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the epoch and the samples of the coming step and of all after it."""
        # Another thread reads ahead, maybe in the next epoch, and a sampler holds one epoch alone.
        sampler, ahead = copy.copy(self._sampler), self._timeline.ahead()
        while not ahead.is_over:
            at = ahead.position
            ids = sampler.global_batch(at.epoch, at.sample, ahead.global_batch(replicas))
            yield at.epoch, ids
            ahead.advance(len(ids))

    def refuse_other_orders(self, group: dist.ProcessGroup | None) -> None:
        """Raise a ValueError where ranks were given different orders. Collective."""
        if not self._is_given:
            return
        order = self._sampler.global_batch(0, 0, self._timeline.num_samples)
        if len(set(gather_json(_hash(order), group=group))) > 1:
            raise ValueError(
                "sample_order gives ranks other orders, so that samples would be left out; let it "
                "depend on nothing but the epoch"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return a hash of the samples that the current epoch has trained on."""
        at = self._timeline.position
        if at.sample == 0:
            return {"seen": ""}
        return {"seen": _hash(self._sampler.global_batch(at.epoch, 0, at.sample))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError if the epoch would go on in another order, and miss samples."""
        if state != self.state_dict():
            raise ValueError(
                f"{self._timeline.position.sample} samples of the epoch were trained on in "
                "another order, so that others would be left out: resume with the sample_order, "
                "group_by_length and, where that is set, global_batch_size of the save, or from "
                "the end of an epoch"
            )


def _coming(ids: Tensor, timeline: Timeline, replicas: int) -> ComingStep:
    at, factor = timeline.position, timeline.learning_rate_factor(replicas)
    return ComingStep(ids, at.step, at.epoch, timeline.at_epoch_start, factor)


def _hash(ids: Tensor) -> str:
    return hashlib.sha256(ids.numpy().data).hexdigest()
