"""Build models of random weights, the same ones on every call.

timm, transformers and peft take seconds to import, and only who builds a model needs them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def bert(width: int, depth: int, *, heads: int, dropout: float = 0.0, **others: Any) -> nn.Module:
    """Build a BERT that tells two classes apart."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    return BertForSequenceClassification(BertConfig(**{**sizes, **others}))


def vit(**shape: Any) -> nn.Module:
    """Build a ViT that tells ten classes apart; the shape is as timm takes it."""
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    return VisionTransformer(num_classes=10, **shape)


def gpt2(width: int, depth: int, *, heads: int, words: int, **others: Any) -> nn.Module:
    """Build a GPT-2 without dropout, whose head has weights of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=words, n_embd=width, n_layer=depth, n_head=heads, embd_pdrop=0.0,
        resid_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=1,
        **{"tie_word_embeddings": False, **others},
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(width: int, depth: int, *, heads: int, words: int, **others: Any) -> nn.Module:
    """Build a Llama; by default its keys have half of the heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads,
        use_cache=False, bos_token_id=1, eos_token_id=1,
        **{
            "num_key_value_heads": heads // 2,
            "intermediate_size": 3 * width,
            "tie_word_embeddings": False,
            **others,
        },
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Headed(nn.Module):
    """A linear head on a backbone."""

    def __init__(self, backbone: nn.Module, width: int, num_classes: int) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.backbone(x))
        return answer


def with_lora(model: nn.Module, **settings: Any) -> nn.Module:
    """Give a model adapters without dropout; all else of it is frozen."""
    from peft import LoraConfig, get_peft_model

    adapted: nn.Module = get_peft_model(model, LoraConfig(**settings))
    return adapted
