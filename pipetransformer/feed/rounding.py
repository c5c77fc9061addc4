"""Say what rows in another dtype change of a batch."""

from __future__ import annotations

import logging

_LOGGER = logging.getLogger(__name__)

_WARNED_SHARE = 0.02
"""Batches differ more among each other; a run would hardly be seen to learn otherwise."""


def tell_of_loss(dtype: str, exact: float, rounded: float) -> None:
    """Log what `cache_dtype` changes of a batch's loss; a large change is a warning."""
    share = 0.0 if rounded == exact else abs(rounded - exact) / max(abs(exact), 1e-12)
    _tell(dtype, f"the loss of one batch from {exact:.6g} to {rounded:.6g}", share)


def tell_of_outputs(dtype: str, share: float) -> None:
    """Log what `cache_dtype` changes of a batch's outputs, relative to them, without a loss."""
    _tell(dtype, "the outputs of one batch", share)


def _tell(dtype: str, what: str, share: float) -> None:
    is_small = share <= _WARNED_SHARE
    advice = "" if is_small else "; another cache_dtype, or none, changes less"
    level = logging.INFO if is_small else logging.WARNING
    _LOGGER.log(level, "cache_dtype=%r changes %s (%.2g %%)%s", dtype, what, 100 * share, advice)
