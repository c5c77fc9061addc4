"""Prove the model of an ideal run against sums made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from autopipe.profile.profile import Profile, SublayerCost
from experiments.ideal import ideal_seconds
from tests.helpers.costs import FREE


def profile(batch_sizes: tuple[int, ...] = (1,)) -> Profile:
    """Make layers 0 and 1 of two sublayers each, and the head.

    Each trains in 1 s + 2 s a sample (the head in 3 s + 6 s), and runs frozen in 0.5 s; with two
    measured sizes, a micro-batch of 4 samples costs 1 s less than 4 single ones.
    """
    scales = [size - 1.0 if size > 1 else 1.0 for size in batch_sizes]
    sublayers = tuple(
        SublayerCost(
            f"sublayer {i}",
            layer,
            tuple(factor * s for s in scales),
            tuple(factor * s for s in scales),
            tuple(factor * s for s in scales),
            tuple(0.5 * s for s in batch_sizes),
            0,
            0,
            0,
            0,
            0.0,
            0.0,
        )
        for i, (layer, factor) in enumerate([(0, 1), (0, 1), (1, 1), (1, 1), (2, 3)])
    )
    return Profile(batch_sizes, sublayers, 0.0, 0.0, 0.0, FREE, FREE)


def step(
    samples: int = 8, frozen: int = 0, length: int = 1, replicas: int = 1, micro_batches: int = 8
) -> dict[str, Any]:
    """Make the record of a step."""
    return {
        "kind": "step",
        "samples": samples,
        "frozen": frozen,
        "length": length,
        "replicas": replicas,
        "micro_batches": micro_batches,
    }


def seconds(*steps: dict[str, Any], num_samples: int = 8, read_s: float = 0.01) -> float:
    return ideal_seconds(profile(), steps, num_samples=num_samples, read_s=read_s)


# Legend: all layers train in 21 s a sample, layer 1 and the head in 15 s, the head alone in 9 s.
@pytest.mark.parametrize(
    ("steps", "expected_s"),
    [
        ([], 0.0),
        ([step()], 8 * 21),
        ([step(), step(samples=2)], 10 * 21),
        # The bubble of K = 2 stages and M = 4 micro-batches stretches a step by 5 / 4.
        ([step(length=2, micro_batches=4)], 8 * 21 / 2 * 5 / 4),
        ([step(length=2, micro_batches=1)], 8 * 21 / 2 * 2),
        ([step(replicas=2, micro_batches=4)], 8 * 21 / 2),
        ([step(length=2, replicas=2, micro_batches=2)], 8 * 21 / 4 * 3 / 2),
    ],
    ids=["nothing", "one device", "a short batch", "bubble", "all bubble", "replicas", "both"],
)
def test_without_freezing_the_active_layers_and_the_bubble_are_all(
    steps: list[dict[str, Any]], expected_s: float
) -> None:
    assert seconds(*steps) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("steps", "expected_s"),
    [
        # The first pass fills at 2 x 0.5 s a sample, the second reads.
        ([step(frozen=1)], 8 * 15 + 8 * 1.0),
        ([step(frozen=1), step(frozen=1)], 2 * 8 * 15 + 8 * 1.0 + 8 * 0.01),
        # Growth runs the newly frozen layer alone.
        ([step(frozen=1), step(frozen=2)], 8 * 15 + 8 * 1.0 + 8 * 9 + 8 * 1.0),
        ([step(frozen=2)], 8 * 9 + 8 * 2.0),
        # A thaw to one layer runs that layer again, a thaw to none runs nothing frozen.
        ([step(frozen=2), step(frozen=1)], 8 * 9 + 8 * 2.0 + 8 * 15 + 8 * 1.0),
        ([step(frozen=2), step(), step(frozen=2)], 2 * (8 * 9 + 8 * 2.0) + 8 * 21),
        # Replicas share fills and reads; only stage 0 of each pipeline does them.
        ([step(frozen=1, replicas=2, micro_batches=4)] * 2, 8 * 15 + (8 * 1.0 + 8 * 0.01) / 2),
        ([step(frozen=1, length=2, micro_batches=4)], 8 * 15 / 2 * 5 / 4 + 8 * 1.0),
    ],
    ids=["fill", "read", "growth", "both at once", "thaw", "refreeze", "replicas", "stages"],
)
def test_a_frozen_prefix_costs_one_pass_and_then_reads(
    steps: list[dict[str, Any]], expected_s: float
) -> None:
    assert seconds(*steps) == pytest.approx(expected_s)


def test_a_fill_ends_within_a_step_where_the_samples_do() -> None:
    steps = [step(frozen=1)] * 3
    assert seconds(*steps, num_samples=12) == pytest.approx(3 * 8 * 15 + 12 * 1.0 + 12 * 0.01)


def test_times_are_taken_at_the_micro_batch_s_size() -> None:
    # 8 samples in 2 micro-batches of 4, which cost 3 times a single one; the fill costs 0.5 s
    # a sample in each of 2 sublayers at the largest measured size.
    measured = profile((1, 4))
    assert ideal_seconds(
        measured, [step(micro_batches=2)], num_samples=8, read_s=0.0
    ) == pytest.approx(2 * 3 * 21)
    assert ideal_seconds(
        measured, [step(frozen=1, micro_batches=2)], num_samples=8, read_s=0.0
    ) == pytest.approx(2 * 3 * 15 + 8 * 1.0)


def test_a_micro_batch_has_a_sample_even_where_a_short_batch_has_fewer_samples() -> None:
    assert seconds(step(samples=2, replicas=2, micro_batches=8)) == pytest.approx(2 * 21 / 2)
