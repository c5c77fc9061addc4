"""Measure what the general adapter costs: a step's forward and backward, in three ways in turn.

    own      the model's own forward
    written  its hand-written adapter's sublayers, where it has one
    general  its own forward, cut at its row of blocks

Models are random: BERT-base and ViT-S as published, GPT-2 small with a vocabulary of 5,000. Run it
as `python -m experiments.benchmarks.adapters`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from autopipe.loss import head_of
from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.rounds import paired_ratio, seconds_of
from pipetransformer import LayeredModel
from pipetransformer.model import adapt, output_of, present

BARS = Bars(most={"general_over_written": 1.02, "general_over_own": 1.03})
NUM_PAIRS = 16


@dataclass(frozen=True)
class Case:
    """Name a model and a batch."""

    name: str
    model: nn.Module
    batch: dict[str, Tensor]
    is_known: bool


def cases() -> list[Case]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)

    def texts(num: int, length: int, words: int) -> dict[str, Tensor]:
        ids = torch.randint(5, words, (num, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[-1, length // 2 :] = 0
        return {"input_ids": ids, "attention_mask": mask}

    found = []
    library: Any = transformers
    for num, length in ((16, 24), (4, 128)):
        bert = library.BertForSequenceClassification(library.BertConfig(num_labels=2))
        batch = {**texts(num, length, 30000), "labels": torch.arange(num) % 2}
        found.append(Case(f"BERT-base, {length} tokens", bert, batch, is_known=True))
    config = library.ViTConfig(
        hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=10
    )
    images = torch.randn(4, 3, 224, 224, generator=generator)
    batch = {"pixel_values": images, "labels": torch.arange(4)}
    vit = library.ViTForImageClassification(config)
    found.append(Case("ViT-S, 224 pixels", vit, batch, is_known=True))
    config = library.GPT2Config(
        vocab_size=5000, bos_token_id=0, eos_token_id=0, pad_token_id=0, n_positions=128
    )
    words = texts(4, 128, 5000)
    batch = {**words, "labels": words["input_ids"]}
    gpt = library.GPT2LMHeadModel(config)
    found.append(Case("GPT-2 small, 128 tokens", gpt, batch, is_known=False))
    return found


def step_of(case: Case, layered: LayeredModel | None) -> Callable[[], None]:
    """Return a step in one of the ways: forward, loss and backward, in train mode."""
    known: Any = layered or present(case.model, case.batch)
    inputs = {n: t for n, t in case.batch.items() if n != "labels"}

    def step() -> None:
        case.model.zero_grad(set_to_none=True)
        output = output_of(case.model(**inputs)) if layered is None else layered.run(case.batch)
        loss = known.loss_fn(output, case.batch["labels"])
        head_of(loss).backward()

    return step


def prologue_share(case: Case, layered: LayeredModel) -> float:
    """Return the share that a second prologue, over hollow weights, has in a forward."""
    own: Any = layered.sublayers[1].module.own
    with torch.no_grad():
        hidden = layered.run(case.batch, last=1)

        def again() -> None:
            own.forget()
            own.arguments(0, hidden, case.batch, training=True)

        return min(seconds_of(again) for _ in range(5)) / min(
            seconds_of(lambda: layered.run(case.batch)) for _ in range(5)
        )


def main() -> int:
    torch.set_num_threads(1)
    worst = {"general_over_written": 0.0, "general_over_own": 0.0}
    for case in cases():
        case.model.train()
        for module in case.model.modules():
            if isinstance(module, nn.Dropout):  # Each way draws others.
                module.p = 0.0
        layered = present(case.model, case.batch)
        general = step_of(case, layered)
        rivals = {"own": step_of(case, None)}
        if case.is_known:
            rivals["written"] = step_of(case, adapt(case.model))
        general()
        for name, rival in rivals.items():
            rival()
            ratio, pairs = paired_ratio(general, rival, num_pairs=NUM_PAIRS)
            print(
                f"{case.name:26} general over {name:8} {ratio.median:.4f}, 95 % interval "
                f"{ratio.low:.4f} to {ratio.high:.4f}, {len(pairs)} pairs",
                flush=True,
            )
            worst[f"general_over_{name}"] = max(worst[f"general_over_{name}"], ratio.low)
        print(
            f"{case.name:26} a second prologue is {prologue_share(case, layered):.2%} of a forward"
        )
    return conclude(worst, BARS)


if __name__ == "__main__":
    sys.exit(main())
