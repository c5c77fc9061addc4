"""Prove that noise cannot bend the shape of a sublayer's times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.profile.network import fitted, quartiles, uncertainty

SIZES = (1, 4, 16, 32)


def test_times_on_a_line_stay_as_they_are() -> None:
    times = [3.0 + 2.0 * size for size in SIZES]
    assert fitted(SIZES, times) == pytest.approx(times, rel=1e-12)


def test_one_size_stays_as_it_is() -> None:
    assert fitted((8,), (5.0,)) == (5.0,)


@given(st.lists(st.floats(1e-6, 1e3), min_size=len(SIZES), max_size=len(SIZES)))
def test_more_samples_never_take_less_and_fewer_never_less_than_their_share(
    seconds: list[float],
) -> None:
    found = fitted(SIZES, seconds)
    for (n, less), (m, more) in zip(
        zip(SIZES, found, strict=True), zip(SIZES[1:], found[1:], strict=False), strict=False
    ):
        assert less <= more * (1 + 1e-9)
        assert less / n >= more / m * (1 - 1e-9)


def test_a_fit_is_nearer_to_the_truth_than_noisy_times_are() -> None:
    generator = random.Random(0)
    truth = [0.5 + 1.0 * size for size in SIZES]

    def worst(times: tuple[float, ...]) -> float:
        return max(abs(a / b - 1) for a, b in zip(times, truth, strict=True))

    nearer = 0
    for _ in range(200):
        noisy = tuple(one * generator.uniform(0.8, 1.2) for one in truth)
        nearer += worst(fitted(SIZES, noisy)) < worst(noisy)
    assert nearer > 150


def test_the_median_of_equal_repeats_is_certain_and_of_one_unknown() -> None:
    assert uncertainty([2.0, 2.0, 2.0]) == uncertainty([2.0]) == 0.0
    assert uncertainty([1.0, 2.0, 3.0]) == pytest.approx(1.25 / 3**0.5 / 2)


def test_quartiles_are_shares_of_the_median_and_one_repeat_has_none() -> None:
    assert quartiles([8.0, 2.0, 4.0, 5.0, 3.0]) == (0.75, 1.25)
    assert quartiles([3.0]) == quartiles([0.0, 0.0]) == (1.0, 1.0)
