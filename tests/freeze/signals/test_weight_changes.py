"""Weights that move are measured beside what they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from freeze.signals import WeightChanges


def test_weights_that_move_are_measured_over_their_norm() -> None:
    layer = nn.Linear(2, 2, bias=False)
    fixed = nn.Linear(2, 2).requires_grad_(False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    own = {"layer": dict(layer.named_parameters()), "fixed": dict(fixed.named_parameters())}
    changes = WeightChanges(own)
    changes.begin()
    with torch.no_grad():
        layer.weight += torch.tensor([[0.3, 0.0], [0.0, 0.4]])
    changes.begin()  # Goes on.
    assert changes.squares() == {"layer": pytest.approx([0.25, 25.0])}
    changes.reset()
    changes.begin()
    assert changes.squares()["layer"][0] == 0
