"""Keep fixed how losses are joined over micro-batches and replicas, each bug with its story.

What trains is compared, parameter by parameter, with a loop that sees every batch whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from autodp.sampler import EpochSampler, shuffled
from autopipe.loss import Loss
from pipetransformer import Trainer
from tests.helpers.models import IGNORED, NUM_CLASSES, tiny_data, tiny_model
from tests.helpers.pool import Pool

BATCH_SIZE = 8


LossMaker = Callable[[], Any]


@dataclass(frozen=True)
class Trained:
    """Hold the loss of every step, and the final weights."""

    losses: list[float]
    weights: Mapping[str, Tensor]


def sgd(named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    """Build what shows a gradient's scale, unlike Adam."""
    return SGD([parameter for _, parameter in named], lr=0.1)


def some_ignored() -> TensorDataset:
    """Leave out so many targets that some micro-batches have none."""
    x, y = tiny_data().tensors
    return TensorDataset(x, y.where(torch.arange(len(y)) % 3 == 0, IGNORED))


def make_trainer(loss_fn: Any, data: TensorDataset, **settings: Any) -> Trainer:
    return Trainer(
        tiny_model(),
        data,
        loss_fn=loss_fn,
        optimizer=sgd,
        global_batch_size=BATCH_SIZE,
        progress=False,
        **{"pipeline_length": 1, "micro_batches": 4, **settings},
    )


def train(make_loss: LossMaker, data: TensorDataset, settings: dict[str, Any]) -> Trained:
    """Train an epoch in micro-batches, on as many replicas as there are ranks."""
    with make_trainer(make_loss(), data, **settings) as trainer:
        losses = [trainer.step().loss for _ in range(3)]
        return Trained(losses, {k: t.clone() for k, t in trainer.state_dict().items()})


def train_by_hand(loss_fn: Any, data: TensorDataset) -> Trained:
    """Train the same on whole batches."""
    model, losses = tiny_model(), []
    optimizer = sgd(list(model.named_parameters()))
    sampler = EpochSampler(len(data), shuffled(len(data), seed=0))
    for step in range(3):
        x, y = data[sampler.global_batch(0, step * BATCH_SIZE, BATCH_SIZE)]
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, model.state_dict())


def check(trained: Trained, make_loss: LossMaker, data: TensorDataset) -> None:
    """Compare with the loop by hand; float64 leaves rounding alone below the tolerance."""
    expected = train_by_hand(make_loss(), data)
    assert trained.losses == pytest.approx(expected.losses, rel=1e-10, abs=1e-12)
    assert trained.weights.keys() == expected.weights.keys()
    for name, weight in trained.weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=1e-10, atol=1e-12)


def weighted() -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64))


def weighted_and_smoothed() -> nn.Module:
    weight = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
    return nn.CrossEntropyLoss(weight=weight, label_smoothing=0.2)


def test_class_weights_weigh_over_the_whole_batch() -> None:
    # torch divides by the weights of a micro-batch's targets; these means were then joined by
    # their numbers of samples, as if all micro-batches weighed alike.
    for make_loss in (weighted, weighted_and_smoothed):
        data = some_ignored() if make_loss is weighted_and_smoothed else tiny_data()
        check(train(make_loss, data, {}), make_loss, data)


LIGHT = torch.tensor([0.001, 0.002, 0.005], dtype=torch.float64)


def light_pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh the classes, as a user's (sum, count)."""
    return F.cross_entropy(output, target, LIGHT, reduction="sum"), LIGHT[target].sum()


def light_mean() -> nn.Module:
    return nn.CrossEntropyLoss(weight=LIGHT)


def test_a_batch_may_weigh_less_than_one_sample() -> None:
    # Sums were divided by max(count, 1), so that a step and an evaluation reported a hundredth of
    # the loss; the gradients were right.
    check(train(lambda: light_pair, tiny_data(), {}), light_mean, tiny_data())
    with make_trainer(light_pair, tiny_data()) as trainer:
        x, y = tiny_data().tensors
        metrics = trainer.evaluate(TensorDataset(x[:3], y[:3]))
        expected = light_mean()(tiny_model()(x[:3]), y[:3]).item()
        assert metrics["loss"] == pytest.approx(expected, rel=1e-10)


def test_ignored_targets_count_in_no_micro_batch_of_any_replica(two_ranks: Pool) -> None:
    # The mean over a micro-batch without other targets is 0 / 0, and ended the run; a smaller
    # number of them in one micro-batch than in another made each of them count for more.
    for settings in ({"micro_batches": 4}, {"micro_batches": 2, "pipeline_length": 2}):
        outcomes = two_ranks.run(train, nn.CrossEntropyLoss, some_ignored(), settings)
        check(outcomes[0], nn.CrossEntropyLoss, some_ignored())


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    """Ignore targets and say nothing of it."""
    return F.cross_entropy(output, target)


def own_pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Say what counts, as a refusal of own_loss asks for."""
    return F.cross_entropy(output, target, reduction="sum"), (target != IGNORED).sum()


def refused(settings: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="depends on how a batch is split") as caught:
        train(lambda: own_loss, some_ignored(), settings)
    return str(caught.value)


def test_a_function_whose_means_do_not_join_is_refused_in_the_same_step_on_every_rank(
    two_ranks: Pool,
) -> None:
    # Nothing asked a user's own function whether its mean is one over samples.
    for settings in ({"micro_batches": 4}, {"micro_batches": 2, "pipeline_length": 2}):
        for text in two_ranks.run(refused, settings):
            assert "the loss 'own_loss'" in text and "return (sum, count)" in text
    trained = train(lambda: own_pair, some_ignored(), {})
    check(trained, nn.CrossEntropyLoss, some_ignored())


def test_a_refused_step_leaves_the_weights_as_they_were() -> None:
    # What two samples before the start do not show is found in the first step that does.
    nothing = mock.Mock(is_random="", plainly_random=set())
    unseen = mock.patch("pipetransformer.checks.start.probe_sublayers", return_value=nothing)
    with unseen, make_trainer(own_loss, some_ignored()) as trainer:
        with pytest.raises(ValueError, match=r"parts of 2, 2, 2, 2"):
            trainer.step()
        for name, weight in trainer.state_dict().items():
            assert torch.equal(weight, tiny_model().state_dict()[name]), name


def noted_steps() -> Iterator[tuple[list[float], dict[str, Tensor]]]:
    """Train with a function that is probed, and with the same that is not."""
    for is_exact in (False, True):

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output, F.one_hot(target, NUM_CLASSES).to(output))

        with Trainer(
            tiny_model(dropout=0.3),
            tiny_data(),
            loss_fn=Loss(loss_fn, is_exact=is_exact),
            global_batch_size=BATCH_SIZE,
            micro_batches=3,
            progress=False,
        ) as trainer:
            yield [trainer.step().loss for _ in range(4)], trainer.state_dict()


def test_the_probe_changes_no_bit_of_what_is_trained() -> None:
    (losses, weights), (plain_losses, plain_weights) = noted_steps()
    assert losses == plain_losses
    assert all(torch.equal(weights[name], plain_weights[name]) for name in plain_weights)


def test_the_accuracy_leaves_out_the_targets_that_the_loss_ignores() -> None:
    # They counted as wrong answers: -100 is no class.
    x, y = tiny_data().tensors
    answers = tiny_model()(x).argmax(dim=1)
    for ignored in (IGNORED, 1):
        target = y.where(torch.arange(len(y)) % 3 == 0, ignored)
        counts = target != ignored
        data = TensorDataset(x, target)
        with make_trainer(nn.CrossEntropyLoss(ignore_index=ignored), data) as trainer:
            metrics = trainer.evaluate(data)
        right = (answers == target) & counts
        assert metrics["accuracy"] == pytest.approx(float(right.sum() / counts.sum()), rel=1e-6)


def test_an_evaluation_that_no_target_counts_in_has_no_value() -> None:
    # It was a loss of 0, the best there is.
    x, y = tiny_data().tensors
    data = TensorDataset(x, torch.full_like(y, IGNORED))
    with make_trainer(nn.CrossEntropyLoss(), tiny_data()) as trainer:
        assert all(math.isnan(value) for value in trainer.evaluate(data).values())


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    # They were in no optimizer, and nothing said so.
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output / self.temperature, target)

    with pytest.raises(ValueError, match=r"Tempered has parameters of its own \(temperature\)"):
        make_trainer(Tempered(), tiny_data())
