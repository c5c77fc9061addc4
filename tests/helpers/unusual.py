"""Build models and optimizers that are unusual in one way each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

from tests.helpers.loops import Named
from tests.helpers.models import tiny_model


def noted_model() -> nn.Module:
    """Note on some weights that they are not to decay."""
    model = tiny_model()
    for name, parameter in model.named_parameters():
        parameter._no_decay = "inner" in name  # type: ignore[attr-defined]
    return model


def decay_by_note(named: Named) -> Optimizer:
    """Let the notes decide what decays."""
    plain = [p for _, p in named if getattr(p, "_no_decay", False)]
    decayed = [p for _, p in named if not getattr(p, "_no_decay", False)]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.5}]
    return SGD([g for g in groups if g["params"]], lr=0.1, momentum=0.9)


class Repeated(nn.Module):
    """Call one block several times, each under reentrant checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(3):
            if hidden.requires_grad and torch.is_grad_enabled():
                hidden = checkpoint(self._once, hidden, use_reentrant=True)
            else:
                hidden = self._once(hidden)
        return hidden

    def _once(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


def repeated() -> nn.Module:
    """Build a model with a block that is called several times."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 8), Repeated(), nn.Linear(8, 8), Repeated(), nn.Linear(8, 3)
        ).double()


def dropping() -> nn.Module:
    """Build the tiny model with dropout."""
    return tiny_model(dropout=0.5)


class Running(nn.Module):
    """Normalise by running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, hidden: Tensor) -> Tensor:
        normal: Tensor = self.norm(hidden.view(-1, 2, 4))
        return normal.view(-1, 8)


class Bounded(nn.Module):
    """Look tokens up in a table that renorms its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 8, max_norm=0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.table((hidden[:, 0] > 0).long())
        return hidden + found


class Layer(nn.Module):
    """A linear layer to which something is done."""

    def __init__(self, act: Callable[[Layer, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.act = act
        vars(self).update(attributes)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.act(self, self.linear(hidden))


def around(*layers: nn.Module) -> nn.Module:
    """Put layers between an embedding and a head."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 3)).double()
