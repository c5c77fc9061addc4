"""Check a run once its processes have met: all that is compared, tried and probed before a step.

ranks ─► samples ─► order ─► recording ─► sublayers ─► evaluation
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import final

import torch

from autopipe.loss import LossFunction
from pipetransformer.checks.model_checks import (
    about_full_float32,
    about_low_weights,
    about_tied_weights,
    refuse_untrained,
)
from pipetransformer.checks.rank_checks import refuse_differing_ranks
from pipetransformer.checks.run_checks import (
    about_large_batch,
    about_many_views,
    about_momentum,
)
from pipetransformer.checks.sample_faults import naming_bad_samples
from pipetransformer.checks.sublayer_probe import about_cuts, probe_evaluation, probe_sublayers
from pipetransformer.checks.verification import Verification, verify, verify_recorded
from pipetransformer.feed import Batch, BatchForecast, SampleFeed
from pipetransformer.model import Task
from pipetransformer.processes import World

_NUM_TRIED = 16
"""First samples that are tried one by one where a run fails as it begins."""


@dataclass(frozen=True)
class Findings:
    """Hold what was found out about a run that may train.

    Args:
        verified: how a recorded model equals its own forward; "" for a hand-written adapter.
        plainly_random: the sublayers, by index, that draw from Python's or numpy's generator.
        warnings: sentences for the user.
    """

    verified: str
    plainly_random: set[int]
    warnings: tuple[str, ...]


@final
@dataclass(frozen=True, kw_only=True)
class RunChecks:
    """Refuse what would train wrongly. All methods but `naming_bad` are collective.

    Args:
        feed, evaluated: of the training set, and of the evaluation set if there is one.
        loss_fn: the user's own; None is the model's.
        optimizer: its groups' settings, spelled.
        caches: whether frozen layers' outputs may be cached.
    """

    task: Task
    world: World
    feed: SampleFeed
    evaluated: SampleFeed | None
    loss_fn: LossFunction | None
    optimizer: str
    caches: bool

    def check(self, coming: BatchForecast, *, trains: bool) -> Findings:
        """Compare ranks, read samples, and run two of them through the sublayers.

        Args:
            coming: the order of samples.
            trains: whether steps follow, and not a prediction alone.
        Raises:
            ValueError: on every rank: what would train wrongly, and what to do.
        """
        task, world, feed, evaluated = self.task, self.world, self.feed, self.evaluated
        if trains:
            refuse_untrained(task)
        data = {"train_dataset": feed.samples}
        if evaluated is not None:
            data["eval_dataset"] = evaluated.samples
        refuse_differing_ranks(task, world, optimizer=self.optimizer, data=data)
        if self.caches:
            feed.keeper.look_for_randomness()
        feed.keeper.warn_of_padding()
        coming.refuse_other_orders(world.group)
        verified = verify_recorded(
            task, world, loss_fn=self.loss_fn, read=lambda: feed.read(torch.arange(2))
        )
        probe = probe_sublayers(task, world, feed.read)
        evaluates = task.config.evaluate_every_epochs or task.config.evaluate_every_steps
        if trains and evaluates and evaluated is not None:
            with self.naming_bad(evaluated, range(2), where="the eval_dataset's "):
                probe_evaluation(task, world, evaluated.read)
        warnings = (*self._warnings(len(feed.dataset)), about_cuts(task, world, probe.is_random))
        return Findings(verified, probe.plainly_random, tuple(filter(None, warnings)))

    def _warnings(self, num_samples: int) -> Iterator[str]:
        task = self.task
        yield about_large_batch(task.config, num_samples)
        yield about_low_weights(task.model.model)
        yield about_momentum(task.config, self.optimizer, self.world.size)
        if self.caches:
            yield about_tied_weights(task)
            yield about_many_views(task.config)
        yield about_full_float32(task.model.model, task.computes_in, self.world.device)

    def verify(self, batch: Batch | None) -> Verification:
        """Compare what is trained with the model's own forward; the whole model is on rank 0.

        Args:
            batch: None takes the first samples of the training set.
        """
        task, world = self.task, self.world
        if batch is None:
            batch = self.feed.read(torch.arange(2 * max(2, world.size)))
        return verify(task, world, model=task.model, loss_fn=self.loss_fn, batch=batch)

    def naming_first(self) -> AbstractContextManager[None]:
        """Name a bad sample among those that are read before the first step."""
        # The first are checked, and measuring reads from all over the data set.
        num = len(self.feed.dataset)
        apart = range(0, num, max(1, num // self.task.config.global_batch_size))
        return self.naming_bad(self.feed, sorted({*range(min(_NUM_TRIED, num)), *apart}))

    def naming_bad(
        self, feed: SampleFeed, ids: Iterable[int], *, where: str = "", tries: bool = True
    ) -> AbstractContextManager[None]:
        """Have an error name the sample that is to blame, if one of these is."""
        model, loss = self.task.model, self.task.loss_fn

        def compute(batch: Batch) -> object:
            return loss(model.run(batch), model.targets_of(batch))

        return naming_bad_samples(
            model.model,
            lambda index: feed.samples.probe([index]),
            ids,
            where=where,
            compute=compute if tries else None,
        )
