"""Say which samples the coming steps train on.

A sample's row lies on the node that has computed it, or in the memory of one GPU. Elsewhere it
would be computed again. So on several nodes, and on several GPUs, a sample keeps its place in a
batch::

    4 processes on 2 nodes      batch of 8       epoch 0       epoch 1
    2 replicas of 2 stages      0000 1111        node 0: the samples of places 0 to 3
    4 replicas                  00 11 22 33      node 1: those of places 4 to 7
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch import distributed as dist

from autodp import (
    EpochSampler,
    checked_order,
    gather_json,
    places_in_batches,
    shuffled,
    shuffled_by_length,
    shuffled_in_place,
)
from pipetransformer.config import TrainConfig
from pipetransformer.feed.samples import SizedDataset, read_lengths
from pipetransformer.feed.timeline import Timeline
from pipetransformer.model import Task
from pipetransformer.processes import World

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
    """Cut a data set's epochs into global batches, from where the run is.

    Attributes:
        keeps_places: whether each sample keeps its place in a batch.
    """

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
        self._config, self._is_given = config, config.sample_order is not None
        self._usual, self._timeline = order, timeline
        self.keep_places(keeps=False)

    def keep_places(self, *, keeps: bool) -> None:
        """Say whether each sample keeps its place in a batch; see `shuffled_in_place`."""
        config, num, order = self._config, self._timeline.num_samples, self._usual
        if keeps:
            unit = config.micro_batch_size or 1
            places = places_in_batches(num, config.global_batch_size, unit=unit)
            order = shuffled_in_place(places, seed=config.seed)
        self._sampler, self.keeps_places = EpochSampler(num, order), keeps

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
        """Return a hash of the samples that the current epoch has trained on, and the order."""
        return {"seen": self._seen(), "keeps_places": self.keeps_places}

    def _seen(self) -> str:
        at = self._timeline.position
        return _hash(self._sampler.global_batch(at.epoch, 0, at.sample)) if at.sample else ""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the run's order, on any number of nodes.

        Raises:
            ValueError: the epoch would go on in another order, and miss samples.
        """
        # Checkpoints of earlier versions, which kept none, do not say it.
        self.keep_places(keeps=may_keep_places(self._config) and state.get("keeps_places", False))
        if state["seen"] != self._seen():
            raise ValueError(
                f"{self._timeline.position.sample} samples of the epoch were trained on in "
                "another order, so that others would be left out: resume with the sample_order, "
                "group_by_length and, where that is set, global_batch_size of the save, or from "
                "the end of an epoch"
            )


def may_keep_places(config: TrainConfig) -> bool:
    """Return whether nothing else decides which samples follow each other."""
    scales, by_length = config.scale_batch, config.group_by_length
    return not scales and not by_length and config.sample_order is None


def keeps_places(config: TrainConfig, world: World) -> bool:
    """Return whether a new run's samples keep their places in a batch."""
    return num_row_places(config, world) > 1 and may_keep_places(config)


def share_of_rows_found(config: TrainConfig, world: World) -> float:
    """Return for which share of samples a later epoch finds a row where it is needed."""
    return 1.0 if keeps_places(config, world) else 1 / num_row_places(config, world)


def num_row_places(config: TrainConfig, world: World) -> int:
    """Return in how many places rows lie that cannot be read from another."""
    return world.size if may_lie_on_gpus(config, world) else world.num_nodes


def may_lie_on_gpus(config: TrainConfig, world: World) -> bool:
    """Return whether processes may have rows in GPUs' memory, each those that it reads.

    Whether there is room for any does not matter, as the order of samples depends on this.
    """
    if config.cache_device != "auto":
        return config.cache_device == "cuda"
    finds_own = world.size == 1 or may_keep_places(config)
    return world.device.type == "cuda" and not config.cache_keep and finds_own


def _coming(ids: Tensor, timeline: Timeline, replicas: int) -> ComingStep:
    at, factor = timeline.position, timeline.learning_rate_factor(replicas)
    return ComingStep(ids, at.step, at.epoch, timeline.at_epoch_start, factor)


def _hash(ids: Tensor) -> str:
    return hashlib.sha256(ids.numpy().data).hexdigest()
