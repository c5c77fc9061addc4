"""What once gave other numbers with rows than without is refused, seen, or the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BioGptConfig, BioGptForSequenceClassification

import freeze as freezing
from pipetransformer import attach
from tests.helpers.any_models import KINDS, build, data, mean_loss
from tests.pipetransformer.loop.test_cached_loop import Samples

TEXTS = KINDS["gpt2_classifier"]


def test_blocks_that_are_dropped_at_random_are_not_cached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(folder: Path | None) -> list[float]:
        torch.manual_seed(0)
        config = BioGptConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=24, max_position_embeddings=32, num_labels=3, pad_token_id=0,
            bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model = BioGptForSequenceClassification(config).train()
        loader: DataLoader[Any] = DataLoader(
            Samples(dict(data(TEXTS).tensors)), batch_size=5
        )  # fmt: skip
        cached = attach(model, freeze=2, cache_folder=folder) if folder else None
        if cached is None:
            freezing.apply(model, 2, layers=[*model.biogpt.layers])
        torch.manual_seed(1)
        losses = []
        for _ in range(2):
            for batch in cached.epoch(loader) if cached else loader:
                losses.append(model(**batch).loss.item())
        if cached:
            assert cached.stats.hits == 0
            cached.close()
        return losses

    with caplog.at_level(logging.WARNING):
        ours = run(tmp_path)
    assert "draws random numbers below block 2" in caplog.text
    assert ours == run(None)


def test_prompts_that_are_learned_are_refused(tmp_path: Path) -> None:
    prompts = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)
    model = peft.get_peft_model(build(TEXTS), prompts)
    loader: DataLoader[Any] = DataLoader(Samples(dict(data(TEXTS).tensors)), batch_size=5)
    with (
        attach(model, freeze=2, cache_folder=tmp_path) as cached,
        pytest.raises(ValueError, match="puts prompts that it learns before each sample"),
    ):
        next(iter(cached.epoch(loader)))


class Masking:
    """Replace some tokens, by a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
        ids = batch["input_ids"]
        replaced = torch.rand(ids.shape, generator=self.generator) < 0.3
        return {**batch, "input_ids": ids.masked_fill(replaced, 3)}


def test_looking_at_samples_shifts_no_generator_of_a_collator(tmp_path: Path) -> None:
    def run(folder: Path | None) -> list[float]:
        model: nn.Module = build(TEXTS)
        loader: DataLoader[Any] = DataLoader(
            Samples(dict(data(TEXTS).tensors)), batch_size=5, collate_fn=Masking()
        )
        cached = attach(model, freeze=2, cache_folder=folder) if folder else None
        batches = cached.epoch(loader) if cached else loader
        losses = [mean_loss(TEXTS, model, batch).item() for batch in batches]
        if cached:
            cached.close()
        return losses

    assert run(tmp_path) == run(None)
