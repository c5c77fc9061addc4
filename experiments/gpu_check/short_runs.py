"""Train a small model for a few steps in different ways; hold the results against each other."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.gpu_check import loops
from experiments.gpu_check.loops import Outcome
from experiments.gpu_check.workloads import (
    EPS,
    LoopCase,
    image_loss,
    own_loss,
    random_images,
    random_sentences,
)
from experiments.random_models import bert, vit
from freeze import FreezeSchedule
from pipetransformer import PlanSituation, StepResult, Trainer, fastest_plan, launch

BATCH_SIZE = 16
_NUM_SAMPLES, _DEPTH = 4 * BATCH_SIZE, 4
_SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": _DEPTH, "num_heads": 4}
EXACTLY, IN_FLOAT64 = (0.0, 0.0), (1e-9, 1e-7)
"""Absolute and relative to a tensor's largest value: how far results may differ."""


@dataclass(frozen=True)
class ShortRun:
    """Describe a run; it can be sent to another process.

    Args:
        frozen: layers frozen, by epoch.
        model: "vit" or "bert".
        dtype: of the weights, by name; bfloat16 is computed in by autocast, over float32.
        dropout: rate.
        settings: further ones of the Trainer.
    """

    frozen: tuple[int, ...]
    model: str = "vit"
    dtype: str = "bfloat16"
    dropout: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def with_settings(self, **settings: Any) -> ShortRun:
        return replace(self, settings={**self.settings, **settings})

    @property
    def is_exact(self) -> bool:
        return self.dtype == "float64"

    def case(self) -> LoopCase:
        """Return what is trained; sentences have all lengths."""
        weights = torch.float64 if self.is_exact else torch.float32
        if self.model == "bert":
            rows = random_sentences(_NUM_SAMPLES, 24, shortest=4)
            build = partial(bert, 64, _DEPTH, heads=2, dropout=self.dropout)
            blocks, loss_of = "bert.encoder.layer", own_loss
        else:
            rows = random_images(_NUM_SAMPLES, _SHAPE["img_size"], weights)
            build = partial(vit, proj_drop_rate=self.dropout, **_SHAPE)
            blocks, loss_of = "blocks", image_loss
        return LoopCase(
            self.model, lambda: build().to(weights), blocks, rows, loss_of, BATCH_SIZE, _DEPTH,
            None if self.is_exact else torch.bfloat16, learning_rate=1e-3, eps=EPS,
        )  # fmt: skip


def make_trainer(run: ShortRun, device: str) -> Trainer:
    """Return the Trainer of a short run."""
    settings = {"epochs": len(run.frozen), **run.settings}
    return loops.make_trainer(run.case(), device, freeze=FreezeSchedule(run.frozen), **settings)


def trained(run: ShortRun, device: str, *, most_steps: int | None = None) -> Outcome:
    """Train by the Trainer, on all processes that were started, to the end or for some steps."""
    with make_trainer(run, device) as trainer:
        trainer.begin()
        results: list[StepResult] = []
        lengths: list[int] = []
        while not trainer.is_over and len(results) != most_steps:
            results.append(trainer.step())
            assert trainer.decision is not None
            lengths.append(trainer.decision.plan.length)
        losses = [float(result.loss) for result in results]
        weights = {name: tensor.cpu().clone() for name, tensor in trainer.state_dict().items()}
        in_turn = tuple(length for length, _ in itertools.groupby(lengths))
        return Outcome(losses, weights, trainer.report.cache_hits, in_turn)


def trained_plainly(run: ShortRun, device: str, *, keeps: bool = False) -> Outcome:
    """Train by the plain loop, or by the ideal one."""
    return (loops.Ideal if keeps else loops.Plain)(run.case(), device).trained(run.frozen)


def trained_elsewhere(
    runs: Sequence[ShortRun], device: str, folder: str, *, num_slots: int, **environment: str
) -> list[Outcome]:
    """Train one run after the other in new processes, with these variables in their environment.

    Raises:
        WorkerFailedError: a process failed; what it printed says why.
    """
    paths = [Path(folder, f"{number}.pt") for number in range(len(runs))]
    launch(_train_here, (runs, device, paths, environment), num_slots=num_slots)
    return [Outcome(**torch.load(path)) for path in paths]


def _train_here(
    runs: Sequence[ShortRun], device: str, paths: Sequence[Path], environment: dict[str, str]
) -> None:
    os.environ.update(environment)  # The driver reads it as this process first uses it.
    make_repeatable()
    for run, path in zip(runs, paths, strict=True):
        outcome = trained(run, device)
        if os.environ["RANK"] == "0":
            torch.save(vars(outcome), path)


def make_repeatable() -> None:
    """Choose kernels that give the same bits each time."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # Before cuBLAS is first used.
    torch.use_deterministic_algorithms(True)


def two_until_frozen(situation: PlanSituation) -> Any:
    """Plan a pipeline of two stages, and of one where layers are frozen."""
    length = 1 if situation.request.num_frozen else 2
    request = replace(situation.request, lengths=(length,))
    return fastest_plan(replace(situation, request=request, current=None))


def compared(ours: Outcome, theirs: Outcome, allowed: tuple[float, float]) -> dict[str, Any]:
    """Compare all losses and weights.

    Args:
        allowed: EXACTLY or IN_FLOAT64.
    Raises:
        ValueError: one of them differs by more; the message names the first.
    """
    most, (absolute, relative) = 0.0, allowed
    mine, others = (
        {f"the loss of step {n}": torch.tensor(loss).double() for n, loss in enumerate(one.losses)}
        | one.weights
        for one in (ours, theirs)
    )
    for name in mine | others:
        difference = float((mine[name].double() - others[name].double()).abs().max())
        most = max(most, difference)
        limit = absolute + relative * float(others[name].abs().max())
        if not difference <= limit:
            raise ValueError(f"{name} differs by {difference:.3g}; at most {limit:.3g} may be")
    return {"steps": len(ours.losses), "differ_by": most}


def compared_losses(ours: Outcome, theirs: Outcome, *, relative: float = 1e-2) -> dict[str, Any]:
    """Compare all losses, whose roundings to bfloat16 differ.

    Raises:
        ValueError: they differ by more.
    """
    pairs = list(zip(ours.losses, theirs.losses, strict=True))
    most = max(abs(mine - other) / abs(other) for mine, other in pairs)
    if not most <= relative:
        raise ValueError(f"losses differ by {most:.3g} of themselves; at most {relative:g} may be")
    return {"steps": len(pairs), "losses_differ_by": most}


def that_reads(outcome: Outcome) -> Outcome:
    """Return an outcome of a run that has read rows of its cache.

    Raises:
        ValueError: it has not, so that nothing would be proven of the cache.
    """
    if not outcome.rows_read:
        raise ValueError("no row of the cache was read: the planner found computing faster")
    return outcome
