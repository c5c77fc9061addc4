"""Watch a training run from outside, and ask a policy what could freeze."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from freeze.advisor.advice import Advice, Look
from freeze.advisor.step_times import StepCosts, StepTimes
from freeze.advisor.thaw_check import ThawCheck
from freeze.in_place import apply, find_layers, freezing_with, frozen_in_place, thawed_by
from freeze.policies import QuietUpdates
from freeze.policy import (
    FreezeContext,
    FreezePolicy,
    LayerStats,
    PolicyFunction,
    as_policy,
    checked_decision,
    frozen_since,
)
from freeze.signals import WeightChanges, relative_update

_SIGNALS = frozenset({"relative_update"})
_LOGGER = logging.getLogger(__name__)


def learning_rates(groups: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the largest learning rate of an optimizer's groups: now, and of the schedule."""
    # Schedulers leave their first rate in the groups, and OneCycleLR its largest one, too.
    now = max(float(group["lr"]) for group in groups)
    known = [group[key] for group in groups for key in ("initial_lr", "max_lr") if key in group]
    return now, max([now, *map(float, known)])


def _scale_of(scaler: Any) -> float:
    return 1.0 if scaler is None else float(scaler.get_scale())


class Observer:
    """Look at a model's layers every few steps; freeze them in place if asked to act.

    It costs a copy of the weights, a comparison at each look, and hooks on the first few steps.

    Args:
        policy: asked at each look, with relative updates as signal; `QuietUpdates()` by default.
        every_steps: steps between two looks; None looks behind each epoch.
        act: whether to freeze what the policy says.
        layers: the model's blocks, bottom first; None finds them, see `freeze.apply`.
    Attributes:
        keeps_outputs: whether frozen layers' outputs are cached, as predicted steps count.
        asks_first: whether the policy is asked before the first step, too. Until then nothing
            thaws that was frozen before.
    Raises:
        ValueError: every_steps is less than 1, there are no layers, or the policy needs another
            signal, or sets learning rates; later, it lets layers rest.
    """

    def __init__(
        self,
        policy: FreezePolicy | PolicyFunction | None = None,
        *,
        every_steps: int | None = 100,
        act: bool = False,
        layers: Sequence[nn.Module] | None = None,
    ) -> None:
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps is {every_steps}; give at least 1")
        if layers is not None and not layers:
            raise ValueError("layers is empty; give the model's blocks, or None to find them")
        self._policy = as_policy(policy or QuietUpdates(), _SIGNALS)
        if self._policy.learning_rate_scale(0, 1, 0.0) is not None:
            raise ValueError(
                f"{self._policy.name} sets learning rates, which an advisor leaves alone; give "
                "one that does not, such as Linear"
            )
        self._every, self.acts, self._given = every_steps, act, layers
        self.keeps_outputs = self.asks_first = False
        self._looks: list[Look] = []
        self._since: tuple[int, ...] = ()
        self._costs: StepCosts | None = None
        self._times: StepTimes | None = None
        self._model: nn.Module | None = None
        self._peak = 0.0
        self._coming_rate: float | None = None
        self._has_gradient: list[bool] = []
        self._metrics: dict[str, float] = {}
        self._evaluated_at: int | None = None
        self._unused = json.dumps(self.state_dict())

    def refuse_wrapped(self, num_processes: int) -> None:
        """Raise a ValueError if it is to freeze in several processes."""
        if self.acts and num_processes > 1:
            raise ValueError(
                f"{type(self).__name__}(act=True) cannot freeze what DistributedDataParallel has "
                "wrapped; watch with act=False, and start anew with layers frozen by freeze.apply"
            )

    def forget(self) -> None:
        """Forget a run that was watched before; call it before `begin`."""
        self.load_state_dict(json.loads(self._unused))

    def begin(
        self,
        model: nn.Module,
        *,
        max_steps: int,
        steps_per_epoch: int,
        scaler: Any = None,
        thaw_check: ThawCheck | None = None,
    ) -> None:
        """Begin to watch a model; in a resumed run its frozen layers freeze again.

        The model must not be wrapped if layers are to freeze. `scaler` is a `GradScaler`. With a
        `thaw_check`, no weight thaws in this run that could not train.
        """
        if self._times is not None:
            self._times.close()  # A run that failed left its hooks.
            self._times = None
        self._scaler, self._scale = scaler, _scale_of(scaler)
        self._blocks = self.blocks_of(model)
        is_last_one, self._model = model is self._model, model
        self._thaw_check = thaw_check
        # What an earlier run froze stays so until the policy is asked: else it would thaw in vain.
        self._waits = self.acts and self.asks_first and not self._looks
        # Also with nothing frozen, if the model is the last run's: then its frozen layers thaw.
        if self.acts and not self._waits and (self._since or is_last_one or self.asks_first):
            self._freeze(len(self._since))
        if self._costs is None and not (self.acts and self._since):
            self._times = StepTimes(model, self._blocks)
        self.expect(max_steps=max_steps, steps_per_epoch=steps_per_epoch)
        self._coming_rate = None
        self._begin_interval()

    def expect(self, *, max_steps: int, steps_per_epoch: int) -> None:
        """Note how long the training and an epoch are, where that is known better by now."""
        self._max_steps, self._per_epoch = max_steps, steps_per_epoch

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the model's blocks, bottom first."""
        return list(self._given) if self._given is not None else find_layers(model)

    def carry_out(self, num_frozen: int) -> None:
        """Freeze the bottom layers of the model that is watched."""
        apply(self._watched, num_frozen, layers=self._blocks)

    def thawed_by(self, num_frozen: int) -> dict[str, nn.Parameter]:
        """Return by name the weights that `carry_out` would thaw."""
        return thawed_by(self._watched, num_frozen, layers=self._blocks)

    def _freeze(self, num_frozen: int, *, is_over: bool = False) -> None:
        # Behind the last step a thaw is in vain anyway.
        if self._thaw_check is not None and not is_over:
            try:
                self._thaw_check.refuse_lost(self.thawed_by(num_frozen), num_frozen)
            except ValueError:
                self._stop_timing()  # No trainer ends what it could not begin.
                raise
        self.carry_out(num_frozen)
        self._waits = False

    def agreed(self, num_frozen: int) -> int:
        """Return what all processes freeze; this one's policy has said `num_frozen`."""
        return num_frozen

    def end_update(self, *, skipped: bool = False) -> None:
        """Note the end of an optimizer's step; if `skipped`, no weight moved.

        A scaler that skips a step lowers its scale. Whether the optimizer's step was called says
        nothing, as fused optimizers skip it themselves.
        """
        before, self._scale = self._scale, _scale_of(self._scaler)
        skipped = skipped or self._scale < before
        if not skipped and not self._num_updates:
            self._has_gradient = [_moves(own.values()) for own in self._weights]
        self._num_updates += not skipped
        if self._times is not None:
            self._times.end_update()

    def end_step(
        self, step: int, *, learning_rate: float, peak_learning_rate: float | None = None
    ) -> Look | None:
        """Note that `step` steps are done; return a look if one is due.

        `learning_rate` is the next step's, `peak_learning_rate` the largest, as far as known.
        """
        self._peak = max(self._peak, learning_rate, peak_learning_rate or 0.0)
        if self._coming_rate is not None:
            self._rates.append(self._coming_rate)
        self._coming_rate = learning_rate
        if self._times is not None:
            self._times.end_step()
            if self._times.is_done:
                self._stop_timing()
        if step % (self._every or self._per_epoch):
            return None
        return self.look(step, learning_rate=learning_rate)

    def look(self, step: int, *, learning_rate: float, epoch: int | None = None) -> Look:
        """Ask the policy now, with `step` steps done; the epoch is that of the next step."""
        # Who names an epoch begins it, however many were expected.
        is_over = epoch is None and step >= self._max_steps
        epoch = step // self._per_epoch if epoch is None else epoch
        look = self._look(step, learning_rate, epoch, is_over=is_over)
        self._looks.append(look)
        return look

    def end_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note an evaluation's results, for policies."""
        # Joined: evaluations of several data sets have metrics of different names.
        self._metrics |= metrics
        self._evaluated_at = step

    def end(self) -> Advice:
        self._stop_timing()
        return self.advice

    def publish(self, folder: str) -> None:
        """End, log the advice, and write it to a folder."""
        advice = self.end()
        _LOGGER.warning("%s", advice)
        advice.write(Path(folder))

    @property
    def advice(self) -> Advice:
        layers = len(self._blocks) if self._model is not None else 0
        return Advice(layers, self.acts, tuple(self._looks), self._costs)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, serialisable as JSON."""
        return {
            "policy": self._policy.state_dict(),
            "since": list(self._since),
            "peak": self._peak,
            "costs": self._costs and vars(self._costs),
            "looks": [vars(look) for look in self._looks],
            "metrics": dict(self._metrics),
            "evaluated_at": self._evaluated_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; before `begin`."""
        self._policy.load_state_dict(state["policy"])
        self._since, self._peak = tuple(state["since"]), state["peak"]
        self._metrics = dict(state.get("metrics", {}))
        self._evaluated_at = state.get("evaluated_at")
        self._costs = None
        if (costs := state["costs"]) is not None:
            lists = {name: tuple(costs[name]) for name in costs if name != "step_s"}
            self._costs = StepCosts(costs["step_s"], **lists)
        self._looks = [Look(**{**one, "updates": tuple(one["updates"])}) for one in state["looks"]]

    def _look(self, step: int, learning_rate: float, epoch: int, *, is_over: bool) -> Look:
        updates = self._updates()
        # What an earlier run froze may train in this one.
        thaws = set(frozen_in_place(self._watched).values()) if self._waits else set()
        context = FreezeContext(
            step=step,
            epoch=epoch,
            max_steps=self._max_steps,
            steps_per_epoch=self._per_epoch,
            learning_rate=learning_rate,
            mean_learning_rate=statistics.fmean(self._rates) if self._rates else None,
            peak_learning_rate=max(self._peak, learning_rate),
            layers=tuple(
                LayerStats(
                    f"layer {index}",
                    index,
                    sum(p.numel() for p in own.values() if p.requires_grad or p in thaws),
                    relative_update=update,
                )
                for index, (own, update) in enumerate(zip(self._weights, updates, strict=True))
            ),
            num_frozen=len(self._since),
            frozen_since=self._since,
            metrics=self._metrics,
            evaluated_at=self._evaluated_at,
            predict=self._predicted_s,
        )
        decision = checked_decision(self._policy, context)
        if decision.resting:
            raise ValueError(
                f"{self._policy.name} lets layers {decision.resting} rest, which an advisor does "
                "not; give a policy that freezes the layers below"
            )
        num_frozen = self.agreed(decision.num_frozen)
        changes = num_frozen != context.num_frozen
        if self.acts and changes:
            self._stop_timing()
        if self._waits or (self.acts and changes):
            self._freeze(num_frozen, is_over=is_over)
        self._since = frozen_since(self._since, num_frozen, step)
        self._begin_interval()
        return Look(step, num_frozen, updates, decision.reason)

    @property
    def _watched(self) -> nn.Module:
        assert self._model is not None
        return self._model

    def _predicted_s(self, num_frozen: int) -> float:
        if self._costs is None:
            raise ValueError("no step has been timed yet; look later, with a larger every_steps")
        return self._costs.step_s * (
            1 - self._costs.saved_share(num_frozen, cached=self.keeps_outputs)
        )

    def _begin_interval(self) -> None:
        self._weights = freezing_with(self._watched, self._blocks)
        self._changes = WeightChanges({str(i): own for i, own in enumerate(self._weights)})
        self._changes.begin()
        self._num_updates, self._rates = 0, list[float]()
        self._has_gradient.clear()

    def _updates(self) -> tuple[float | None, ...]:
        """Return each layer's relative change per update; None if not known.

        A layer without a gradient moves by weight decay alone, which does not count.
        """
        squares = self._changes.squares() if self._num_updates else {}
        # If no layer has a gradient, the loop freed them all before it reported the step.
        still = [i for i, has in enumerate(self._has_gradient) if not has]
        for index in still if any(self._has_gradient) else ():
            squares.pop(str(index), None)
        pairs = [squares.get(str(index), (None, None)) for index in range(len(self._blocks))]
        return tuple(relative_update(*pair, num_steps=self._num_updates) for pair in pairs)

    def _stop_timing(self) -> None:
        if self._times is not None:
            self._costs, self._times = self._times.close(), None


def _moves(parameters: Iterable[nn.Parameter]) -> bool:
    """Tell whether some gradient is not zero everywhere."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return any(bool(gradient.any()) for gradient in gradients)
