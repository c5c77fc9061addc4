"""Decide yourself what freezes: by a function, or by a class that remembers.

    python examples/own_policy.py

Both are asked before each epoch, and see a `FreezeContext`. One is trained after the other.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pipetransformer import FitReport, FreezeContext, FreezeDecision, FreezePolicy, Trainer


def below_the_loudest(context: FreezeContext) -> int | None:
    """Freeze the layers below the one whose gradient is the largest."""
    norms = [layer.gradient_norm or 0.0 for layer in context.layers[context.num_frozen :]]
    return context.num_frozen + norms.index(max(norms)) if norms else None


class WhereLossStalls(FreezePolicy):
    """Freeze one more layer when the loss has fallen by less than a tenth."""

    before: float | None = None

    def decide(self, context: FreezeContext) -> FreezeDecision | None:
        before, loss = self.before, context.loss
        self.before = loss
        if before is None or loss is None or context.num_frozen == context.num_layers - 1:
            return None  # Too little was trained yet, or is left to train.
        stalls = loss > 0.9 * before
        return FreezeDecision(context.num_frozen + stalls, f"loss {before:.3f}, then {loss:.3f}")

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}  # A resumed run decides as one that was never stopped.

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before = state["before"]


def main(num_samples: int = 1000, epochs: int = 8) -> list[FitReport]:
    torch.manual_seed(0)
    x, reports = torch.randn(num_samples, 5, 8), []
    data = TensorDataset(x, (x.mean(dim=(1, 2)) > 0).long())
    for policy in (below_the_loudest, WhereLossStalls()):
        blocks = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(4)]
        head = nn.Sequential(nn.Flatten(), nn.Linear(5 * 32, 2))
        model, loss = nn.Sequential(nn.Linear(8, 32), *blocks, head), nn.CrossEntropyLoss()
        with Trainer(model, data, loss_fn=loss, epochs=epochs, freeze=policy) as trainer:
            reports.append(trainer.fit())
            print(reports[-1])
    return reports


if __name__ == "__main__":
    main()
