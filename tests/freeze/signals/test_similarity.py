"""Prove similarities from Gram matrices against their formulas on activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freeze.signals import gram, linear_cka, similarity_change, svcca


def activations(seed: int, features: int = 7, samples: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, features, generator=generator, dtype=torch.float64)


def test_linear_cka_is_the_formula_on_centred_columns() -> None:
    one, other = activations(0), activations(1, features=5)
    x, y = one - one.mean(0), other - other.mean(0)
    cross, own = (y.T @ x).norm() ** 2, (x.T @ x).norm() * (y.T @ y).norm()
    assert linear_cka(gram(one), gram(other)) == pytest.approx(float(cross / own))


def test_linear_cka_does_not_see_rotations_shifts_and_sizes() -> None:
    one = activations(0)
    rotation = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64)).Q
    assert linear_cka(gram(one), gram(3 * one @ rotation + 5)) == pytest.approx(1.0)


def test_similarity_change_is_the_formula() -> None:
    one, other = activations(0), activations(1)
    rows = [torch.nn.functional.normalize(x @ x.T, dim=1) for x in (one, other)]
    expected = float((rows[0] - rows[1]).square().sum()) / 12**2
    assert similarity_change(gram(one), gram(other)) == pytest.approx(expected)
    assert similarity_change(gram(one), gram(2 * one)) == pytest.approx(0.0, abs=1e-20)


def test_svcca_is_that_of_singular_vectors() -> None:
    one, other = activations(0), activations(1)
    bases = []
    for x in (one, other):
        u, s, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False)
        share = s.square().cumsum(0) / s.square().sum()
        bases.append(u[:, : 1 + int((share < 0.9).sum())])
    expected = float(torch.linalg.svdvals(bases[0].T @ bases[1]).mean())
    assert svcca(gram(one), gram(other), kept=0.9) == pytest.approx(expected)
    # A map without noise loses nothing.
    assert svcca(gram(one), gram(one @ torch.rand(7, 7, dtype=torch.float64)), kept=1.0) == (
        pytest.approx(1.0)
    )


def test_svcca_of_a_quarter_of_the_directions_tells_unrelated_wide_outputs_apart() -> None:
    one, other = (gram(activations(seed, features=500, samples=64)) for seed in (0, 1))
    assert svcca(one, other) > 0.95  # 62 of the 63 directions that 64 centred samples have.
    assert svcca(one, other, most=16) < 0.6
    assert svcca(one, one, most=16) == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gram_of_small_numbers_does_not_overflow(dtype: torch.dtype) -> None:
    large = torch.full((2, 3, 4), 200.0, dtype=dtype)
    found = gram(large)
    assert found.dtype == torch.float64 and found.tolist() == [[480000.0] * 2] * 2


def test_outputs_that_do_not_tell_samples_apart_have_no_cka() -> None:
    same = gram(torch.ones(4, 3))
    assert torch.isnan(torch.tensor(linear_cka(same, same)))
