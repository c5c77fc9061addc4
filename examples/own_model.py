"""Train a model of your own: an nn.Module with a row of blocks, as it is, after a check.

    python examples/own_model.py
    torchrun --nproc-per-node=2 examples/own_model.py

It reads 16 symbols, and learns to say which of the four kinds is the most frequent.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipetransformer import FitReport, Trainer, adamw


class Counter(nn.Module):
    """Count symbols, by a Transformer that knows nothing of PipeTransformer."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(4, 64), nn.Parameter(torch.zeros(16, 64))
        blocks = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(4)]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(64, 4)

    def forward(self, symbols: Tensor) -> Tensor:
        hidden = self.symbols(symbols) + self.places
        for block in self.blocks:  # What is found here can freeze, bottom first.
            hidden = block(hidden)
        return self.head(hidden.mean(1))


def samples(num: int, seed: int) -> TensorDataset:
    """Make pairs of what the forward takes and what the loss compares its answer with."""
    rows = torch.randint(4, (num, 16), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(rows, nn.functional.one_hot(rows).sum(1).argmax(1))


def main(arguments: list[str] | None = None) -> FitReport:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_samples", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    with Trainer(
        Counter(), samples(args.num_samples, seed=1), epochs=args.epochs,
        eval_dataset=samples(500, seed=2), loss_fn=nn.CrossEntropyLoss(), optimizer=adamw(1e-3),
        learning_rate_schedule="cosine", warmup=0.1, freeze="linear",
    ) as trainer:  # fmt: skip
        verified = trainer.verify()  # Does it train here as in a plain loop?
        report = trainer.fit()
        if trainer.is_main_process:
            print(verified, report, sep="\n")
        return report


if __name__ == "__main__":
    main()
