"""Prove that the loss's scale grows and shrinks as torch.amp.GradScaler documents its own."""

from __future__ import annotations

import math

import pytest
import torch

from pipetransformer.model import LossScale
from pipetransformer.model.precision import GROWTH_INTERVAL_STEPS


def test_it_begins_doubles_and_halves_as_torch_s_does() -> None:
    ours, torchs = LossScale(is_dynamic=True), torch.amp.GradScaler("cpu")
    assert ours.value == torchs.get_scale() == 2.0**16
    assert GROWTH_INTERVAL_STEPS == torchs.get_growth_interval()
    for _ in range(GROWTH_INTERVAL_STEPS - 1):
        ours.note_good_step()
    assert ours.value == 2.0**16
    ours.note_good_step()
    assert ours.value == torchs.get_growth_factor() * 2.0**16
    ours.shrink()
    assert ours.value == torchs.get_backoff_factor() * 2.0**17


def test_a_shrink_begins_the_count_of_good_steps_anew() -> None:
    scale = LossScale(is_dynamic=True)
    for _ in range(GROWTH_INTERVAL_STEPS - 1):
        scale.note_good_step()
    scale.shrink()
    scale.note_good_step()
    assert scale.value == 2.0**15


def test_it_explains_a_gradient_until_it_is_one_but_never_a_loss() -> None:
    scale = LossScale(is_dynamic=True)
    assert not scale.explains(math.nan, math.nan) and not scale.explains(1.0, 1.0)
    for _ in range(16):
        assert scale.explains(1.0, math.inf) and scale.explains(1.0, math.nan)
        scale.shrink()
    assert scale.value == 1.0 and not scale.explains(1.0, math.inf)


def test_one_that_is_not_dynamic_stays_one() -> None:
    scale = LossScale(is_dynamic=False)
    for _ in range(GROWTH_INTERVAL_STEPS):
        scale.note_good_step()
    assert scale.value == 1.0 and not scale.explains(1.0, math.inf)


@pytest.mark.parametrize("num_good", [0, 5, GROWTH_INTERVAL_STEPS - 1])
def test_a_state_goes_on_where_it_was(num_good: int) -> None:
    scale, other = LossScale(is_dynamic=True), LossScale(is_dynamic=True)
    scale.shrink()
    for _ in range(num_good):
        scale.note_good_step()
    other.load_state_dict(scale.state_dict())
    for _ in range(GROWTH_INTERVAL_STEPS - num_good):
        assert other.value == 2.0**15
        other.note_good_step()
    assert other.value == 2.0**16
