"""What once gave other numbers with rows than without is refused, seen, or the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
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

IMAGES, TEXTS = KINDS["eva"], KINDS["gpt2_classifier"]


def mixed(images: Tensor) -> Tensor:
    return 0.7 * images + 0.3 * images.flip(0)


def with_a_part_of_another(images: Tensor) -> Tensor:
    images = images.clone()
    images[:, :, 2:5, 2:5] = images.flip(0)[:, :, 2:5, 2:5]
    return images


def with_a_hole(images: Tensor) -> Tensor:
    images = images.clone()
    images[:, :, 2:5, 2:5] = 0.0
    return images


@pytest.mark.parametrize("change", [mixed, with_a_part_of_another, with_a_hole])
def test_images_that_a_loop_changes_in_any_place_get_no_row(
    change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    model = build(IMAGES)
    loader = DataLoader(data(IMAGES), batch_size=5)
    with attach(model, freeze=2, cache_folder=tmp_path) as cached:
        for _ in range(2):
            for batch in cached.epoch(loader):
                assert model(batch["x"]).isfinite().all()
                with pytest.raises(ValueError, match="Change samples in the data set"):
                    model(change(batch["x"]))


def test_images_that_a_loop_shuffles_get_their_own_rows(tmp_path: Path) -> None:
    model, order = build(IMAGES), torch.tensor([1, 0, 2, 3, 4])
    loader = DataLoader(data(IMAGES), batch_size=5)
    with attach(model, freeze=2, cache_folder=tmp_path) as cached:
        for _ in range(2):
            for batch in cached.epoch(loader):
                shuffled = model(batch["x"][order])
                expected = model(batch["x"])[order]
                torch.testing.assert_close(shuffled, expected, rtol=1e-12, atol=0)


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


def test_batches_have_all_that_the_loader_s_have(tmp_path: Path) -> None:
    entries = {**data(TEXTS).tensors, "weight": torch.arange(10.0)}
    loader: DataLoader[Any] = DataLoader(Samples(entries), batch_size=5)
    with attach(build(TEXTS), freeze=2, cache_folder=tmp_path) as cached:
        for _ in range(2):
            for ours, theirs in zip(cached.epoch(loader), loader, strict=True):
                assert [*ours] == [*theirs]
                assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert cached.stats.hits == 10


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
