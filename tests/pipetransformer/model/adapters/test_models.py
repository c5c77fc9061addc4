"""Train timm and transformers models in a pipeline, as a hand-written loop over the original model
does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from transformers import (
    BertForTokenClassification,
    Dinov2ForImageClassification,
    DistilBertForSequenceClassification,
    ElectraForSequenceClassification,
    ModernBertForSequenceClassification,
    RobertaForSequenceClassification,
)

from autodp.sampler import EpochSampler, shuffled
from pipetransformer import FreezeSchedule, Trainer
from tests.helpers.adapted import answerer, classifier, hf_vit, text_model, timm_vit
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.models import Entries
from tests.helpers.pool import Pool

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 10, 4, 3
TEXT_MODELS = {
    "classification": lambda: classifier(num_hidden_layers=3),
    "question_answering": lambda: answerer(num_hidden_layers=3),
    "tokens": lambda: text_model(BertForTokenClassification, num_hidden_layers=3, num_labels=3),
    "roberta": lambda: text_model(
        RobertaForSequenceClassification, num_hidden_layers=3, num_labels=3
    ),
    "electra": lambda: text_model(
        ElectraForSequenceClassification, num_hidden_layers=3, num_labels=3
    ),
    "modernbert": lambda: text_model(
        ModernBertForSequenceClassification,
        num_hidden_layers=3,
        num_labels=3,
        classifier_pooling="mean",
    ),
    "distilbert": lambda: text_model(
        DistilBertForSequenceClassification, n_layers=3, num_labels=3
    ),
}


def build(kind: str) -> tuple[nn.Module, Entries]:
    """Build a tiny model of a library, in float64 and without dropout, and data for it."""
    torch.manual_seed(0)
    if kind == "timm":
        images = torch.randn(NUM_SAMPLES, 1, 8, 8, dtype=torch.float64)
        entries = {"x": images, "y": torch.arange(NUM_SAMPLES) % 3}
        return timm_vit(depth=3, in_chans=1).double(), Entries(entries)
    if kind == "dinov2":  # With a token for hidden patches, which gets no gradient.
        images = torch.randn(NUM_SAMPLES, 3, 8, 8, dtype=torch.float64)
        entries = {"pixel_values": images, "labels": torch.arange(NUM_SAMPLES) % 3}
        dino: nn.Module = hf_vit(Dinov2ForImageClassification, num_hidden_layers=3).double()
        return dino, Entries(entries)
    model = TEXT_MODELS[kind]()
    lengths = torch.arange(NUM_SAMPLES) % 6 + 3
    entries = {
        "input_ids": torch.randint(1, 20, (NUM_SAMPLES, 8)),
        "attention_mask": (torch.arange(8) < lengths[:, None]).long(),
        "token_type_ids": torch.randint(0, 2, (NUM_SAMPLES, 8)),
    }
    if kind in ("distilbert", "modernbert"):
        del entries["token_type_ids"]
    if kind == "question_answering":
        entries["start_positions"] = torch.zeros(NUM_SAMPLES, dtype=torch.long)
        entries["end_positions"] = torch.arange(NUM_SAMPLES) % 4
    elif kind == "tokens":
        labels = torch.arange(NUM_SAMPLES * 8).reshape(NUM_SAMPLES, 8) % 3
        entries["labels"] = labels.where(entries["attention_mask"] == 1, -100)
    else:
        entries["labels"] = torch.arange(NUM_SAMPLES) % 3
    return model.double(), Entries(entries)


@measuring(never)
def train(kind: str, length: int) -> dict[str, Tensor]:
    """Train in a pipeline, freezing a layer in the second epoch."""
    model, data = build(kind)
    with Trainer(
        model,
        data,
        optimizer=lambda named: SGD([p for _, p in named], lr=0.1, momentum=0.9),
        epochs=EPOCHS,
        global_batch_size=BATCH_SIZE,
        pipeline_length=length,
        micro_batches=2,
        progress=False,
        freeze=FreezeSchedule((0, 1, 2)),
    ) as trainer:
        trainer.fit()
        return {name: t.clone() for name, t in trainer.state_dict().items()}


def plain(kind: str) -> dict[str, Tensor]:
    """Train the original model in a plain loop, by its own forward and its own loss."""
    model, data = build(kind)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = EpochSampler(NUM_SAMPLES, shuffled(NUM_SAMPLES, seed=0))
    for epoch in range(EPOCHS):
        freeze_bottom(model, kind, epoch)
        for position in range(0, NUM_SAMPLES, BATCH_SIZE):
            ids = sampler.global_batch(epoch, position, BATCH_SIZE)
            batch = {name: t[ids] for name, t in data.tensors.items()}
            optimizer.zero_grad(set_to_none=True)
            loss: Any = (
                nn.functional.cross_entropy(model(batch["x"]), batch["y"])
                if kind == "timm"
                else model(**batch).loss
            )
            loss.backward()
            optimizer.step()
    return dict(model.state_dict())


def freeze_bottom(model: nn.Module, kind: str, num_layers: int) -> None:
    """Freeze the embedding and so many blocks."""
    bottom: tuple[str, ...]
    if kind == "timm":
        bottom = (
            "cls_token",
            "pos_embed",
            "patch_embed",
            *(f"blocks.{i}." for i in range(num_layers)),
        )
    else:
        encoder: Any = model.base_model_prefix
        lists = {"distilbert": "transformer.layer", "modernbert": "layers"}
        blocks = f"{encoder}.{lists.get(kind, 'encoder.layer')}"
        bottom = (f"{encoder}.embeddings", *(f"{blocks}.{i}." for i in range(num_layers)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (num_layers and name.startswith(bottom)))


KINDS = ("timm", "dinov2", *TEXT_MODELS)
QUICK = {
    (1, "classification"),
    *((2, kind) for kind in ("timm", "dinov2", "tokens", "modernbert")),
}
"""What trains where slow tests are left out; `test_adapters` holds the cut of each family."""


@pytest.mark.parametrize(
    ("length", "kind"),
    [case if case in QUICK else slow(*case) for case in itertools.product((1, 2), KINDS)],
)
def test_every_parameter_ends_as_in_a_plain_loop(two_ranks: Pool, kind: str, length: int) -> None:
    ours, theirs = two_ranks.run(train, kind, length)[0], plain(kind)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        allowed = 1e-9 + 1e-7 * float(theirs[name].abs().max())
        assert float((tensor - theirs[name]).abs().max()) <= allowed, name
