"""Look at every layer's outputs for one fixed batch, and compare them with those at the start."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from autodp import gather_json
from freeze.signals import linear_cka, similarity_change
from pipetransformer.durable_files import read_tensors, replace_tensors
from pipetransformer.feed import SampleFeed, samples_of
from pipetransformer.job import Task
from pipetransformer.processes import World
from pipetransformer.stage import Stage

PROBE_FOLDER = "probes"
"""Where in a run's folder each look is kept."""

_LOGGER = logging.getLogger(__name__)

Grams = dict[int, Tensor]
"""Inner products of the samples' outputs, (n, n) float64, by layer."""


@dataclass(frozen=True)
class Looked:
    """Hold what a look showed, signals by name for each layer, and what it took."""

    values: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    seconds: float = 0.0


@final
class Probe:
    """Look at samples spread evenly over the training set, as they are in its first epoch.

    Outputs are those of evaluation, without dropout. Every look runs a forward of the samples
    through all pipelines. Looks are kept in the run's folder, if it has one.
    """

    def __init__(self, task: Task, world: World, feed: SampleFeed) -> None:
        self._task, self._world = task, world
        num = min(task.config.probe_samples, len(feed.dataset))
        self._ids = torch.arange(num) * len(feed.dataset) // num
        samples = samples_of(feed.prefix.task, feed.dataset, needs_targets=False)
        self._feed = SampleFeed(feed.prefix, world, samples, keeps=0)
        folder = task.config.folder
        self._folder = None if folder is None else Path(folder) / PROBE_FOLDER
        self._first: Grams = {}
        self._last: Grams = {}

    def take_up(self, step: int) -> None:
        """Continue a run from a step on: what its looks before have shown counts."""
        if self._folder is None or not self._world.is_main:
            return
        looks = read_looks(self._folder)
        before = [grams for at, grams in looks.items() if at <= step]
        if 0 in looks:
            self._first, self._last = {}, before[-1]
            for grams in reversed(before):  # A layer's first look is the earliest that has it.
                self._first.update(grams)
        else:
            _LOGGER.warning(
                "%s lacks the look of step 0: layers are compared with what they are now",
                self._folder,
            )

    def look(self, stage: Stage, step: int) -> Looked:
        """Return how layers differ from those of the first look, on rank 0. Collective."""
        start = time.perf_counter()
        self._feed.follow_prefix()
        grams = stage.look(self._ids, self._feed.rows(0, is_last=True))
        told = grams if stage.speaks_for_stage else {}
        own = {str(layer): gram.tolist() for layer, gram in told.items()}
        gathered = gather_json(own, group=self._world.group)
        seconds = time.perf_counter() - start
        if not self._world.is_main:
            return Looked()
        now = {
            int(layer): torch.tensor(rows, dtype=torch.float64)
            for one in gathered
            for layer, rows in one.items()
        }
        # Below them all is frozen, and gives what it gave.
        self._last = {**self._last, **now}
        self._keep(step)
        return Looked({layer: self._compare(layer, gram) for layer, gram in now.items()}, seconds)

    def close(self) -> None:
        self._feed.close()

    def _compare(self, layer: int, now: Tensor) -> dict[str, float]:
        first = self._first.setdefault(layer, now)
        if first is now:  # At the start, or thawed since: there is nothing to compare it with.
            return {}
        values = {
            "probe_cka": linear_cka(now, first),
            "probe_change": similarity_change(now, first),
        }
        return {name: value for name, value in values.items() if name in self._task.signals}

    def _keep(self, step: int) -> None:
        if self._folder is None:
            return
        try:
            tensors = {str(layer): gram for layer, gram in self._last.items()}
            replace_tensors(self._folder / f"step-{step:08d}.safetensors", tensors)
        except OSError as error:
            _LOGGER.warning("no look of step %d is kept: %s", step, error)


def read_looks(folder: Path) -> dict[int, Grams]:
    """Return the looks that a run's folder of them holds, by step, in order.

    One that is not as it was written is left out, with a warning.
    """
    looks = {}
    for path in sorted(folder.glob("step-*.safetensors")):
        try:
            grams = read_tensors(path)
        except ValueError as error:
            _LOGGER.warning("a look at the layers is left out: %s", error)
            continue
        looks[int(path.stem.partition("-")[2])] = {int(k): gram for k, gram in grams.items()}
    return looks
