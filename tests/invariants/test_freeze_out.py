"""Prove that a policy's learning rates by layer are those of a plain loop, on any pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autodp.sampler import EpochSampler, shuffled
from freeze import FreezeOut, Replay
from pipetransformer import Trainer
from pipetransformer.optimizer import take_state
from tests.measured import measuring, once
from tests.pool import Pool
from tests.scenario import (
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    build_adamw,
    freeze_plainly,
    mean_loss,
    merge,
    run_to_end,
)


def trainer_of(scenario: Scenario, **settings: Any) -> Trainer:
    model, data, loss_fn = scenario.problem()
    return Trainer(
        model, data, loss_fn=loss_fn, optimizer=build_adamw, freeze=FreezeOut(0.6),
        **{**scenario.options, "learning_rate_schedule": "constant", **settings},
    )  # fmt: skip


@measuring(once)
def fit(scenario: Scenario, **settings: Any) -> Outcome:
    """Train to the end."""
    with trainer_of(scenario, **settings) as trainer:
        return run_to_end(trainer, None)


@measuring(once)
def fit_in_two(scenario: Scenario, folder: Path) -> Outcome:
    """Train with a stop on the way."""
    saving = {"checkpoint_every_steps": 1, "resume": "auto", "folder": folder}
    with trainer_of(scenario, **saving) as trainer:
        begun = run_to_end(trainer, 7)
    with trainer_of(scenario, **saving) as trainer:
        outcome = run_to_end(trainer, None)
    outcome.losses[:0] = begun.losses
    return outcome


def plainly(scenario: Scenario) -> Outcome:
    """Train in a hand-written loop with one parameter group a layer and decay."""
    layered, data, loss_fn = scenario.problem()
    options, model, policy = scenario.options, layered.model, FreezeOut(0.6)
    named = dict(model.named_parameters())
    layer_of = {
        name: sublayer.layer
        for index, sublayer in enumerate(layered.sublayers)
        for name in layered.tensors(index)
    }
    top = layered.num_layers
    optimizer = torch.optim.AdamW(
        [
            {"params": [p], "layer": layer_of[n], "weight_decay": 0.1 * n.endswith("weight")}
            for n, p in named.items()
        ]
    )
    sampler = EpochSampler(len(data), shuffled(len(data), seed=options["seed"]))
    per_epoch = -(-len(data) // options["global_batch_size"])
    num_steps, losses = per_epoch * options["epochs"], []
    for step in range(num_steps):
        epoch, position = divmod(step, per_epoch)
        size = options["global_batch_size"]
        ids = sampler.global_batch(epoch, position * size, size)
        # An epoch's last batch is smaller; time counts samples.
        done = (epoch * per_epoch + position) / num_steps
        freeze_plainly(layered, named, sum(policy.end(i, top) <= done for i in range(top)))
        optimizer.zero_grad(set_to_none=True)
        loss = mean_loss(model, data, ids, loss_fn)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), options["max_grad_norm"])
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * policy.learning_rate_scale(group["layer"], top, done)
        optimizer.step()
        losses.append(loss.item())
    return Outcome(losses, dict(model.state_dict()), take_state(optimizer, named))


@pytest.fixture(scope="module")
def truth() -> Outcome:
    return plainly(Scenario({0: Shape(1, 2)}))


@pytest.mark.parametrize("length", [1, 2])
def test_layers_learn_at_their_own_rates(two_ranks: Pool, truth: Outcome, length: int) -> None:
    outcomes = two_ranks.run(fit, Scenario({0: Shape(length, 2)}))
    assert_equal(merge(outcomes), truth)


def test_a_resumed_run_goes_on_at_them(two_ranks: Pool, tmp_path: Path, truth: Outcome) -> None:
    outcomes = two_ranks.run(fit_in_two, Scenario({0: Shape(2, 2)}), tmp_path)
    assert_equal(merge(outcomes), truth)


def test_its_run_is_not_repeated_from_a_journal_that_lacks_the_rates(
    two_ranks: Pool, tmp_path: Path
) -> None:
    two_ranks.run(fit_in_two, Scenario({0: Shape(1, 2)}), tmp_path)
    with pytest.raises(ValueError, match="set learning rates by layer, too"):
        Replay(tmp_path)
