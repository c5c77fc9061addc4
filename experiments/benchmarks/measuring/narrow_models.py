"""Build models so narrow that computing is negligible, and run them by hand, block by block.

They have no dropout and random weights, and every call builds the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from experiments.benchmarks.measuring.loop_by_hand import Case

WIDTH, WORDS, NUM_CLASSES = 8, 50, 10


def _texts(
    num: int, length: int, *, classes: bool = False
) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Return random texts, and their labels: a class each, or their own tokens."""
    ids = torch.randint(5, WORDS, (num, length), generator=torch.Generator().manual_seed(1))
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


def bert(num_steps: int) -> Case:
    library: Any = transformers
    config = library.BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=6, num_attention_heads=2,
        intermediate_size=2 * WIDTH, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip

    def below(model: Any, batch: Any, depth: int) -> Tensor:
        hidden = model.bert.embeddings(batch["input_ids"])
        return _run_blocks(model.bert.encoder.layer[:depth], hidden)

    def above(model: Any, hidden: Tensor, labels: Tensor, depth: int) -> Tensor:
        hidden = _run_blocks(model.bert.encoder.layer[depth:], hidden)
        return F.cross_entropy(model.classifier(model.bert.pooler(hidden)), labels)

    build = _seeded(lambda: library.BertForSequenceClassification(config))
    items, labels = _texts(num_steps * 32, 8, classes=True)
    return Case(
        build, items, labels, 32, 4, lambda m: m.bert.encoder.layer, below, above, _own_loss
    )


def vit(num_steps: int) -> Case:
    def build() -> nn.Module:
        return timm.create_model(
            "vit_small_patch16_224", img_size=16, patch_size=8, embed_dim=WIDTH, num_heads=2,
            depth=12, num_classes=NUM_CLASSES,
        )  # fmt: skip

    def below(model: Any, batch: Any, depth: int) -> Tensor:
        hidden = model.norm_pre(model._pos_embed(model.patch_embed(batch[0])))
        return _run_blocks(model.blocks[:depth], hidden)

    def above(model: Any, hidden: Tensor, labels: Tensor, depth: int) -> Tensor:
        hidden = model.norm(_run_blocks(model.blocks[depth:], hidden))
        return F.cross_entropy(model.forward_head(hidden), labels)

    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    labels = torch.arange(num_steps * 64) % NUM_CLASSES
    images = torch.randn(len(labels), 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return Case(
        _seeded(build), TensorDataset(images, labels), labels, 64, 8, lambda m: m.blocks,
        below, above, loss, {"loss_fn": nn.CrossEntropyLoss()},
    )  # fmt: skip


def llama(num_steps: int) -> Case:
    library: Any = transformers
    config = library.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=16, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=2 * WIDTH, max_position_embeddings=32,
        tie_word_embeddings=False, use_cache=False, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip

    def run(model: Any, blocks: Any, hidden: Tensor) -> Tensor:
        positions = model.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        return _run_blocks(blocks, hidden, position_embeddings=positions)

    def below(model: Any, batch: Any, depth: int) -> Tensor:
        hidden = model.model.embed_tokens(batch["input_ids"])
        return run(model, model.model.layers[:depth], hidden)

    def above(model: Any, hidden: Tensor, labels: Tensor, depth: int) -> Tensor:
        hidden = run(model, model.model.layers[depth:], hidden)
        return _next_token_loss(model.lm_head(model.model.norm(hidden)), labels)

    build = _seeded(lambda: library.LlamaForCausalLM(config))
    items, labels = _texts(num_steps * 8, 16)
    return Case(build, items, labels, 8, 10, lambda m: m.model.layers, below, above, _own_loss)


def gpt2_lora(num_steps: int) -> Case:
    # Not all installations have it; without it the case is left out.
    from peft import LoraConfig, get_peft_model

    library: Any = transformers
    config = library.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=12, n_head=2, n_positions=32, embd_pdrop=0.0,
        resid_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False, use_cache=False,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)

    def below(model: Any, batch: Any, depth: int) -> Tensor:
        body, ids = model.base_model.model.transformer, batch["input_ids"]
        return _run_blocks(body.h[:depth], body.wte(ids) + body.wpe.weight[: ids.shape[1]])

    def above(model: Any, hidden: Tensor, labels: Tensor, depth: int) -> Tensor:
        whole = model.base_model.model
        hidden = _run_blocks(whole.transformer.h[depth:], hidden)
        return _next_token_loss(whole.lm_head(whole.transformer.ln_f(hidden)), labels)

    build = _seeded(lambda: get_peft_model(library.GPT2LMHeadModel(config), lora))
    items, labels = _texts(num_steps * 8, 16)
    return Case(
        build, items, labels, 8, 8, lambda m: m.base_model.model.transformer.h, below, above,
        _own_loss,
    )  # fmt: skip


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Have every call build the same weights."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return built


CASES = {"bert": bert, "vit": vit, "llama": llama, "gpt2_lora": gpt2_lora}
"""By name, functions of the steps of an epoch."""
