"""Evaluate the model on a data set: loss, metrics and, where asked for, outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import final

from torch import Tensor

from autodp import gather_json
from pipetransformer.feed import (
    ComputedRows,
    FrozenPrefix,
    SampleFeed,
    SizedDataset,
    Timeline,
    check_dataset,
    samples_of,
    tell_of_loss,
)
from pipetransformer.model import Task, named_tensors, opaque_kept
from pipetransformer.processes import World
from pipetransformer.stage.predictions import (
    OUTPUT,
    EvalPrediction,
    KeptOutputs,
    PredictionOutput,
    as_labels,
    gather_outputs,
    judge,
)
from pipetransformer.stage.stage import Stage
from pipetransformer.stage.work import Results


@final
class Evaluator:
    """Run the deployed model over data sets. Collective.

    Args:
        dataset: of the run's evaluations, with a cache of its own; None without evaluations.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        prefix: FrozenPrefix,
        *,
        stage: Callable[[], Stage],
        timeline: Timeline,
        dataset: SizedDataset | None,
    ) -> None:
        self.dataset = dataset
        self._task, self._world, self._prefix = task, world, prefix
        self._stage, self._timeline = stage, timeline
        self._has_told_of_rounding = False
        self.feed = None if dataset is None else self._feed_of(dataset, keeps=1)

    def choose(self, dataset: SizedDataset | None) -> SizedDataset:
        """Return the data set to evaluate; by default the run's own.

        Raises:
            TypeError, ValueError: there is none, or it has no length or no samples.
        """
        chosen = self.dataset if dataset is None else dataset
        if chosen is None:
            raise ValueError(
                "there is no eval_dataset; give one to Trainer, or a dataset to evaluate"
            )
        check_dataset(chosen, "dataset")
        return chosen

    def evaluate(self, dataset: SizedDataset) -> dict[str, float]:
        """Return loss and metrics; outputs are kept only for `compute_metrics`."""
        if self._task.config.compute_metrics is not None:
            return self._predict(dataset, self._task.model.targets).metrics
        return self._collect(dataset, self._task.model.targets)

    def predict(self, dataset: SizedDataset) -> PredictionOutput:
        """Return all outputs in order, and metrics if the data set has targets."""
        names = self._task.model.targets
        first = samples_of(self._task, dataset, needs_targets=False, evaluates=True).probe([0])
        return self._predict(dataset, names if first.keys() >= set(names) else ())

    def tell_of_rounding(self, feed: SampleFeed) -> None:
        """Log what `cache_dtype` changes of the first batch's loss, once. Collective.

        Args:
            feed: of the training set.
        """
        config = self._task.config
        dtype = config.cache_dtype if config.cache and feed.prefix.depth else None
        if dtype is None or self._has_told_of_rounding:
            return
        self._has_told_of_rounding = True
        losses = []
        for is_rounded in (False, True):
            rows, own = ComputedRows(feed, rounded=is_rounded), Results(has_metrics=False)
            self._stage().evaluate(min(config.global_batch_size, len(feed.dataset)), rows, own)
            losses.append(self._means(own)["loss"])
        if self._world.is_main:
            tell_of_loss(dtype, *losses)

    def close(self) -> None:
        """Unmap the cache."""
        if self.feed is not None:
            self.feed.close()

    def _predict(self, dataset: SizedDataset, targets: tuple[str, ...]) -> PredictionOutput:
        config, group = self._task.config, self._world.group
        kept = KeptOutputs(config.preprocess_logits_for_metrics)
        metrics = self._collect(dataset, targets, kept)
        arrays = gather_outputs(kept, group=group)
        label_ids = as_labels(arrays[name] for name in targets)
        if config.compute_metrics is not None and targets:
            judged = EvalPrediction(arrays[OUTPUT], label_ids)
            metrics |= judge(config.compute_metrics, judged, group=group)
        return PredictionOutput(arrays[OUTPUT], label_ids, metrics)

    def _collect(
        self, dataset: SizedDataset, targets: tuple[str, ...], kept: KeptOutputs | None = None
    ) -> dict[str, float]:
        """Return the means over a data set, NaN for those of nothing; add outputs to `kept`."""
        own = Results(kept=kept)
        feed, is_last = self.feed, self._timeline.is_over
        is_whole = targets == self._task.model.targets
        if feed is None or feed.dataset is not dataset or not is_whole:
            feed, is_last = self._feed_of(dataset, needs_targets=is_whole), True
        feed.follow_prefix()
        stage = self._stage()
        # Weights averaged for an evaluation are put in and out without a trace in versions.
        self._prefix.compare_values_next()
        try:
            with opaque_kept(named_tensors(self._task.model.model).values()):
                stage.evaluate(len(dataset), feed.rows(0, is_last=is_last), own)
        except BaseException:
            feed.end_workers()  # They have read ahead of a sample that ended the evaluation.
            raise
        finally:
            self._prefix.compare_values_next()
            if feed is not self.feed:
                feed.close()
        return self._means(own)

    def _means(self, own: Results) -> dict[str, float]:
        """Return the means of all ranks' results. Collective."""
        joined = Results()
        for totals in gather_json(own.read(), group=self._world.group):
            for name, (total, count) in totals.items():
                joined.add(name, total, count)
        means = joined.read().items()
        return {name: total / count if count else math.nan for name, (total, count) in means}

    def _feed_of(
        self, dataset: SizedDataset, *, keeps: int = 0, needs_targets: bool = True
    ) -> SampleFeed:
        """Return a data set's feed, which by default caches nothing."""

        def to_come() -> Iterator[tuple[int, Tensor]]:
            stage = self._stage()
            return ((0, stage.share.read_of_slice(ids)) for ids in stage.rounds(len(dataset)))

        samples = samples_of(self._task, dataset, needs_targets=needs_targets, evaluates=True)
        return SampleFeed(
            self._prefix,
            self._world,
            samples,
            to_come=to_come,
            keeps=keeps,
            keeps_places=lambda: True,
        )
