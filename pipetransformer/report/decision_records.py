"""Record what a policy saw at each decision, so that any policy can be asked again later."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from freeze import MEASURED_SIGNALS, FreezeContext, LayerStats
from pipetransformer.report.records import RECORDS_FILE, Record, latest_branch, read_records

_SIGNALS = tuple(field.name for field in fields(LayerStats) if field.name in MEASURED_SIGNALS)
_OTHERWISE = {"step", "layers", "num_frozen", "frozen_since", "resting", "predict"}
_PLAIN = tuple(field.name for field in fields(FreezeContext) if field.name not in _OTHERWISE)
"""What of a context is recorded as it is; its last two were not always."""

_SPARE_S, _SPARE_SHARE = 0.01, 0.01
"""What predicting may take at a decision, and as a share of the training since the last one."""


@dataclass(frozen=True)
class RecordedDecision:
    """Hold a decision of a run.

    Attributes:
        context: what its policy saw; `predict` answers as it did then, or, where that was not
            recorded, as at the nearest earlier decision with recorded predictions.
        look_s: what looking at the probe batch took before it.
    """

    context: FreezeContext
    num_frozen: int
    reason: str
    look_s: float = 0.0

    @property
    def signals(self) -> frozenset[str]:
        """Name the signals that some layer has."""
        layers = self.context.layers
        return frozenset(s for s in _SIGNALS if any(getattr(one, s) is not None for one in layers))


def decision_fields(
    context: FreezeContext, *, num_frozen: int, reason: str, interval_s: float
) -> dict[str, Any]:
    """Return what a record of kind "decision" holds.

    That is also what steps are predicted to take by frozen layers, if predicting is quick: on 8
    ranks a pipeline for each of 12 layers takes about half a second to find, and training waits.
    At step 0 it is predicted in any case.

    Args:
        interval_s: seconds of training since the last decision, about.
    """
    spare_s = max(_SPARE_S, _SPARE_SHARE * interval_s) if context.step else math.inf
    values = {
        name: [getattr(layer, name) for layer in context.layers] for name in signals_of(context)
    }
    plain = {name: getattr(context, name) for name in _PLAIN if name != "metrics"}
    return {
        **plain,
        "metrics": dict(context.metrics),
        "frozen_before": context.num_frozen,
        "frozen_since": list(context.frozen_since),
        "frozen": num_frozen,
        "resting_before": list(context.resting),
        "reason": reason,
        "parameters": [layer.num_parameters for layer in context.layers],
        "signals": values,
        "predicted_step_s": _predictions(context, spare_s),
    }


def signals_of(context: FreezeContext) -> dict[str, list[float]]:
    """Return what is known of the layers, by signal; a signal is left out where nothing is."""
    known = {
        name: [v for layer in context.layers if (v := getattr(layer, name)) is not None]
        for name in _SIGNALS
    }
    return {name: values for name, values in known.items() if values}


def read_decisions(folder: Path) -> list[RecordedDecision]:
    """Return a run's decisions in order, without those that a resume has discarded.

    Raises:
        ValueError: the folder holds no records, or no decision, or they lack the first one; or
            steps trained more samples the more replicas there were.
    """
    path = folder / RECORDS_FILE
    records = latest_branch(read_records(path))
    by_step = {one["step"]: one for one in records if one["kind"] == "decision"}
    if 0 not in by_step:
        raise ValueError(
            f"{path} holds no decision of step 0; a run of this version records all of them"
        )
    if by_step[0].get("scales_batch"):
        raise ValueError(
            f"{path}: with scale_batch=True a step trained more samples the more replicas there "
            "were, and what others' steps would have trained is not known; record a run without it"
        )
    decisions = []
    seconds: list[float | None] = []  # Step 0 always has them.
    for step in sorted(by_step):
        seconds = by_step[step]["predicted_step_s"] or seconds
        decisions.append(_read(by_step[step], seconds))
    return decisions


def _read(record: Record, seconds: Sequence[float | None]) -> RecordedDecision:
    sizes, signals = record["parameters"], record["signals"]
    layers = tuple(
        LayerStats(f"layer {i}", i, size, **{name: own[i] for name, own in signals.items()})
        for i, size in enumerate(sizes)
    )

    def predict(num_frozen: int) -> float:
        step_s = seconds[num_frozen]
        if step_s is None:
            raise ValueError(f"no pipeline was found for {num_frozen} frozen layers")
        return step_s

    context = FreezeContext(
        **{name: record[name] for name in _PLAIN if name in record},
        step=record["step"],
        layers=layers,
        num_frozen=record["frozen_before"],
        frozen_since=tuple(record["frozen_since"]),
        resting=tuple(record["resting_before"]),
        predict=predict,
    )
    look_s = record.get("look_seconds", 0.0)
    return RecordedDecision(context, record["frozen"], record["reason"], look_s)


def _predictions(context: FreezeContext, spare_s: float) -> list[float | None] | None:
    """Return the seconds of a step by frozen layers; None for one without a possible pipeline.

    None for all if that would take longer than `spare_s`.
    """
    # This thread's time: what others do meanwhile says nothing of the planner.
    start = time.thread_time()
    found = [_prediction(context, 0)]
    # The fewer layers are left to train, the sooner they are divided.
    if (time.thread_time() - start) * context.num_layers / 2 > spare_s:
        return None
    return found + [_prediction(context, num) for num in range(1, context.num_layers + 1)]


def _prediction(context: FreezeContext, num_frozen: int) -> float | None:
    try:
        return context.predict(num_frozen)
    except ValueError:
        return None
