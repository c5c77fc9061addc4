"""Gather, at a decision, what was measured since the last one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from autodp import gather_json
from freeze import PROBE_SIGNALS, LayerStats
from freeze.signals import IntervalSignals, Trend, layer_values
from pipetransformer.feed import SampleFeed
from pipetransformer.job import Task, trained_parameters
from pipetransformer.layer_signals.probe import Looked, Probe
from pipetransformer.processes import World
from pipetransformer.stage import Stage


@dataclass(frozen=True)
class Observed:
    """Hold what is known of an interval.

    Args:
        measured: on gradients and weights; see `IntervalSignals.measured`.
        loss, loss_slope, mean_learning_rate, metrics, evaluated_at: see `FreezeContext`.
    """

    measured: Mapping[str, Any] = field(default_factory=dict)
    looked: Looked = field(default_factory=Looked)
    loss: float | None = None
    loss_slope: float | None = None
    mean_learning_rate: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None

    def layers(
        self, task: Task, num_frozen: int, resting: Collection[int]
    ) -> tuple[LayerStats, ...]:
        """Return it layer by layer; of those that are frozen, or rest, there is nothing to say."""
        model = task.model
        layer_of = {sublayer.name: sublayer.layer for sublayer in model.sublayers}
        values = layer_values(self.measured, layer_of, model.num_layers)
        sizes = [0] * (model.num_layers + 1)
        for index, sublayer in enumerate(model.sublayers):
            own = trained_parameters(task, (index,))
            sizes[sublayer.layer] += sum(parameter.numel() for parameter in own.values())
        probed = {index: _finite(one) for index, one in self.looked.values.items()}

        def trains(index: int) -> bool:
            return index >= num_frozen and index not in resting

        return tuple(
            LayerStats(
                f"layer {index}",
                index,
                sizes[index],
                **{
                    name: own[index] if trains(index) and name in task.signals else None
                    for name, own in values.items()
                },
                **(probed.get(index, {}) if trains(index) else {}),
            )
            for index in range(model.num_layers)
        )


@final
class Observing:
    """Observe a run from decision to decision."""

    def __init__(self, task: Task, world: World, feed: SampleFeed) -> None:
        self._world = world
        self._losses, self._rates = Trend(), Trend()
        self.probe = Probe(task, world, feed) if task.signals & PROBE_SIGNALS else None

    def note_step(self, loss: float, learning_rate: float) -> None:
        self._losses.add(loss)
        self._rates.add(learning_rate)

    def collect(self, stage: Stage | None, step: int) -> Observed:
        """Return what was seen since the last call, on rank 0, and begin anew. Collective."""
        if stage is None:
            return Observed()
        parts = gather_json(stage.signals.measured(), group=self._world.group)
        measured = IntervalSignals.joined(parts)
        stage.signals.reset()
        looked = Looked() if self.probe is None else self.probe.look(stage, step)
        losses, rates = self._losses, self._rates
        observed = Observed(measured, looked, losses.mean, losses.slope, rates.mean)
        losses.reset()
        rates.reset()
        return observed

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know beside the stages' signals, as plain values."""
        return {
            "losses": self._losses.state_dict(),
            "learning_rates": self._rates.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses.load_state_dict(state["losses"])
        self._rates.load_state_dict(state["learning_rates"])


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
