"""Run models by hand, block by block, as a careful user would who holds frozen blocks' outputs.

They have no dropout and random weights. By default they are so narrow that computing is
negligible.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from experiments import random_models
from experiments.benchmarks.measuring.loop_by_hand import Case

WIDTH, WORDS = 8, 50


def _texts(
    num: int, length: int, words: int, *, classes: bool = False
) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Return random texts, and their labels: a class each, or their own tokens."""
    ids = torch.randint(5, words, (num, length), generator=torch.Generator().manual_seed(1))
    labels = torch.arange(num) % 2 if classes else ids
    items = [
        {"input_ids": one, "attention_mask": torch.ones_like(one), "labels": label}
        for one, label in zip(ids, labels, strict=True)
    ]
    return items, labels


def _run_blocks(blocks: Any, hidden: Tensor, **others: Any) -> Tensor:
    for block in blocks:
        hidden = block(hidden, **others)
    return hidden


def _own_loss(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def bert(
    num_steps: int, *, width: int = WIDTH, heads: int = 2, words: int = WORDS, length: int = 8
) -> Case:
    batch = 32 if width == WIDTH else 16

    def below(model: Any, batch: Any, depth: int) -> Tensor:
        hidden = model.bert.embeddings(batch["input_ids"])
        return _run_blocks(model.bert.encoder.layer[:depth], hidden)

    def above(model: Any, hidden: Tensor, labels: Tensor, depth: int) -> Tensor:
        hidden = _run_blocks(model.bert.encoder.layer[depth:], hidden)
        return F.cross_entropy(model.classifier(model.bert.pooler(hidden)), labels)

    build = partial(random_models.bert, width, 6, heads=heads, vocab_size=words)
    items, labels = _texts(num_steps * batch, length, words, classes=True)
    return Case(
        build, items, labels, batch, 4, lambda m: m.bert.encoder.layer, below, above, _own_loss
    )


def vit(num_steps: int, *, width: int = WIDTH, pixels: int = 16, patch: int = 8) -> Case:
    batch = 64 if width == WIDTH else 16

    def below(model: Any, batch: Any, depth: int) -> Tensor:
        hidden = model.norm_pre(model._pos_embed(model.patch_embed(batch[0])))
        return _run_blocks(model.blocks[:depth], hidden)

    def above(model: Any, hidden: Tensor, labels: Tensor, depth: int) -> Tensor:
        hidden = model.norm(_run_blocks(model.blocks[depth:], hidden))
        return F.cross_entropy(model.forward_head(hidden), labels)

    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    build = partial(
        random_models.vit, img_size=pixels, patch_size=patch, embed_dim=width, depth=12,
        num_heads=max(2, width // 64),
    )  # fmt: skip
    labels = torch.arange(num_steps * batch) % 10
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(len(labels), 3, pixels, pixels, generator=generator)
    return Case(
        build, TensorDataset(images, labels), labels, batch, 8, lambda m: m.blocks,
        below, above, loss, {"loss_fn": nn.CrossEntropyLoss()},
    )  # fmt: skip


def llama(num_steps: int) -> Case:
    def run(model: Any, blocks: Any, hidden: Tensor) -> Tensor:
        positions = model.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        return _run_blocks(blocks, hidden, position_embeddings=positions)

    def below(model: Any, batch: Any, depth: int) -> Tensor:
        hidden = model.model.embed_tokens(batch["input_ids"])
        return run(model, model.model.layers[:depth], hidden)

    def above(model: Any, hidden: Tensor, labels: Tensor, depth: int) -> Tensor:
        hidden = run(model, model.model.layers[depth:], hidden)
        return _next_token_loss(model.lm_head(model.model.norm(hidden)), labels)

    build = partial(random_models.llama, WIDTH, 16, heads=2, words=WORDS)
    items, labels = _texts(num_steps * 8, 16, WORDS)
    return Case(build, items, labels, 8, 10, lambda m: m.model.layers, below, above, _own_loss)


def gpt2(
    num_steps: int, *, width: int = WIDTH, words: int = WORDS, length: int = 16, lora: bool = False
) -> Case:
    def whole(model: Any) -> Any:
        return model.base_model.model if lora else model

    def build() -> nn.Module:
        model = random_models.gpt2(width, 12, heads=max(2, width // 64), words=words)
        if not lora:
            return model
        return random_models.with_lora(
            model, task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True
        )

    def below(model: Any, batch: Any, depth: int) -> Tensor:
        body, ids = whole(model).transformer, batch["input_ids"]
        return _run_blocks(body.h[:depth], body.wte(ids) + body.wpe.weight[: ids.shape[1]])

    def above(model: Any, hidden: Tensor, labels: Tensor, depth: int) -> Tensor:
        hidden = _run_blocks(whole(model).transformer.h[depth:], hidden)
        logits = whole(model).lm_head(whole(model).transformer.ln_f(hidden))
        return _next_token_loss(logits, labels)

    items, labels = _texts(num_steps * 8, length, words)
    return Case(
        build, items, labels, 8, 8, lambda m: whole(m).transformer.h, below, above, _own_loss
    )


NARROW: dict[str, Callable[[int], Case]] = {
    "bert": bert, "vit": vit, "llama": llama, "gpt2_lora": partial(gpt2, lora=True)
}  # fmt: skip
"""By name, functions of the steps of an epoch."""
