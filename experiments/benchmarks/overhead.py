"""Measure what the framework costs where it can save nothing.

The peer is a hand-written PyTorch loop over the same model, data set, optimizer and batch size, in
the same process and on one thread; steps take turns in random order. Run it as `python -m
experiments.benchmarks.overhead`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.benchmarks.rounds import paired_ratio
from experiments.digits import build_model, load_digits_split
from pipetransformer import Trainer, adamw

BATCH_SIZE = 32
LIMIT = 1.02


def hand_written(model: nn.Module, data: TensorDataset) -> Callable[[], float]:
    """Return a function that takes one step of the loop anyone would write."""
    optimizer = adamw()(list(model.named_parameters()))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)

    def batches() -> Iterator[list[Tensor]]:
        while True:
            yield from loader

    stream = batches()
    model.train()

    def step() -> float:
        images, labels = next(stream)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main() -> int:
    """Compare; fail only if the whole interval is beyond the limit."""
    torch.set_num_threads(1)
    train, _ = load_digits_split()
    images, labels = train.tensors
    # A multiple of the batch size: all steps are equal.
    train = TensorDataset(images[:1184], labels[:1184])
    step = hand_written(build_model(10, seed=0), train)
    with Trainer(
        build_model(10, seed=0),
        train,
        epochs=10,
        global_batch_size=BATCH_SIZE,
        cache=False,
        device="cpu",
        progress=False,
        evaluate_every_epochs=0,
    ) as trainer:
        trainer.step()
        ratio, pairs = paired_ratio(trainer.step, step)
        assert trainer.decision is not None
        num_micro_batches = trainer.decision.plan.num_micro_batches
    ours, theirs = (sorted(column)[len(pairs) // 2] * 1e3 for column in zip(*pairs, strict=True))
    print(
        f"a step of {BATCH_SIZE} images, {len(pairs)} interleaved pairs, one thread, "
        f"torch {torch.__version__}"
    )
    print(f"  Trainer       {ours:8.1f} ms (median), M = {num_micro_batches}")
    print(f"  hand-written  {theirs:8.1f} ms")
    print(
        f"  ratio         {ratio.median:8.4f}   95 % interval {ratio.low:.4f} to {ratio.high:.4f}"
    )
    print(
        json.dumps(
            {
                "k1_overhead": ratio.median,
                "interval": [ratio.low, ratio.high],
                "pairs": len(pairs),
                "limit": LIMIT,
                "torch": torch.__version__,
            }
        )
    )
    return 1 if ratio.low > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
