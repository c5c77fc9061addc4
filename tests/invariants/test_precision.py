"""Prove that a run in low precision is the same run however it is spread: the loop that it is held
against casts around every sublayer by itself.

Where a batch is cut alike, K, R, the schedule and transitions change no bit. Where it is cut
otherwise, each micro-batch's weight gradients are rounded to the 8 bits of bfloat16 before they
are added up, and kernels may take another path: gradients then differ by some 2**-8 of their size,
and Adam, which divides by their size, moves each weight by as much of the learning rate, 1e-2, in
each of the 15 steps. Seen: 1.5e-3 of weights up to 1.1, 3.7e-3 of losses about 1; float32 is 8e-3
and 4.5e-3 away.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autopipe.loss import LossFunction
from pipetransformer import NonFiniteError
from pipetransformer.model import adapt
from tests.helpers.inspection import deployment_of, feed_of
from tests.helpers.marks import slow
from tests.helpers.measured import freely, measuring, never
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.plain_scenario import plain
from tests.helpers.pool import Pool
from tests.helpers.resumes import EVERY_2_STEPS, assert_resumes_with_the_same_bits, fit_until
from tests.helpers.scenario import (
    Outcome,
    Scenario,
    Shape,
    assert_same_bits,
    make_trainer,
    merge,
    train,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def in_low_precision(
    shapes: dict[int, Shape], precision: str | None = "bf16", **changes: Any
) -> Scenario:
    """Describe a run without clipping, whose factor the loop computes with other rounding."""
    settings = {"precision": precision, "max_grad_norm": None, **changes.pop("settings", {})}
    return Scenario(shapes, dtype="float32", settings=settings, **changes)


def loop(scenario: Scenario) -> Outcome:
    """Train in a hand-written loop, with one autocast around the model."""
    dtype = DTYPES[scenario.options["precision"]]

    def loss_of(model: nn.Module, data: Any, ids: Tensor, loss_fn: LossFunction) -> Tensor:
        hidden, target = data[ids]
        with torch.autocast("cpu", dtype=dtype):
            for sublayer in adapt(model).sublayers:
                hidden = sublayer.module(hidden)
        loss = loss_fn(hidden.float(), target)
        assert isinstance(loss, Tensor)
        return loss

    return plain(scenario, loss_of=loss_of)


def assert_near(ours: Outcome, theirs: Outcome) -> None:
    """Compare every loss and weight, with thrice the room that was seen to be needed."""
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-2)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, tensor in ours.weights.items():
        torch.testing.assert_close(tensor, theirs.weights[name], rtol=0, atol=5e-3)


@pytest.mark.parametrize("length", [slow(1), 2])
def test_whole_batches_give_the_loop_s_bits(two_ranks: Pool, length: int) -> None:
    scenario = in_low_precision({0: Shape(length, 1)}, frozen=(0, 1, 2))
    ours = train(scenario) if length == 1 else merge(two_ranks.run(train, scenario))
    reference = loop(scenario)
    # Ours are sums in float64, over the samples.
    assert ours.losses == pytest.approx(reference.losses, rel=1e-6)
    assert_same_bits(dataclasses.replace(ours, losses=reference.losses), reference)


@pytest.mark.parametrize(
    "shape",
    [Shape(2, 4), *map(slow, (Shape(1, 3), Shape(1, 1), Shape(2, 2, "gpipe"), Shape(2, 3)))],
    ids=str,
)
def test_two_processes_train_as_the_loop_does(two_ranks: Pool, shape: Shape) -> None:
    scenario = in_low_precision({0: shape}, frozen=(0, 1))
    assert_near(merge(two_ranks.run(train, scenario)), loop(scenario))


@pytest.mark.parametrize("shape", [Shape(4, 4), Shape(2, 3, "gpipe"), Shape(1, 1)], ids=str)
@pytest.mark.slow
def test_four_processes_train_as_the_loop_does(four_ranks: Pool, shape: Shape) -> None:
    scenario = in_low_precision({0: shape})
    assert_near(merge(four_ranks.run(train, scenario)), loop(scenario))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.slow
def test_equal_micro_batches_give_equal_bits_for_any_k_and_r(
    two_ranks: Pool, four_ranks: Pool, precision: str
) -> None:
    mixed = {0: Shape(2, 2), 4: Shape(1, 1), 8: Shape(2, 2, "gpipe")}
    pipeline, replicas, moving = (
        merge(two_ranks.run(train, in_low_precision(shapes, precision, frozen=(0, 1))))
        for shapes in ({0: Shape(2, 2)}, {0: Shape(1, 1)}, mixed)
    )
    assert_same_bits(pipeline, replicas)
    assert_same_bits(pipeline, moving)
    wide = in_low_precision({0: Shape(4, 2), 6: Shape(2, 1)}, precision, frozen=(0, 1))
    assert_same_bits(pipeline, merge(four_ranks.run(train, wide)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.slow
def test_cached_equals_uncached_bit_by_bit_across_a_freeze(
    two_ranks: Pool, precision: str
) -> None:
    with_cache, without = (
        merge(
            two_ranks.run(
                train,
                in_low_precision(
                    {0: Shape(2, 3)},
                    precision,
                    frozen=(0, 2, 3),
                    settings={"prefix_chunk": 4, "epochs": 4, "cache": cache},
                ),
            )
        )
        for cache in (True, False)
    )
    assert with_cache.extra["hits"] > 0 and without.extra["hits"] == 0
    assert_same_bits(with_cache, without)


@functools.cache
def rows(precision: str | None, cache_dtype: str | None = None) -> tuple[torch.dtype, int, int]:
    """Return how the cache stores hidden states, their bytes, and what it says it will take."""
    scenario = in_low_precision(
        {0: Shape(1, 1)}, precision, frozen=(1,), settings={"cache_dtype": cache_dtype}
    )
    with measuring(freely), make_trainer(scenario, scenario.policy()) as trainer:
        trainer.step()
        feed = feed_of(trainer)
        assert feed.keeper.store is not None and trainer.measurements is not None
        field = feed.keeper.store.layout.fields[0]
        budget = feed.keeper.budget(trainer.measurements, {})
        return field.dtype, field.num_bytes, budget.num_bytes


@pytest.mark.parametrize(
    ("precision", "cache_dtype", "dtype"),
    [
        ("bf16", None, torch.bfloat16),
        ("fp16", None, torch.float16),
        ("bf16", "bfloat16", torch.bfloat16),
        ("bf16", "float16", torch.float16),
    ],
)
def test_rows_take_half_the_bytes_and_so_it_is_said(
    precision: str, cache_dtype: str | None, dtype: torch.dtype
) -> None:
    _, row_bytes, most_bytes = rows(None)
    assert rows(precision, cache_dtype) == (dtype, row_bytes // 2, most_bytes // 2)


class Steep(Scenario):
    """Describe a run whose first gradients overflow float16 at the first scale."""

    def problem(self) -> tuple[Any, Any, Any]:
        """Return the model, its data, and a steep loss."""
        return *super().problem()[:2], steep_loss


def steep_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return a mean whose gradient by a sample's output is up to 30 over the batch size."""
    return 30 * nn.functional.cross_entropy(output, target)


def steep(scenario: Scenario) -> Scenario:
    """Give a run the steep loss."""
    return Steep(**{f.name: getattr(scenario, f.name) for f in dataclasses.fields(scenario)})


def skipped_and_scales(scenario: Scenario) -> tuple[list[tuple[bool, float]], list[Tensor]]:
    """Train to the end; return each step's fate, the scale after it, and the final weights."""
    steps = []
    with measuring(never), make_trainer(scenario, scenario.policy()) as trainer:
        while not trainer.is_over:
            result = trainer.step()
            steps.append((result.skipped, deployment_of(trainer).loss_scale.value))
        return steps, [t.clone() for t in trainer.state_dict().values()]


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale_on_all_ranks(
    two_ranks: Pool,
) -> None:
    # K and R change while it is halved, and later.
    scenario = steep(in_low_precision({0: Shape(2, 2), 1: Shape(1, 1), 6: Shape(2, 1)}, "fp16"))
    (first, weights), (second, _) = two_ranks.run(skipped_and_scales, scenario)
    assert first == second
    before = 2.0**16
    for skipped, after in first:
        assert after == (before / 2 if skipped else before)
        before = after
    fates = [skipped for skipped, _ in first]
    assert fates[:2] == [True, True] and fates.count(False) > len(fates) / 2
    assert all(bool(tensor.isfinite().all()) for tensor in weights)


@pytest.mark.slow
def test_a_resumed_fp16_run_goes_on_with_its_scale_and_ends_with_the_same_bits(
    two_ranks: Pool, tmp_path: Path
) -> None:
    changing = {0: Shape(2, 1), 5: Shape(1, 2)}
    scenario = steep(in_low_precision(changing, "fp16", frozen=(0, 1), settings=EVERY_2_STEPS))
    assert_resumes_with_the_same_bits(two_ranks, tmp_path, scenario, fit_until, 9)


def refuse_to_train(precision: str, data: TensorDataset, breaks: bool) -> str:
    """Train until a number is not finite; return what is said, and after how many steps."""
    model = tiny_model(dtype=torch.float32)
    if breaks:
        model.insert(2, SteepRoot())
    with (
        measuring(never),
        tiny_trainer(
            model, data, epochs=9, global_batch_size=6, precision=precision, pipeline_length=2
        ) as trainer,
        pytest.raises(NonFiniteError, match="not finite|the loss is") as caught,
    ):
        trainer.fit()
    return str(caught.value)


class SteepRoot(nn.Module):
    """Return what it is given, with a gradient that is no number: infinity times 0."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + (0 * hidden).abs().sqrt()


@pytest.mark.parametrize("precision", ["fp16", slow("bf16")])
def test_a_loss_that_is_not_finite_ends_the_run_at_once(two_ranks: Pool, precision: str) -> None:
    x, y = tiny_data(dtype=torch.float32).tensors
    poisoned = TensorDataset(x.where(torch.arange(len(x))[:, None] != 3, float("nan")), y)
    first, second = two_ranks.run(refuse_to_train, precision, poisoned, False)
    assert first == second and "the loss is nan" in first
    assert "it began in the data: 'x' of sample 3" in first


@pytest.mark.parametrize(("precision", "step"), [slow("bf16", 0), ("fp16", 16)])
def test_a_gradient_that_no_scale_makes_finite_ends_the_run(
    two_ranks: Pool, precision: str, step: int
) -> None:
    # 16 halvings lead from 65536 to 1.
    data = tiny_data(dtype=torch.float32)
    first, second = two_ranks.run(refuse_to_train, precision, data, True)
    assert first == second and first.startswith(f"step {step}: the loss is ")
    assert "it began in the gradient of sublayer '1' on rank 0" in first
