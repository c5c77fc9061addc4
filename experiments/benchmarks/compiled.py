"""Time training steps with compiled blocks beside eager ones, of a text and an image model.

Both train in turn, step by step, on the same samples. Run it as

    python -m experiments.benchmarks.compiled --model bert
    python -m experiments.benchmarks.compiled --model vit --precision bf16
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.rounds import interleave, num_cores
from pipetransformer import Trainer, adamw

WORDS, LENGTH = 1000, 128
_KINDS = {"eager": False, "compiled": True}


class RandomSamples(Dataset[dict[str, Tensor]]):
    """Make random texts of one length, or random images."""

    def __init__(self, kind: str, num: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.name = "input_ids" if kind == "bert" else "pixel_values"
        self.inputs = (
            torch.randint(WORDS, (num, LENGTH), generator=generator)
            if kind == "bert"
            else torch.randn(num, 3, 112, 112, generator=generator)
        )
        self.labels = torch.randint(2, (num,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {self.name: self.inputs[index], "labels": self.labels[index]}


def build(kind: str, num_layers: int, *, dropout: float) -> Any:
    """Build a model of BERT-small's or ViT-small's width, the same weights on every call."""
    torch.manual_seed(0)
    width = 512 if kind == "bert" else 384
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
        "num_hidden_layers": num_layers,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    if kind == "bert":
        return BertForSequenceClassification(BertConfig(vocab_size=WORDS, **sizes))
    return ViTForImageClassification(ViTConfig(image_size=112, **sizes))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Train both in turn; return the JSON line's values."""
    data = RandomSamples(options.model, options.batch * 4)
    trainers, begun_s = {}, {}
    for name, compiles in _KINDS.items():
        trainers[name] = Trainer(
            build(options.model, options.layers, dropout=options.dropout),
            data,
            optimizer=adamw(1e-4),
            epochs=1000,
            global_batch_size=options.batch,
            micro_batches=1,
            pipeline_length=1,
            precision=options.precision,
            evaluate_every_epochs=0,
            progress=False,
            **({"compile": True, "compile_backend": options.backend} if compiles else {}),
        )
        start = time.perf_counter()
        trainers[name].begin()
        begun_s[name] = time.perf_counter() - start
    losses: dict[str, list[float]] = {name: [] for name in _KINDS}

    def step(name: str) -> None:
        losses[name].append(trainers[name].step().loss)

    took = interleave(
        {name: partial(step, name) for name in _KINDS},
        num_rounds=options.rounds,
        warm_up=2,
    )
    pairs = zip(losses["eager"], losses["compiled"], strict=True)
    return {
        "model": options.model,
        "eager_ms": 1000 * statistics.median(took["eager"]),
        "compiled_ms": 1000 * statistics.median(took["compiled"]),
        "eager_over_compiled": statistics.median(took["eager"] / took["compiled"]),
        "begun_s": begun_s,
        "largest_loss_difference": max(abs(one - other) for one, other in pairs),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and print one JSON line; no figure has a bar, as each machine gains otherwise."""
    parser = argparse.ArgumentParser(description="Time compiled blocks beside eager ones.")
    parser.add_argument("--model", choices=("bert", "vit"), default="bert")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--precision", choices=("bf16",), default=None)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args(arguments)
    torch.set_num_threads(num_cores())
    return conclude(compare(options), Bars())


if __name__ == "__main__":
    sys.exit(main())
