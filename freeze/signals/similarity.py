"""Compare a layer's activations of the same samples at two times, from Gram matrices alone.

Activations of n samples, (n, d), are large; their inner products, (n, n), are enough here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gram(activations: Tensor) -> Tensor:
    """Return the samples' inner products, (n, n) float64 on the CPU, of activations (n, ...)."""
    flat = activations.detach().reshape(len(activations), -1)
    flat = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
    return (flat @ flat.T).double().cpu()


def linear_cka(one: Tensor, other: Tensor) -> float:
    """Return the linear centred kernel alignment of two Gram matrices: 1 where they agree.

    ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F), the columns of X and Y centred; NaN if all samples
    have the same activations.

    Source: Kornblith et al. 2019, as written with Gram matrices there.
    """
    one, other = _centred(one), _centred(other)
    return float((one * other).sum() / (one.norm() * other.norm()))


def similarity_change(one: Tensor, other: Tensor) -> float:
    """Return the similarity-preserving loss of two Gram matrices: 0 where they agree.

    ||G - G'||_F^2 / n^2, with rows of norm 1.

    Source: Tung and Mori 2019, which Egeria calls plasticity.
    """
    rows = [gram / gram.norm(dim=1, keepdim=True) for gram in (one, other)]
    return float((rows[0] - rows[1]).square().sum() / one.numel())


def svcca(one: Tensor, other: Tensor, *, kept: float = 0.99, most: int | None = None) -> float:
    """Return the mean canonical correlation of two Gram matrices' main directions.

    The main directions hold a share `kept` of the variance, and are at most `most`. Where they
    are nearly as many as the samples, the result is near 1 whatever was learned: k random
    directions of n samples correlate by about sqrt(k / n).

    Source: Raghu et al. 2017; the directions of the samples' space follow from the Gram matrix.
    """
    first, second = (_main_directions(gram, kept)[:, :most] for gram in (one, other))
    correlations = torch.linalg.svdvals(first.T @ second).clamp(0, 1)
    return float(correlations.mean())


def _centred(gram: Tensor) -> Tensor:
    """Return the Gram matrix of the activations less their mean over the samples."""
    rows = gram - gram.mean(dim=0, keepdim=True)
    return rows - rows.mean(dim=1, keepdim=True)


def _main_directions(gram: Tensor, kept: float) -> Tensor:
    """Return orthonormal columns, (n, k), that hold a share of the variance."""
    values, vectors = torch.linalg.eigh(_centred(gram))
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    share = values.cumsum(0) / values.sum()
    num = 1 + int((share < kept - 1e-12).sum())
    return vectors[:, :num]
