"""Prove that runs with compiled blocks equal eager ones, across freezes, thaws and pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from freeze import FreezeSchedule
from pipetransformer import Trainer, named_optimizer
from tests.helpers.inspection import stage_of
from tests.helpers.marks import slow
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import Pool
from tests.helpers.texts import pad_to_longest, sentences, tiny_bert

FROZEN = (0, 2, 0)
"""Layers by epoch: two freeze, and thaw."""
COMPILED = {"compile": True, "compile_backend": "aot_eager"}
SGD = named_optimizer("sgd", 0.1, momentum=0.9)


@dataclass
class Outcome:
    """Hold a run's losses, its gradients by step and name, and its weights.

    Args:
        graphs: how many there were after each step.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    graphs: list[int] = field(default_factory=list)


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def run(trainer: Trainer) -> Outcome:
    """Train to the end."""
    found = Outcome()
    with trainer:
        while not trainer.is_over:
            found.losses.append(trainer.step().loss)
            held = {n: p.grad for n, p in stage_of(trainer).trained.parameters.items()}
            found.gradients.append({n: g.clone() for n, g in held.items() if g is not None})
            found.graphs.append(num_graphs())
        found.weights = {name: t.clone() for name, t in trainer.state_dict().items()}
    return found


def assert_equal(one: Outcome, other: Outcome, *, rtol: float = 1e-7, atol: float = 1e-9) -> None:
    """Compare all losses, gradients and weights; graphs of aot_eager run the same kernels."""
    torch.testing.assert_close(
        torch.tensor(one.losses), torch.tensor(other.losses), rtol=rtol, atol=atol
    )
    for mine, theirs in zip(
        [*one.gradients, one.weights], [*other.gradients, other.weights], strict=True
    ):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name], tensor, rtol=rtol, atol=atol, msg=name)


def of_texts(**settings: Any) -> Trainer:
    """Train on texts of unequal lengths, and evaluate."""
    usual = {"epochs": 3, "global_batch_size": 8, "pipeline_length": 1, "progress": False}
    # Where batches are cut follows from what is measured, and each size of 1 has a graph.
    usual["micro_batches"] = 1
    return Trainer(
        tiny_bert(),
        sentences(22),
        eval_dataset=sentences(7),
        collate_fn=pad_to_longest,
        freeze=FreezeSchedule(FROZEN),
        optimizer=SGD,
        **{**usual, **settings},
    )


def of_classes(**settings: Any) -> Trainer:
    usual = {"epochs": 3, "global_batch_size": 8, "pipeline_length": 1, "optimizer": SGD}
    usual |= {"evaluate_every_epochs": 0, "freeze": FreezeSchedule(FROZEN)}
    return tiny_trainer(**{**usual, **settings})


# Slow: what a process has compiled before changes how many graphs torch makes.
@pytest.mark.slow
def test_a_freeze_adds_a_graph_or_two_and_a_thaw_lengths_evaluations_and_the_prefix_none() -> None:
    eager, before = run(of_texts()), num_graphs()
    compiled = run(of_texts(**COMPILED))
    assert_equal(compiled, eager)
    per_epoch = len(compiled.graphs) // 3
    first, frozen, thawed = (compiled.graphs[i] for i in (0, per_epoch, 2 * per_epoch))
    assert compiled.graphs[per_epoch - 1] == first > before
    # The first block above the frozen ones has an input that needs no gradient.
    # A process that has compiled before may guard on one thing more, and make two of it.
    assert first < frozen <= first + 2
    assert thawed == compiled.graphs[-1] == frozen


@pytest.mark.parametrize(
    "settings",
    [
        slow({"micro_batch_size": 3, "dropout": 0.3}),
        slow({"precision": "bf16", "dtype": torch.float32}),
        slow({"activation_checkpointing": True, "dropout": 0.3}),
    ],
    ids=["dropout", "bf16", "checkpointing"],
)
def test_one_process_trains_as_eager_with_dropout_in_bf16_and_where_forwards_run_again(
    settings: Mapping[str, Any],
) -> None:
    options = dict(settings)
    dtype, dropout = options.pop("dtype", torch.float64), options.pop("dropout", 0.0)
    eager, compiled = (
        run(
            of_classes(
                model=tiny_model(dropout=dropout, dtype=dtype),
                data=tiny_data(dtype=dtype),
                **options,
                **compiling,
            )
        )
        for compiling in ({}, COMPILED)
    )
    assert_equal(compiled, eager)
    assert compiled.graphs[-1] > eager.graphs[-1]


def train_in_pipelines(settings: Mapping[str, Any]) -> Outcome:
    return run(of_classes(model=tiny_model(dropout=0.3), **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_length": 2, "micro_batch_size": 2},
        {"pipeline_length": 1, "micro_batch_size": 2},
        {"pipeline_length": 2, "micro_batch_size": 4, "weight_versions": "stashed"},
    ],
    ids=["K=2", "R=2", "stashed"],
)
@pytest.mark.slow
def test_two_processes_train_as_eager_with_the_same_dropout(
    two_ranks: Pool, settings: Mapping[str, Any]
) -> None:
    eager = two_ranks.run(train_in_pipelines, dict(settings))
    compiled = two_ranks.run(train_in_pipelines, {**settings, **COMPILED}, timeout_s=300.0)
    for one, other in zip(compiled, eager, strict=True):
        assert_equal(one, other)
        assert one.graphs[-1] > other.graphs[-1]


@pytest.mark.slow
def test_inductors_graphs_have_the_losses_and_gradients_of_eager_ones() -> None:
    eager, compiled = (
        run(of_texts(compile=compiles, epochs=3, max_steps=9)) for compiles in (False, True)
    )
    assert_equal(compiled, eager, rtol=1e-5, atol=1e-8)
