"""Prove that models which recompute activations themselves train as without, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor

from freeze import FreezeSchedule
from pipetransformer import Trainer
from pipetransformer.model import present
from tests.helpers.inspection import elastic_of, layered_of
from tests.helpers.pool import Pool
from tests.helpers.texts import tiny_bert

NUM_SAMPLES = 12


def gpt2(asks: dict[str, bool] | None = None) -> Any:
    """Build a tiny GPT-2 with dropout, which recomputes its blocks if it is asked to."""
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=4, n_head=2, num_labels=3,
        pad_token_id=0, resid_pdrop=0.2, attn_pdrop=0.2, embd_pdrop=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2ForSequenceClassification(config).double()
    if asks is not None:
        model._set_gradient_checkpointing(True, partial(torch.utils.checkpoint.checkpoint, **asks))
    return model


def texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (NUM_SAMPLES, 8), generator=generator)
    mask = torch.ones_like(ids)
    return [
        {"input_ids": i, "attention_mask": m, "labels": i[0] % 3}
        for i, m in zip(ids, mask, strict=True)
    ]


@dataclass(frozen=True)
class Run:
    """Hold every loss, the weights at the end, and which sublayers recompute by themselves."""

    losses: list[float]
    weights: dict[str, Tensor]
    recompute: list[bool]
    keep_bytes: list[float]


def train(asks: dict[str, bool] | None, **settings: Any) -> Run:
    """Train with two layers frozen in the middle, and thawed again."""
    losses = []
    with Trainer(
        gpt2(asks),
        texts(),
        freeze=FreezeSchedule((0, 2, 0)),
        epochs=3,
        global_batch_size=6,
        micro_batches=2,
        progress=False,
        **settings,
    ) as trainer:
        while not trainer.is_over:
            losses.append(trainer.step().loss)
        measured = elastic_of(trainer).profile
        assert measured is not None
        costs = measured.sublayers
        weights = {name: t.clone() for name, t in trainer.state_dict().items()}
    return Run(
        losses, weights, [one.recomputes for one in costs], [one.saved_bytes for one in costs]
    )


def assert_same_bits(ours: Run, theirs: Run) -> None:
    assert ours.losses == theirs.losses
    assert ours.weights.keys() == theirs.weights.keys()
    for name, tensor in ours.weights.items():
        assert torch.equal(tensor, theirs.weights[name]), name


@pytest.mark.parametrize("setting", [False, True])
def test_blocks_that_recompute_by_themselves_train_the_same_bits(setting: bool) -> None:
    asking = train({"use_reentrant": False}, activation_checkpointing=setting)
    assert_same_bits(asking, plain := train(None))
    assert asking.recompute == [False, *[True] * 4, False]
    # What a block saves while it runs backward is counted as it is without.
    assert asking.keep_bytes == plain.keep_bytes


@pytest.mark.slow
def test_blocks_that_recompute_by_themselves_train_the_same_bits_in_a_pipeline(
    two_ranks: Pool,
) -> None:
    (asking, _), (plain, _) = (
        two_ranks.run(partial(train, pipeline_length=2), asks)
        for asks in ({"use_reentrant": False}, None)
    )
    assert_same_bits(asking, plain)


def test_a_known_family_that_recomputes_is_recorded_in_place_of_its_adapter() -> None:
    model = tiny_bert()
    model._set_gradient_checkpointing(
        True, partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    )
    with Trainer(model, texts(), epochs=1, global_batch_size=6, progress=False) as trainer:
        assert layered_of(trainer).is_recorded
        trainer.step()


def vit(asks: bool) -> Any:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=12, depth=3, num_heads=2, num_classes=3
    )
    model.set_grad_checkpointing(asks)
    return model


@pytest.mark.parametrize(
    ("build", "batch", "message"),
    [
        (
            partial(vit, True),
            {"x": torch.randn(2, 3, 32, 32), "y": torch.tensor([0, 1])},
            "of this VisionTransformer is on, .* set activation_checkpointing=True",
        ),
        (
            partial(gpt2, {"use_reentrant": True}),
            {"input_ids": torch.ones(2, 8, dtype=torch.int64), "labels": torch.tensor([0, 1])},
            "of this GPT2ForSequenceClassification is reentrant, and would give a block above",
        ),
    ],
    ids=["by the model", "reentrant"],
)
def test_recomputing_that_would_not_be_honoured_is_refused_with_the_way_out(
    build: Callable[[], Any], batch: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        present(build(), batch)
