"""Gather at a decision what the run has shown since the last one.

Signals of gradients and weights come from the stages. A probe also compares every layer's outputs
for one fixed batch with those at the start.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from autodp import gather_json
from freeze import PROBE_SIGNALS, LayerStats
from freeze.signals import IntervalSignals, layer_values, linear_cka, similarity_change
from pipetransformer.durable_files import read_tensors, replace_tensors
from pipetransformer.feed import SampleFeed, samples_of
from pipetransformer.model import Task, trained_parameters
from pipetransformer.processes import World
from pipetransformer.stage import Stage

PROBE_FOLDER = "probes"
"""Where in a run's folder each look is kept."""

_LOGGER = logging.getLogger(__name__)

Grams = dict[int, Tensor]
"""Inner products of the samples' outputs, (n, n) float64, by layer."""


Probed = Mapping[int, Mapping[str, float]]
"""Signals by name, by layer."""


@final
class OutputProbe:
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

    def resume(self, step: int) -> None:
        """Continue a run from a step on, with the looks that it has taken before."""
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

    def look(self, stage: Stage, step: int) -> tuple[Probed, float]:
        """Compare layers with those of the first look; return that and its seconds. Collective.

        On other ranks than 0 both are empty.
        """
        start = time.perf_counter()
        self._feed.follow_prefix()
        grams = stage.look(self._ids, self._feed.rows(0, is_last=True))
        told = grams if stage.speaks_for_stage else {}
        # JSON spells float64 so that it is read back bit by bit.
        rows_by_layer = {str(layer): gram.tolist() for layer, gram in told.items()}
        gathered = gather_json(rows_by_layer, group=self._world.group)
        seconds = time.perf_counter() - start
        if not self._world.is_main:
            return {}, 0.0
        now = {
            int(layer): torch.tensor(rows, dtype=torch.float64)
            for one in gathered
            for layer, rows in one.items()
        }
        # Frozen layers are not looked at: below them all is fixed, and so are their outputs.
        self._last = {**self._last, **now}
        self._keep(step)
        return {layer: self._compare(layer, gram) for layer, gram in now.items()}, seconds

    def close(self) -> None:
        self._feed.close()

    def _compare(self, layer: int, now: Tensor) -> dict[str, float]:
        first = self._first.setdefault(layer, now)
        if first is now:  # At the start, or thawed since: it would be compared with itself.
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
    """Return the looks in a folder by step, in order; leave damaged ones out, with a warning."""
    looks = {}
    for path in sorted(folder.glob("step-*.safetensors")):
        try:
            grams = read_tensors(path)
        except ValueError as error:
            _LOGGER.warning("a look at the layers is left out: %s", error)
            continue
        looks[int(path.stem.partition("-")[2])] = {int(k): gram for k, gram in grams.items()}
    return looks


@dataclass(frozen=True)
class Observation:
    """Hold what is known of an interval.

    Args:
        measured: on gradients and weights; see `IntervalSignals.measured`.
        probed, look_s: what a look showed, and its seconds.
        loss, mean_learning_rate, metrics, evaluated_at: see `FreezeContext`.
    """

    measured: Mapping[str, Any] = field(default_factory=dict)
    probed: Probed = field(default_factory=dict)
    look_s: float = 0.0
    loss: float | None = None
    mean_learning_rate: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None

    def layers(
        self, task: Task, num_frozen: int, resting: Collection[int]
    ) -> tuple[LayerStats, ...]:
        """Return the statistics of every layer; a frozen or resting one has a size alone."""
        model = task.model
        layer_of = {sublayer.name: sublayer.layer for sublayer in model.sublayers}
        values = layer_values(self.measured, layer_of, model.num_layers)
        sizes = [0] * (model.num_layers + 1)  # The last is the head's, which no policy sees.
        for index, sublayer in enumerate(model.sublayers):
            parameters = trained_parameters(task, (index,))
            sizes[sublayer.layer] += sum(parameter.numel() for parameter in parameters.values())
        probed = {index: _finite(one) for index, one in self.probed.items()}

        def trains(index: int) -> bool:
            return index >= num_frozen and index not in resting

        return tuple(
            LayerStats(
                f"layer {index}",
                index,
                sizes[index],
                **{
                    name: by_layer[index] if trains(index) and name in task.signals else None
                    for name, by_layer in values.items()
                },
                **(probed.get(index, {}) if trains(index) else {}),
            )
            for index in range(model.num_layers)
        )


@dataclass
class _Mean:
    """Hold the mean of an interval's values, which a checkpoint of 0.2 calls losses, rates too."""

    count: int = 0
    losses: float = 0.0

    def add(self, value: float) -> None:
        if math.isfinite(value):  # Else the step is skipped.
            self.count, self.losses = self.count + 1, self.losses + value

    @property
    def mean(self) -> float | None:
        return self.losses / self.count if self.count else None


@final
class Observer:
    """Observe a run from decision to decision."""

    def __init__(self, task: Task, world: World, feed: SampleFeed) -> None:
        self._world = world
        self._losses, self._rates = _Mean(), _Mean()
        self._probe = OutputProbe(task, world, feed) if task.signals & PROBE_SIGNALS else None

    def note_step(self, loss: float, learning_rate: float) -> None:
        self._losses.add(loss)
        self._rates.add(learning_rate)

    def collect(self, stage: Stage | None, step: int) -> Observation:
        """Return what was seen since the last call, on rank 0, and start over. Collective."""
        if stage is None:
            return Observation()
        parts = gather_json(stage.trained.signals.measured(), group=self._world.group)
        measured = IntervalSignals.joined(parts)
        stage.trained.signals.reset()
        probed, look_s = self.look(stage, step)
        losses, rates = self._losses, self._rates
        self._losses, self._rates = _Mean(), _Mean()
        return Observation(measured, probed, look_s, losses.mean, rates.mean)

    def look(self, stage: Stage, step: int) -> tuple[Probed, float]:
        """Look at the layers, if the run probes them; see `OutputProbe.look`. Collective."""
        return ({}, 0.0) if self._probe is None else self._probe.look(stage, step)

    def close(self) -> None:
        """Let go of the probe's samples."""
        if self._probe is not None:
            self._probe.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know beside the stages' signals, as plain values."""
        return {"losses": asdict(self._losses), "learning_rates": asdict(self._rates)}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        self._losses, self._rates = _Mean(**state["losses"]), _Mean(**state["learning_rates"])
        if self._probe is not None:
            self._probe.resume(step)


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
