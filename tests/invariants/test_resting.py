"""Prove that layers that rest are those of a plain loop with requires_grad off, and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import pytest
from torch import nn

from autodp.sampler import EpochSampler, shuffled
from freeze import FreezeContext, FreezeDecision, FreezePolicy, Replay
from pipetransformer import Trainer
from pipetransformer.optimizer import take_state
from pipetransformer.report import read_decisions
from tests.measured import measuring, once
from tests.pool import Pool
from tests.scenario import (
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    assert_same_bits,
    build_adamw,
    latest,
    mean_loss,
    merge,
    run_to_end,
    slow_start,
)

TABLE: dict[int, tuple[int, tuple[int, ...]]] = {
    0: (0, ()), 3: (0, (1, 3)), 6: (1, (2,)), 10: (0, (3,)), 12: (2, ()),
}  # fmt: skip
"""Frozen layers, and those that rest, by the steps from which they hold."""


@final
class Table(FreezePolicy):
    def decide(self, context: FreezeContext) -> FreezeDecision:
        num_frozen, resting = latest(TABLE, context.step)
        return FreezeDecision(num_frozen, "table", resting)


def trainer_of(scenario: Scenario, policy: FreezePolicy, **settings: Any) -> Trainer:
    model, data, loss_fn = scenario.problem()
    return Trainer(
        model, data, loss_fn=loss_fn, optimizer=build_adamw, freeze=policy,
        **{**scenario.options, **settings},
    )  # fmt: skip


@measuring(once)
def fit(scenario: Scenario, folder: Path | None = None) -> Outcome:
    """Train to the end."""
    with trainer_of(scenario, Table(), folder=folder) as trainer:
        return run_to_end(trainer, None)


@measuring(once)
def repeat(scenario: Scenario, folder: Path) -> Outcome:
    """Train to the end as another run did."""
    with trainer_of(scenario, Replay(folder)) as trainer:
        return run_to_end(trainer, None)


@measuring(once)
def fit_in_two(scenario: Scenario, folder: Path) -> Outcome:
    """Train with a stop while layers rest."""
    saving = {"checkpoint_every_steps": 1, "resume": "auto", "folder": folder}
    with trainer_of(scenario, Table(), **saving) as trainer:
        begun = run_to_end(trainer, 5)
    with trainer_of(scenario, Table(), **saving) as trainer:
        outcome = run_to_end(trainer, None)
    outcome.losses[:0] = begun.losses
    return outcome


def plainly(scenario: Scenario) -> Outcome:
    """Set requires_grad by hand in a plain loop."""
    layered, data, loss_fn = scenario.problem()
    options, model = scenario.options, layered.model
    named = dict(model.named_parameters())
    optimizer = build_adamw(list(named.items()))
    sampler = EpochSampler(len(data), shuffled(len(data), seed=options["seed"]))
    size = options["global_batch_size"]
    per_epoch, losses = -(-len(data) // size), []
    for step in range(per_epoch * options["epochs"]):
        num_frozen, resting = latest(TABLE, step)
        for index, sublayer in enumerate(layered.sublayers):
            trains = sublayer.layer >= num_frozen and sublayer.layer not in resting
            for name in layered.tensors(index):
                named[name].requires_grad_(trains)
        epoch, position = divmod(step, per_epoch)
        ids = sampler.global_batch(epoch, position * size, size)
        optimizer.zero_grad(set_to_none=True)
        loss = mean_loss(model, data, ids, loss_fn)
        loss.backward()
        nn.utils.clip_grad_norm_(named.values(), options["max_grad_norm"])
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * slow_start(step, 0)
        optimizer.step()
        losses.append(loss.item())
    return Outcome(losses, dict(model.state_dict()), take_state(optimizer, named))


@pytest.fixture(scope="module")
def truth() -> Outcome:
    return plainly(Scenario({0: Shape(1, 2)}))


@pytest.mark.parametrize("shape", [Shape(1, 2), Shape(2, 3), Shape(2, 3, "gpipe")])
def test_layers_rest_as_in_a_plain_loop(two_ranks: Pool, truth: Outcome, shape: Shape) -> None:
    assert_equal(merge(two_ranks.run(fit, Scenario({0: shape}))), truth)


def test_they_rest_in_stages_of_their_own(four_ranks: Pool, truth: Outcome) -> None:
    # Each stage has one layer, or two: some have nothing to train at times.
    outcomes = four_ranks.run(fit, Scenario({0: Shape(4, 2), 10: Shape(2, 2)}))
    assert_equal(merge(outcomes), truth)


def test_a_resume_goes_on_with_them(two_ranks: Pool, tmp_path: Path) -> None:
    scenario = Scenario({0: Shape(2, 2)}, dtype="float32")
    whole = two_ranks.run(fit, scenario, tmp_path / "whole")
    assert_same_bits(merge(two_ranks.run(fit_in_two, scenario, tmp_path / "cut")), merge(whole))


def test_a_run_can_be_repeated_with_them(tmp_path: Path) -> None:
    scenario = Scenario({0: Shape(1, 2)}, dtype="float32")
    assert_same_bits(fit(scenario, tmp_path), repeat(scenario, tmp_path))
    decisions = {one.context.step: one for one in read_decisions(tmp_path)}
    seen = decisions[4].context
    assert seen.resting == (1, 3)
    norms = [layer.gradient_norm for layer in seen.layers]
    assert norms[1] is None is norms[3] and norms[0] is not None is not norms[2]
    assert decisions[4].reason == "keep: table"


@pytest.mark.parametrize("resting", [(0,), (-1,), (5,)])
def test_layers_that_cannot_rest_are_refused(resting: tuple[int, ...]) -> None:
    class Wrong(FreezePolicy):
        def decide(self, context: FreezeContext) -> FreezeDecision:
            return FreezeDecision(0, "wrong", resting)

    with pytest.raises(ValueError, match="only layers above the lowest"):
        with trainer_of(Scenario({0: Shape(1, 2)}), Wrong()) as trainer:
            trainer.step()
