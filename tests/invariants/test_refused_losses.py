"""Prove that losses which do not join over parts of a batch, or teach nothing, are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopipe.loss import Loss
from tests.helpers.loops import TINY, make_trainer
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.pool import Pool


def test_counts_and_totals_of_small_dtypes_are_added_up_precisely() -> None:
    # A running sum in bfloat16 stands still from 256 on: gradients came out 3.8 % too large.
    def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total = nn.functional.cross_entropy(output, target, reduction="sum")
        return total, torch.tensor(40.0 * len(target), dtype=torch.bfloat16)

    settings = {"global_batch_size": 26, "micro_batches": 26}
    norms = []
    for micro_batches in (1, 26):
        job = replace(TINY, loss_fn=counted, settings={**settings, "micro_batches": micro_batches})
        # Of the parts: their counts are whole, those of all together are rounded.
        unseen = mock.patch("autopipe.loss.split_probe._joins", return_value=True)
        with unseen, make_trainer(job) as trainer:
            norms.append(trainer.step().gradient_norm)
    assert norms[1] == pytest.approx(norms[0], rel=2**-8)


def balanced(output: Tensor, target: Tensor) -> Tensor:
    """Weigh two losses against one another by their present values."""
    one = F.cross_entropy(output, target)
    other = output.square().mean()
    return one + other * (one / other).detach()


def weighted(output: Tensor, target: Tensor) -> Tensor:
    """Weigh classes, and divide by the weights of a batch."""
    weight = torch.tensor([1.0, 5.0, 0.5], dtype=output.dtype)
    return F.cross_entropy(output, target, weight=weight)


def test_a_loss_whose_gradient_alone_depends_on_the_split_is_refused() -> None:
    # Its value joins, so the probe let it pass (weights off by 0.95).
    with (
        make_trainer(replace(TINY, loss_fn=balanced)) as trainer,
        pytest.raises(ValueError, match="its gradient by the output does not"),
    ):
        trainer.step()


def refused_with_one_sample_each() -> str:
    """Train on as many samples as there are replicas."""
    settings = {"pipeline_length": 1, "global_batch_size": 2, "micro_batches": 1}
    with (
        make_trainer(replace(TINY, loss_fn=weighted, settings=settings)) as trainer,
        pytest.raises(ValueError, match="depends on how a batch is split") as caught,
    ):
        trainer.step()
    return str(caught.value)


def test_a_loss_is_probed_also_where_a_replica_has_one_sample(two_ranks: Pool) -> None:
    # The probe saw one sample at a time, and let everything pass (loss off by 1.85).
    assert all("weighted" in text for text in two_ranks.run(refused_with_one_sample_each))


def penalised() -> str:
    """Train with a loss that has captured the weights; return what is said."""
    model = tiny_model()
    weights = list(model.parameters())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + 0.1 * sum(p.square().sum() for p in weights)

    try:
        make_trainer(replace(TINY, build=lambda: model, loss_fn=loss)).close()
    except ValueError as error:
        return str(error)
    return ""


def test_a_loss_that_has_captured_weights_is_refused_where_they_move(two_ranks: Pool) -> None:
    # The penalty stayed what it was at the start, and had no gradient (loss off by 0.75).
    for text in two_ranks.run(penalised):
        assert text.startswith("the loss 'penalised.<locals>.loss' has captured '0.weight'")
    assert penalised() == "", "one process moves nothing"


class Ramp:
    """Weigh the first calls twice."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) * (1 + (self.calls <= 8))


def test_a_loss_that_counts_its_calls_is_refused() -> None:
    # It counted micro-batches and what tried it out (first loss 0.68 instead of 1.37).
    with pytest.raises(ValueError, match="'Ramp' changes a number that it holds in every call"):
        with make_trainer(replace(TINY, loss_fn=Ramp())) as trainer:
            trainer.step()


class Centred(nn.Module):
    """Keep the last loss, and, in a buffer or an attribute, how often it was called."""

    def __init__(self, counts_in: str) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.attribute = torch.tensor(0)
        self.last, self._counts_in = torch.zeros(()), counts_in

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self._counts_in == "buffer":
            self.calls += 1
        elif self._counts_in == "attribute":
            self.attribute = self.attribute + 1
        loss = F.cross_entropy(output, target)
        self.last = loss.detach()
        # Too little for a probe of two samples.
        return loss * (1 + 1e-9 * (self.calls + self.attribute))


@pytest.mark.parametrize("counts_in", ["buffer", "attribute"])
def test_a_loss_that_counts_its_calls_in_a_tensor_is_refused(counts_in: str) -> None:
    # After 12 steps of one micro-batch it had counted 76 calls.
    loss = Centred(counts_in)
    with pytest.raises(ValueError, match="'Centred' changes a tensor that it holds in every call"):
        with make_trainer(replace(TINY, loss_fn=loss)) as trainer:
            trainer.step()


def test_a_loss_that_keeps_its_last_value_trains() -> None:
    with make_trainer(replace(TINY, loss_fn=Centred("nothing"))) as trainer:
        trainer.step()


def detached(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.detach(), target)


def train_detached(settings: dict[str, Any]) -> str:
    settings = {**TINY.settings, **settings}
    with make_trainer(replace(TINY, settings=settings, loss_fn=detached)) as trainer:
        with pytest.raises(ValueError) as refused:
            trainer.step()
    return str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_length": 1},
        {"pipeline_length": 2},
        {"pipeline_length": 2, "weight_versions": "stashed"},
    ],
    ids=["K = 1", "K = 2", "stream"],
)
def test_a_loss_without_a_gradient_is_refused(two_ranks: Pool, settings: dict[str, Any]) -> None:
    # The loss stood still, and nobody said why.
    for message in two_ranks.run(train_detached, settings):
        assert message.startswith("the loss 'detached' has no gradient by the model's output")


def of_class_1(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Learn of one class alone; without any there is nothing to learn from."""
    counts = target == 1
    if not counts.any():
        return torch.zeros((), dtype=output.dtype), counts.sum()
    return F.cross_entropy(output[counts], target[counts], reduction="sum"), counts.sum()


def train_on_few() -> list[float]:
    job = replace(TINY, loss_fn=Loss(of_class_1, is_exact=True))
    with make_trainer(job) as trainer:
        return [trainer.step().loss for _ in range(8)]


def test_micro_batches_without_anything_to_learn_from_train_on_any_replicas(
    two_ranks: Pool,
) -> None:
    expected = train_on_few()
    for losses in two_ranks.run(train_on_few):
        assert losses == pytest.approx(expected, rel=1e-9)


CALLS: list[int] = []
"""The sizes of the calls of `switched`; global, as a loss that holds a count is refused."""


def switched(output: Tensor, target: Tensor) -> Tensor:
    """Depend on the split where a test has set WEIGHS."""
    CALLS.append(len(output))
    return weighted(output, target) if WEIGHS else F.cross_entropy(output, target)


WEIGHS: list[bool] = []


def test_behind_the_first_epoch_an_epoch_s_first_step_alone_is_probed() -> None:
    # A loss was called more often than a plain loop does at every 8th step, for ever.
    job = replace(TINY, loss_fn=switched, settings={"global_batch_size": 2, "epochs": 3})
    settings = {"pipeline_length": 1, "micro_batches": 1}
    calls: list[int] = []
    with make_trainer(job, **settings) as trainer:
        trainer.begin()
        while trainer.epoch < 2:
            CALLS.clear()
            trainer.step()
            calls.append(len(CALLS))
        # The whole and its parts beside the step's own.
        assert calls == [4 if step in (*range(9), 13) else 1 for step in range(26)]
        WEIGHS.append(True)
        try:
            with pytest.raises(ValueError, match="'switched' depends on how a batch is split"):
                trainer.step()
        finally:
            WEIGHS.clear()


def test_each_evaluation_s_first_batches_are_probed() -> None:
    job = replace(TINY, loss_fn=switched, settings={"eval_batch_size": 2})
    data = tiny_data()
    calls = []
    with make_trainer(job) as trainer:
        trainer.begin()
        for _ in range(2):
            CALLS.clear()
            trainer.evaluate(data)
            calls.append(len(CALLS))
        assert calls == [13 + 3 * 9, 13 + 3 * 8]
        WEIGHS.append(True)
        try:
            with pytest.raises(ValueError, match="'switched' depends on how a batch is split"):
                trainer.evaluate(data)
        finally:
            WEIGHS.clear()
