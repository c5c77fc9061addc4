"""Sum up a run in a table, and say why nothing was frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autopipe.trace import text_table
from freeze import FreezeContext
from pipetransformer.report.records import signals_of


@dataclass
class FitReport:
    """Sum up a run from its start on, across resumes.

    Every figure is the whole run's and the same on all ranks, with three exceptions: `seconds`,
    the seconds of `transitions`, and `cache_bytes`. These are this rank's, or its node's, since
    the last resume, and rank 0's before.

    Args:
        seconds: of training, observing and transitions, without evaluation.
        samples: trained on, of all replicas.
        cache_hits: samples whose frozen prefix's activations were read.
        cache_hits_of_others: hits by rows that other runs have kept: those of the first epoch, in
            which this run has no row of a sample that comes.
        cache_misses: samples whose activations were computed, by some or all of its layers.
        cache_upgrades: misses that were read, and computed on by the layers that froze since.
        cache_bytes: the most that a node took for activations of training samples.
        metrics, evaluated_at: the last evaluation of the eval_dataset, and the step before it.
        training_loss: mean over the samples of the last epoch, which may be partial.
        frozen, length, replicas: frozen layers, K and R of the last step.
        best_metric, best_step: the best `metric_for_best_model`, and the step before it; None
            before the first evaluation.
    """

    seconds: float = 0.0
    samples: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_upgrades: int = 0
    cache_bytes: int = 0
    transitions: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None
    cache_hits_of_others: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    training_loss: float | None = None
    frozen: int = 0
    length: int = 0
    replicas: int = 0

    def __str__(self) -> str:
        """Return a small table of results and costs; below it the transitions."""
        values = [["training loss", _number(self.training_loss)]]
        after = "" if self.evaluated_at is None else f", evaluated after step {self.evaluated_at}"
        values += [[name, f"{_number(value)}{after}"] for name, value in self.metrics.items()]
        if self.best_metric is not None:
            best = f"{_number(self.best_metric)}, after step {self.best_step}"
            values.append(["best metric", best])
        values += [["seconds", _number(self.seconds)], ["samples", str(self.samples)]]
        if self.cache_hits + self.cache_misses:
            cache = f"{self.cache_hits} samples read, {self.cache_misses} computed"
            values.append(["frozen layers' outputs", cache])
        values.append(["frozen layers", str(self.frozen)])
        shapes = [(change["length"], change["replicas"]) for change in self.transitions]
        is_pipeline = any(shape != (1, 1) for shape in [(self.length, self.replicas), *shapes])
        if is_pipeline:
            values.append(["K x R", f"{self.length} x {self.replicas}"])
        text = text_table(values)
        if not self.transitions:
            return text
        pipelines = ["K x R", "M"] if is_pipeline else []
        rows = [["transition", "frozen layers", *pipelines, "seconds"]]
        for change in self.transitions:
            shape = [f"{change['length']} x {change['replicas']}", str(change["micro_batches"])]
            frozen, seconds = str(change["frozen"]), _number(change["seconds"])
            rows.append(
                [f"step {change['step']}", frozen, *(shape if is_pipeline else ()), seconds]
            )
        return f"{text}\n\n{text_table(rows)}"

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)  # Fields that the state lacks keep their defaults.


def _number(value: float | None) -> str:
    """Write four digits; "none" where there is no number."""
    return "none" if value is None else f"{value:.4g}"


def nothing_frozen_line(num_asked: int, step: int, reason: str, seen: FreezeContext) -> str:
    """Write that a policy froze nothing, with its last answer and the signals before it."""
    ranges = [
        f"{name} {min(values):.3g} to {max(values):.3g}"
        for name, values in signals_of(seen).items()
    ]
    metrics = [f"{name} {value:.4g}" for name, value in seen.metrics.items()]
    loss = [] if seen.loss is None else [f"loss {seen.loss:.4g}"]
    times = "once" if num_asked == 1 else f"{num_asked} times"
    text = f"nothing was frozen: the policy was asked {times}, and said last, at step {step}: "
    return f"{text}{reason}; it saw {', '.join([*loss, *metrics, *ranges]) or 'no signals yet'}"
