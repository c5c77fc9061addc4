"""Record what a policy saw at each decision, so that any policy can be asked again later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from freeze import MEASURED_SIGNALS, FreezeContext, LayerStats
from pipetransformer.report.records import RECORDS_FILE, Record, read_records

_SIGNALS = tuple(field.name for field in fields(LayerStats) if field.name in MEASURED_SIGNALS)
_PLAIN = (
    "epoch",
    "max_steps",
    "steps_per_epoch",
    "learning_rate",
    "peak_learning_rate",
    "metrics",
    "loss",
    "loss_slope",
)
"""What of a context is recorded as it is."""


@dataclass(frozen=True)
class RecordedDecision:
    """Hold a decision of a run.

    Attributes:
        context: what its policy saw; `predict` answers as at the run's first decision.
        num_frozen, reason: what was decided.
    """

    context: FreezeContext
    num_frozen: int
    reason: str

    @property
    def signals(self) -> frozenset[str]:
        """Name the signals that some layer has."""
        layers = self.context.layers
        return frozenset(s for s in _SIGNALS if any(getattr(one, s) is not None for one in layers))


def decision_fields(context: FreezeContext, *, num_frozen: int, reason: str) -> dict[str, Any]:
    """Return what a record of kind "decision" holds; at step 0 with the steps' predicted times."""
    values = {
        name: [getattr(layer, name) for layer in context.layers]
        for name in _SIGNALS
        if any(getattr(layer, name) is not None for layer in context.layers)
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
        "predicted_step_s": None if context.step else _predictions(context),
    }


def read_decisions(folder: Path) -> list[RecordedDecision]:
    """Return a run's decisions in order; one that was repeated after a resume counts once.

    Raises:
        ValueError: the folder holds no records, or no decision, or they lack the first one.
    """
    path = folder / RECORDS_FILE
    if not path.exists():
        raise ValueError(f"{folder} holds no {RECORDS_FILE}; give the folder= of a run")
    found = {one["step"]: one for one in read_records(path) if one["kind"] == "decision"}
    if 0 not in found:
        raise ValueError(
            f"{path} holds no decision of step 0; a run of this version records all of them"
        )
    seconds = found[0]["predicted_step_s"]
    return [_read(found[step], seconds) for step in sorted(found)]


def _read(record: Record, seconds: Sequence[float | None]) -> RecordedDecision:
    sizes, signals = record["parameters"], record["signals"]
    layers = tuple(
        LayerStats(f"layer {i}", i, size, **{name: own[i] for name, own in signals.items()})
        for i, size in enumerate(sizes)
    )

    def predict(num_frozen: int) -> float:
        found = seconds[num_frozen]
        if found is None:
            raise ValueError(f"no pipeline was found for {num_frozen} frozen layers")
        return found

    context = FreezeContext(
        **{name: record[name] for name in _PLAIN},
        step=record["step"],
        layers=layers,
        num_frozen=record["frozen_before"],
        frozen_since=tuple(record["frozen_since"]),
        resting=tuple(record["resting_before"]),
        predict=predict,
    )
    return RecordedDecision(context, record["frozen"], record["reason"])


def _predictions(context: FreezeContext) -> list[float | None]:
    """Return the seconds of a step by frozen layers; None where no pipeline is possible."""
    found: list[float | None] = []
    for num_frozen in range(context.num_layers + 1):
        try:
            found.append(context.predict(num_frozen))
        except ValueError:
            found.append(None)
    return found
