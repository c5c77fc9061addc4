"""Build tiny models that no hand-written adapter knows, and train them as a user's loop would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.optim import SGD

from autodp.sampler import EpochSampler, shuffled
from tests.helpers.models import Entries

NUM_SAMPLES, BATCH_SIZE = 10, 4
LENGTH, WORDS = 8, 40

_SMALL = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": WORDS,
    "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
_NO_DROPOUT = dict.fromkeys(
    ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout", "embd_pdrop",
     "hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "resid_dropout", "embd_dropout",
     "activation_dropout", "classifier_dropout", "summary_first_dropout"), 0.0
)  # fmt: skip
_GROUPED = {"num_key_value_heads": 1, "head_dim": 8}
_IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 3}


@dataclass(frozen=True)
class Kind:
    """Describe a tiny model.

    Args:
        name: of the class, in transformers or timm.
        blocks: the module that lists its blocks.
        bottom: beginnings of names that freeze with the first block.
        options: of its configuration.
    """

    name: str
    blocks: str
    bottom: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rounding(self) -> float:
        """Return how far a tensor may differ, relative to its largest: norms of this family are
        computed in float32, whatever the model's dtype."""
        return 5e-5 if self.blocks == "model.layers" else 1e-7

    @property
    def is_causal(self) -> bool:
        return self.name.endswith(("LMHeadModel", "CausalLM"))

    @property
    def is_image(self) -> bool:
        return "Image" in self.name or not self.name[0].isupper()


_LLAMA = ("model.layers", ("model.embed_tokens",))
KINDS: dict[str, Kind] = {
    "gpt2": Kind(
        "GPT2LMHeadModel", "transformer.h", ("transformer.wte", "transformer.wpe"),
        {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32, "n_inner": 24},
    ),
    "gpt2_classifier": Kind(
        "GPT2ForSequenceClassification", "transformer.h", ("transformer.wte", "transformer.wpe"),
        {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32, "n_inner": 24},
    ),
    "llama": Kind("LlamaForCausalLM", *_LLAMA, _GROUPED),
    "qwen2": Kind("Qwen2ForCausalLM", *_LLAMA, _GROUPED),
    "qwen3": Kind("Qwen3ForCausalLM", *_LLAMA, _GROUPED),
    "gemma3": Kind("Gemma3ForCausalLM", *_LLAMA, {**_GROUPED, "sliding_window": 4}),
    "mistral": Kind("MistralForCausalLM", *_LLAMA, {**_GROUPED, "sliding_window": 4}),
    "phi": Kind("PhiForCausalLM", *_LLAMA),
    "opt": Kind(
        "OPTForCausalLM", "model.decoder.layers",
        ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        {"ffn_dim": 24, "word_embed_proj_dim": 16},
    ),
    "bloom": Kind(
        "BloomForCausalLM", "transformer.h",
        ("transformer.word_embeddings.", "transformer.word_embeddings_layernorm"),
        {"n_layer": 3, "n_head": 2},
    ),
    "deberta": Kind(
        "DebertaV2ForSequenceClassification", "deberta.encoder.layer",
        ("deberta.embeddings", "deberta.encoder.rel_embeddings", "deberta.encoder.LayerNorm"),
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4,
         "norm_rel_ebd": "layer_norm", "pooler_hidden_size": 16, "pooler_dropout": 0.0},
    ),
    "albert": Kind(
        "AlbertForSequenceClassification", "albert.encoder",
        ("albert.embeddings",), {"embedding_size": 8, "classifier_dropout_prob": 0.0},
    ),
    "mpnet": Kind(
        "MPNetForSequenceClassification", "mpnet.encoder.layer",
        ("mpnet.embeddings", "mpnet.encoder.relative_attention_bias"),
    ),
    "xlnet": Kind(
        "XLNetForSequenceClassification", "transformer.layer", ("transformer.word_embedding",),
        {"d_model": 16, "n_layer": 3, "n_head": 2, "d_inner": 24, "summary_last_dropout": 0.0,
         "vocab_size": WORDS},
    ),
    "mobilebert": Kind(
        "MobileBertForSequenceClassification", "mobilebert.encoder.layer",
        ("mobilebert.embeddings",),
        {"embedding_size": 16, "intra_bottleneck_size": 8, "true_hidden_size": 8},
    ),
    "swin": Kind(
        "SwinForImageClassification", "swin.encoder.layers", ("swin.embeddings",),
        {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "image_size": 16,
         "patch_size": 2, "drop_path_rate": 0.0},
    ),
    "beit": Kind(
        "BeitForImageClassification", "beit.layers", ("beit.embeddings",),
        {**_IMAGES, "drop_path_rate": 0.0},
    ),
    "eva": Kind(
        "eva02_tiny_patch14_224", "blocks", ("cls_token", "pos_embed", "patch_embed"),
        {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2,
         "num_classes": 3},
    ),
}  # fmt: skip


def build(kind: Kind) -> nn.Module:
    """Build a tiny model in float64, without dropout, the same weights on every call."""
    torch.manual_seed(0)
    if not kind.name[0].isupper():
        return timm.create_model(kind.name, **kind.options).double()
    model_class: Any = getattr(transformers, kind.name)
    small = {} if {"depths", "d_inner"} & kind.options.keys() else _SMALL
    options = {**small, **_NO_DROPOUT, **kind.options}
    config = model_class.config_class(**options, num_labels=3)
    model: nn.Module = model_class(config).double()
    return model


def data(kind: Kind) -> Entries:
    """Make data for it: padded texts, or images."""
    generator = torch.Generator().manual_seed(1)
    classes = torch.arange(NUM_SAMPLES) % 3
    if kind.is_image:
        size = kind.options.get("image_size", 8)
        shape = (NUM_SAMPLES, 3, size, size)
        images = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_timm = not kind.name[0].isupper()
        return Entries({"x": images, "y": classes} if is_timm else
                       {"pixel_values": images, "labels": classes})  # fmt: skip
    ids = torch.randint(3, WORDS, (NUM_SAMPLES, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < (torch.arange(NUM_SAMPLES) % 6 + 3)[:, None]).long()
    labels = ids.where(mask == 1, -100) if kind.is_causal else classes
    return Entries(
        {"input_ids": ids.where(mask == 1, 0), "attention_mask": mask, "labels": labels}
    )


def sgd(named: Any) -> SGD:
    """Build SGD with momentum."""
    return SGD([p for _, p in named], lr=0.1, momentum=0.9)


def mean_loss(kind: Kind, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of a model's own forward, in float64, as its documentation states it."""
    given = {name: t for name, t in batch.items() if name not in ("labels", "y")}
    answer = model(**given)
    if kind.is_causal:  # Its own computes in float32.
        return F.cross_entropy(
            answer.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )
    if "y" in batch:
        return F.cross_entropy(answer, batch["y"])
    return F.cross_entropy(answer.logits, batch["labels"])


def train_plainly(
    kind: Kind, frozen: tuple[int, ...], change: Callable[[nn.Module], nn.Module] = lambda m: m
) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and weights of a loop over the model's own forward.

    Args:
        frozen: blocks that are frozen, by epoch.
        change: made to the model first.
    """
    model, entries = change(build(kind)), data(kind)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer, losses = sgd(named), []
    sampler = EpochSampler(NUM_SAMPLES, shuffled(NUM_SAMPLES, seed=0))
    for epoch, num_frozen in enumerate(frozen):
        bottom = (*kind.bottom, *(f"{kind.blocks}.{i}." for i in range(num_frozen)))
        if kind.name.startswith("Albert"):
            bottom = ("albert.embeddings", "albert.encoder")
        for name, parameter in named:
            own = name.removeprefix("base_model.model.")
            parameter.requires_grad_(not (num_frozen and own.startswith(bottom)))
        for position in range(0, NUM_SAMPLES, BATCH_SIZE):
            ids = sampler.global_batch(epoch, position, BATCH_SIZE)
            batch = {name: t[ids] for name, t in entries.tensors.items()}
            optimizer.zero_grad(set_to_none=True)
            loss = mean_loss(kind, model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, dict(model.state_dict())
