"""Define what a freeze policy sees, what it answers, and how its answer is checked."""

from __future__ import annotations

import json
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

PROBE_SIGNALS = frozenset({"probe_cka", "probe_change"})
"""Signals that need a forward of the probe batch at each decision."""

MEASURED_SIGNALS = PROBE_SIGNALS | frozenset(
    {"gradient_norm", "accumulated_gradient", "relative_update"}
)
"""All signals; the Trainer measures those that the policy or the setting `signals` asks for."""


@dataclass(frozen=True)
class LayerStats:
    """Describe one layer that can freeze, and its signals since the last decision.

    A signal is None if it was not asked for, is NaN or infinite, the layer is frozen, or no step
    had finite gradients. Gradients are the whole batch's, unscaled and unclipped.

    Attributes:
        index: 0..L-1 from the bottom; the embedding is part of layer 0, the head is no layer.
        gradient_norm: root of the mean over the steps of the squared norm of the gradient.
        relative_update: norm of the weights' change over their norm, per step.
        accumulated_gradient: L1 norm of the sum of the steps' gradients.
        probe_cka, probe_change: linear CKA, and similarity-preserving loss, between the layer's
            outputs for the probe batch now and at the start of the run.
    """

    name: str
    index: int
    num_parameters: int
    gradient_norm: float | None = None
    relative_update: float | None = None
    accumulated_gradient: float | None = None
    probe_cka: float | None = None
    probe_change: float | None = None


@dataclass(frozen=True, kw_only=True)
class FreezeContext:
    """Hold everything a policy may look at; nothing in it can be changed.

    Attributes:
        step, epoch: completed optimizer steps, and the epoch of the next one, both from 0.
        max_steps, steps_per_epoch: lengths of the whole training and of one epoch.
        learning_rate, peak_learning_rate: at the next step, and the largest of the training.
        mean_learning_rate: over the steps since the last decision; None before the first.
        layers: by index; 0..num_frozen-1 are frozen now.
        frozen_since: for each frozen layer, the step at which it froze.
        resting: indices of layers above them whose weights do not train now.
        metrics: results of the last evaluation by name; empty before the first.
        evaluated_at: completed steps at that evaluation; None if not known.
        loss: mean of the training losses since the last decision; None before the first.
        predict: maps a number of frozen layers to the predicted seconds of a step. These follow
            measured times, so two equal trainings whose policies use them may freeze differently.
    """

    step: int
    epoch: int
    max_steps: int
    steps_per_epoch: int
    learning_rate: float
    peak_learning_rate: float
    layers: tuple[LayerStats, ...]
    num_frozen: int
    frozen_since: tuple[int, ...]
    metrics: Mapping[str, float]
    predict: Callable[[int], float]
    loss: float | None = None
    resting: tuple[int, ...] = ()
    mean_learning_rate: float | None = None
    evaluated_at: int | None = None

    def __post_init__(self) -> None:
        # A copy: the caller's dict must not change under a policy, nor a policy change it.
        object.__setattr__(self, "metrics", MappingProxyType(dict(self.metrics)))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def as_frozen(self, since: tuple[int, ...], resting: tuple[int, ...] = ()) -> FreezeContext:
        """Return the context as if these layers were frozen and resting; their signals are None.

        Args:
            since: the step at which each frozen layer froze, bottom first.
        """
        layers = tuple(
            LayerStats(layer.name, layer.index, layer.num_parameters)
            if layer.index < len(since) or layer.index in resting
            else layer
            for layer in self.layers
        )
        seen = replace(self, layers=layers, num_frozen=len(since), frozen_since=since)
        return replace(seen, resting=resting)


@dataclass(frozen=True)
class FreezeDecision:
    """Say how many bottom layers are frozen from now on, and why, in one line for the records.

    Args:
        resting: layers above the frozen ones that do not train until the next decision. They get
            no gradients and no updates. They still run as in training, and nothing is moved or
            cached. The lowest layer that is not frozen cannot rest: freeze it instead.
    Raises:
        TypeError: `num_frozen` is not an int, `reason` no text, or `resting` no tuple of ints.
    """

    num_frozen: int
    reason: str
    resting: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.num_frozen, int) or isinstance(self.num_frozen, bool):
            raise TypeError(
                f"a freeze decision must be an int, got {self.num_frozen!r} "
                f"({type(self.num_frozen).__name__}); return the number of frozen layers, "
                "rounded, e.g. int(math.ceil(x)), or None to keep it"
            )
        if not isinstance(self.reason, str):
            raise TypeError(f"a freeze decision's reason must be a text, got {self.reason!r}")
        if not isinstance(self.resting, (tuple, list)) or not all(
            isinstance(layer, int) for layer in self.resting
        ):
            raise TypeError(f"resting layers must be a tuple of ints, got {self.resting!r}")


def frozen_since(before: Sequence[int], num_frozen: int, step: int) -> tuple[int, ...]:
    """Return the step at which each frozen layer froze, after a decision at `step`.

    Args:
        before: the same before the decision.
    """
    staying = tuple(before[:num_frozen])
    return staying + (step,) * (num_frozen - len(staying))


class FreezePolicy(ABC):
    """Decide, from a context alone, how many bottom layers are frozen.

    A policy runs on rank 0 only. It must not read clocks or random numbers: a resumed training
    asks again and must get the same answer. What it remembers between calls belongs in
    `state_dict`.

    Attributes:
        signals: fields of `LayerStats` that must be measured for it; others may be None.
        interval_share: share of a Trainer's run between decisions, where no interval is set; None
            decides once an epoch.
    """

    signals: frozenset[str] = frozenset()
    interval_share: float | None = None
    # Names of the attributes, without underscore, that make up the state.
    _remembered: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name that records and errors use."""
        return type(self).__name__

    @abstractmethod
    def decide(self, context: FreezeContext) -> FreezeDecision | None:
        """Return the decision at this step; None keeps what is frozen."""

    def check(self, num_layers: int) -> None:  # noqa: B027  (most fit any model)
        """Raise a ValueError if the policy does not fit a model with `num_layers` to freeze.

        Every rank calls it, before anything is loaded or measured for the run.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what the policy remembers, serialisable as JSON."""
        # A copy: the policy goes on changing its lists.
        return {name: deepcopy(getattr(self, f"_{name}")) for name in self._remembered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; raise ValueError for another policy's."""
        if state.keys() != set(self._remembered):
            raise ValueError(
                f"{self.name} was given a state with the keys {sorted(state)}, not "
                f"{sorted(self._remembered)}; resume with the policy that wrote the checkpoint"
            )
        for name, value in state.items():
            setattr(self, f"_{name}", deepcopy(value))


@final
class NeverFreeze(FreezePolicy):
    """Keep what is frozen."""

    def decide(self, context: FreezeContext) -> None:
        return None


PolicyFunction = Callable[[FreezeContext], "FreezeDecision | int | None"]


class PolicyError(ValueError):
    """Name the freeze policy that raised, and at which step."""


@final
class _FunctionPolicy(FreezePolicy):
    signals = frozenset({"gradient_norm"})

    def __init__(self, function: PolicyFunction) -> None:
        self._function = function

    @property
    def name(self) -> str:
        return getattr(self._function, "__name__", repr(self._function))

    def decide(self, context: FreezeContext) -> FreezeDecision | None:
        answer = self._function(context)
        if answer is None or isinstance(answer, FreezeDecision):
            return answer
        return FreezeDecision(answer, f"{self.name} returned {answer}")


def as_policy(
    freeze: FreezePolicy | PolicyFunction | None, measured: frozenset[str] = MEASURED_SIGNALS
) -> FreezePolicy:
    """Turn what the user passed into a policy.

    None becomes `NeverFreeze`. A function of the context is wrapped; it returns a
    `FreezeDecision`, a number of frozen layers, or None to keep it. It must not remember anything,
    as it is asked again after a resume; subclass `FreezePolicy` for that.

    Args:
        measured: the signals that a policy may ask for.
    Raises:
        TypeError: it is none of these, its signals are no set, or its state is not for JSON.
        ValueError: the policy asks for a signal that is not measured, or sets learning rates.
    """
    if freeze is None:
        return NeverFreeze()
    if isinstance(freeze, FreezePolicy):
        if not isinstance(freeze, _FunctionPolicy):  # That does with what is measured.
            _refuse_unfit(freeze, measured)
        return freeze
    if isinstance(freeze, type) or not callable(freeze):
        raise TypeError(
            f"freeze is {freeze!r}, which is no freeze policy; pass an instance of a "
            "FreezePolicy such as PaperRule(1 / 3) or FreezeSchedule([0, 2, 4]), "
            'freeze.named_policy("auto"), a function of a FreezeContext, or None'
        )
    return _FunctionPolicy(freeze)


def _refuse_unfit(policy: FreezePolicy, measured: frozenset[str]) -> None:
    """Raise what `as_policy` says for a policy of a class."""
    if not isinstance(policy.signals, (set, frozenset)):
        raise TypeError(
            f"the signals of {policy.name} are {policy.signals!r}; give a set of names"
        )
    if unknown := policy.signals - measured:
        raise ValueError(
            f"{policy.name} asks for the signals {sorted(unknown)}, which are not measured "
            f"here; use a subset of {sorted(measured)}"
        )
    if hasattr(policy, "learning_rate_scale"):
        raise ValueError(
            f"{policy.name} has a learning_rate_scale, which policies had up to 0.2; rates "
            "are the run's now: give learning_rate_schedule=, or layer_decay="
        )
    try:
        json.dumps(policy.state_dict())
    except TypeError as error:
        raise TypeError(
            f"the state of {policy.name} does not go into JSON, and so into no checkpoint: "
            f"{error}; let state_dict return numbers, texts, lists and mappings of texts"
        ) from error


def checked_decision(policy: FreezePolicy, context: FreezeContext) -> FreezeDecision:
    """Ask the policy and return a decision that can be executed.

    A decision that changes nothing gets a reason that starts with "keep".

    Raises:
        PolicyError: the policy raised.
        TypeError, ValueError: the decision cannot be executed.
    """
    try:
        decision = policy.decide(context)
    except Exception as error:
        raise PolicyError(
            f"the freeze policy {policy.name} raised {type(error).__name__} at step "
            f"{context.step}: {error}{_place(error)}"
        ) from error
    if decision is None:
        return FreezeDecision(context.num_frozen, "keep", context.resting)
    if not isinstance(decision, FreezeDecision):
        raise TypeError(
            f"{policy.name}.decide returned {decision!r} ({type(decision).__name__}); "
            "return a FreezeDecision, or None to keep what is frozen"
        )
    if not 0 <= decision.num_frozen <= context.num_layers:
        raise ValueError(
            f"{policy.name} decided to freeze {decision.num_frozen} layers at step "
            f"{context.step}, but {context.num_layers} layers can freeze; "
            f"return 0..{context.num_layers}"
        )
    resting = tuple(sorted(set(decision.resting)))
    if wrong := [i for i in resting if not decision.num_frozen < i < context.num_layers]:
        raise ValueError(
            f"{policy.name} decided that layers {wrong} rest at step {context.step}, with "
            f"{decision.num_frozen} of {context.num_layers} frozen; only layers above the lowest "
            "one that is not frozen can rest"
        )
    keeps = (decision.num_frozen, resting) == (context.num_frozen, context.resting)
    # A wrapper passes on its inner policy's reason, which may say so already.
    says_so = not keeps or decision.reason.startswith("keep")
    reason = decision.reason if says_so else f"keep: {decision.reason}"
    return FreezeDecision(decision.num_frozen, reason, resting)


def _place(error: Exception) -> str:
    """Name the line of the policy's own file where an error arose; "" if not known."""
    passed, ours = traceback.extract_tb(error.__traceback__), Path(__file__).parent
    # Frames of this package come first: a policy of ours may ask one of the user's.
    theirs = [frame for frame in passed if ours not in Path(frame.filename).parents]
    frames = [frame for frame in theirs if frame.filename == theirs[0].filename]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
