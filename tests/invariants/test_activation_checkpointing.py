"""Prove that forwards which run again in the backward change no bit, however the run is spread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopipe.plan import PipelinePlan
from freeze import JOURNAL_FILE, FreezeSchedule
from pipetransformer import Trainer
from tests.helpers.delayed import delayed, stream
from tests.helpers.inspection import elastic_of
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, once
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.plain_scenario import plain
from tests.helpers.pool import Pool
from tests.helpers.resumes import EVERY_2_STEPS, assert_resumes_with_the_same_bits, fit_until
from tests.helpers.scenario import (
    Deep,
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    assert_same_bits,
    merge,
    train,
)


def scenario(shapes: Mapping[int, Shape], *, again: bool = True, **options: Any) -> Scenario:
    """Describe a run with dropout whose layers freeze from epoch to epoch."""
    shapes = {step: replace(shape, recomputes=again) for step, shape in shapes.items()}
    return Scenario(shapes, **{"frozen": (0, 1, 2), "dropout": 0.2, **options})


def run(pool: Pool | None, told: Scenario) -> Outcome:
    return train(told) if pool is None else merge(pool.run(train, told))


def both(pool: Pool | None, shapes: Mapping[int, Shape], **options: Any) -> list[Outcome]:
    """Train with repeated forwards, and without."""
    return [run(pool, scenario(shapes, again=again, **options)) for again in (True, False)]


@pytest.mark.parametrize("shapes", [slow({0: Shape(1, 1)}), {0: Shape(1, 3, "gpipe")}], ids=str)
def test_one_process_trains_the_same_bits_with_dropout_across_freezes(
    shapes: dict[int, Shape],
) -> None:
    with_repetition, without = both(None, shapes)
    assert_same_bits(with_repetition, without)
    assert with_repetition.extra["hits"] > 0


@pytest.mark.parametrize(
    "shapes",
    [
        slow({0: Shape(2, 3)}),
        slow({0: Shape(2, 2, "gpipe")}),
        slow({0: Shape(1, 2)}),
        {0: Shape(2, 2), 4: Shape(1, 1), 8: Shape(2, 3, "gpipe")},
    ],
    ids=str,
)
def test_two_processes_train_the_same_bits_with_dropout_across_freezes(
    two_ranks: Pool, shapes: dict[int, Shape]
) -> None:
    assert_same_bits(*both(two_ranks, shapes))


@pytest.mark.slow
def test_stages_of_several_workers_train_the_same_bits(four_ranks: Pool) -> None:
    settings = {"stage_workers": (2, 1, 1)}
    assert_same_bits(*both(four_ranks, {0: Shape(3, 4)}, settings=settings))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.slow
def test_low_precision_trains_the_same_bits(two_ranks: Pool, precision: str) -> None:
    options: dict[str, Any] = {"dtype": "float32", "settings": {"precision": precision}}
    assert_same_bits(*both(two_ranks, {0: Shape(2, 2)}, **options))


def test_repeated_forwards_train_as_a_plain_loop_does(two_ranks: Pool) -> None:
    # A deep model, of which the user trains a part.
    told = scenario({0: Shape(2, 3)}, dropout=0.0, deep=Deep(fixed=("mix2",)))
    assert_equal(run(two_ranks, told), plain(told))


def test_a_pipeline_without_flushes_repeats_forwards_with_their_own_weights(
    two_ranks: Pool,
) -> None:
    told = stream(Shape(2, 2, recomputes=True), "stashed")
    assert_equal(run(two_ranks, told), delayed(told))


@pytest.mark.slow
def test_a_run_resumes_with_the_same_bits(two_ranks: Pool, tmp_path: Path) -> None:
    told = scenario({0: Shape(2, 2)}, settings=EVERY_2_STEPS)
    assert_resumes_with_the_same_bits(two_ranks, tmp_path, told, fit_until, 7)


def auto(**settings: Any) -> Trainer:
    """Train on whole batches of 26 samples, whose activations outweigh the weights."""
    return tiny_trainer(
        tiny_model(num_blocks=8, dropout=0.2),
        tiny_data(num_samples=208),
        **{"global_batch_size": 208, "micro_batches": 1, "epochs": 6, "seed": 3, **settings},
    )


@measuring(once)
def outcome_of(**settings: Any) -> tuple[list[float], dict[str, Tensor], list[PipelinePlan]]:
    """Return each step's loss, the weights at the end, and the plan of each step."""
    losses, plans = [], []
    with auto(**settings) as trainer:
        while not trainer.is_over:
            losses.append(trainer.step().loss)
            decision = elastic_of(trainer).decision
            assert decision is not None
            plans.append(decision.plan)
        return losses, {n: t.clone() for n, t in trainer.state_dict().items()}, plans


def test_auto_trains_the_same_bits_where_nothing_fits_without_and_stops_once_layers_froze(
    tmp_path: Path,
) -> None:
    free, weights, plans = outcome_of(freeze=FreezeSchedule((0, 0, 6)))
    assert not any(plan.recomputes for plan in plans)
    (most,), (least,) = (
        plans[0].peak_bytes,
        outcome_of(activation_checkpointing=True)[2][0].peak_bytes,
    )
    limit = (most + least) // 2
    with pytest.raises(ValueError, match="no plan fits memory_limit_bytes"):
        outcome_of(activation_checkpointing=False, memory_limit_bytes=limit)
    limited: dict[str, Any] = {"memory_limit_bytes": limit, "freeze": FreezeSchedule((0, 0, 6))}
    folder = {"folder": tmp_path, "checkpoint_every_steps": 1, "resume": "auto"}
    losses, ours, plans = outcome_of(**limited, **folder)
    assert [plan.recomputes for plan in plans] == [True, True, False, False, False, False]
    assert all(max(plan.peak_bytes) <= limit for plan in plans)
    assert losses == free
    assert ours.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, ours[name]), name


@measuring(once)
def test_a_plan_that_recomputes_is_kept_in_journal_and_resume(tmp_path: Path) -> None:
    saving: dict[str, Any] = {
        "folder": tmp_path, "checkpoint_every_steps": 1, "resume": "auto",
        "activation_checkpointing": True, "freeze_interval_epochs": 6,
    }  # fmt: skip
    with auto(**saving) as trainer:
        trainer.step()
        first = elastic_of(trainer).decision
    journal = [json.loads(line) for line in (tmp_path / JOURNAL_FILE).read_text().splitlines()]
    assert [entry["decision"]["plan"]["recomputes"] for entry in journal] == [True]
    with auto(**saving) as trainer:
        trainer.step()
        assert elastic_of(trainer).decision == first and first is not None
        assert first.plan.recomputes
    # Another setting needs another plan.
    with auto(**{**saving, "activation_checkpointing": False}) as trainer:
        trainer.step()
        again = elastic_of(trainer).decision
        assert again is not None and not again.plan.recomputes


def test_a_trainer_that_recomputes_verifies_its_sublayers_so() -> None:
    with auto(activation_checkpointing=True) as trainer:
        assert trainer.verify().num_tensors > 0
