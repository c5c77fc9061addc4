"""Build a class tiny, with random weights: lower what sizes its configuration has."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from experiments.census.batches import EOS, NUM_CLASSES, NUM_TOKENS
from experiments.census.exceptions import FIELDS, SIZES
from experiments.census.part_subjects import PART_TASKS
from experiments.census.subjects import Subject
from experiments.census.timm_models import MODELS

NUM_BLOCKS = 4
"""Two of them freeze. Patterns such as "each fourth block is another" show with four."""

LARGEST = 32_000_000
"""Parameters of the largest model that is built."""

SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim", "embedding_size",
         "word_embed_proj_dim", "d_embed", "projection_dim", "hidden_size_global",
         "input_embedding_size", "out_hidden_size", "output_embedding_size"), 32,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers",
         "decoder_layers", "num_encoder_layers", "num_decoder_layers", "depth", "num_blocks"),
        NUM_BLOCKS,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
         "encoder_num_attention_heads", "linear_num_value_heads",
         "linear_num_heads", "linear_num_key_heads",
         "num_global_key_value_heads"), 4,
    ),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff", "d_inner",
         "ffn_hidden_size",
         "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "expert_ffn_hidden_size",
         "intermediate_size_mlp", "shared_expert_intermediate_size", "mlp_hidden_size",
         "shared_intermediate_size"), 48,
    ),
    **dict.fromkeys(
        ("vocab_size", "vocabulary_size", "text_vocab_size", "vocab_size_per_layer_input",
         "entity_vocab_size", "encoder_hash_byte_group_vocab"), 128
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(
        ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim",
         "kv_lora_rank", "q_lora_rank", "d_kv", "d_head", "linear_key_head_dim", "linear_head_dim",
         "linear_value_head_dim", "attention_head_dim", "kv_channels", "index_head_dim",
         "mamba_d_head", "mamba_n_heads", "global_head_dim",
         "hidden_size_per_layer_input", "mamba_d_state", "d_state"), 8,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "top_k", "moe_topk", "moe_k", "num_experts_per_token",
         "moe_top_k", "num_selected_experts"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "n_groups"), 1),
    **dict.fromkeys(("image_size", "input_size"), 32),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 24),
    **dict.fromkeys(("num_mel_bins", "input_feat_per_channel"), 16),
    **dict.fromkeys(("num_queries", "decoder_n_points"), 4),
    "mamba_d_ssm": 64,
    "patch_size": 8,
    "pad_token_id": 0,
    "use_cache": False,
}  # fmt: skip

_OPTIONAL = (
    "q_lora_rank", "n_inner", "pad_token_id", "head_dim", "num_experts", "n_routed_experts",
    "num_experts_per_tok", "n_group", "topk_group", "vocab_size",
)  # fmt: skip
"""Sizes that may be None by default, and are set all the same."""

LISTS: dict[str, list[int]] = {
    **dict.fromkeys(("depths", "depth"), [2, 2, 2, 2]),
    **dict.fromkeys(("num_heads", "num_attention_heads"), [2, 2, 4, 4]),
    **dict.fromkeys(("hidden_sizes", "embed_dims", "embed_dim", "channels"), [16, 16, 32, 32]),
    **dict.fromkeys(("image_size", "input_size"), [32, 32]),
}
"""Sizes of models in stages; cut to as many as a configuration has."""

_RANDOM = re.compile(r"drop|jitter|mask_(time|feature)_prob")


def build(subject: Subject) -> nn.Module:
    """Build a class tiny, with random weights and without dropout.

    Raises:
        Exception: what its configuration or its constructor raises.
    """
    make = _timm_maker(subject) if subject.task == "timm" else _transformers_maker(subject)
    with torch.device("meta"):
        size = sum(p.numel() for p in make().parameters())
    if size > LARGEST:
        raise ValueError(f"tiny, it has {size:,} parameters")
    model = make()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif "DropPath" in type(module).__name__:
            vars(module)["drop_prob"] = 0.0
    return model


def _timm_maker(subject: Subject) -> Callable[[], nn.Module]:
    import timm

    name, smaller = MODELS[subject.family]
    return partial(timm.create_model, name, num_classes=NUM_CLASSES, **smaller)


def _transformers_maker(subject: Subject) -> Callable[[], nn.Module]:
    import transformers

    kind = getattr(transformers, subject.name)
    has_classes = subject.task in ("sequence", "token", "image")
    further = {"num_labels": NUM_CLASSES} if has_classes else {}
    further |= FIELDS.get(subject.name, {})
    return lambda: kind(_with_tokens(tiny_config(kind, **further), subject))


def tiny_config(kind: Any, **further: Any) -> Any:
    """Return a tiny configuration of a model class."""
    default = kind.config_class()
    config = kind.config_class(**{**_small_fields(default), **further})
    for part in (config, config.get_text_config()):
        part._attn_implementation = "eager"
        part._experts_implementation = "eager"
        part.pad_token_id, part.eos_token_id = 0, EOS
        if part.is_encoder_decoder:
            part.decoder_start_token_id = 0
    return config


def _with_tokens(config: Any, subject: Subject) -> Any:
    """Give each special token of a part's census an id of its own, above those that are drawn."""
    from transformers import PreTrainedConfig

    if subject.task not in PART_TASKS:
        return config
    ids: dict[str, int] = {}
    stack = [config]
    while stack:
        one = stack.pop()
        stack += [inner for inner in vars(one).values() if isinstance(inner, PreTrainedConfig)]
        rope = getattr(one, "rope_parameters", None)
        if isinstance(rope, dict) and "rope_type" in rope:
            rope["mrope_section"] = [2, 1, 1]
        for name in filter(_TOKEN.search, vars(one)):
            if getattr(one, name) is None or int(getattr(one, name)) > EOS:
                setattr(one, name, ids.setdefault(name, NUM_TOKENS + len(ids)))
    return config


_TOKEN = re.compile(
    r"(image|video|audio|vision|media|speech|boi|eoi|boa|eoa|start|end)_token_(id|index)$"
)


def _small_fields(default: Any) -> dict[str, Any]:
    """Return what a configuration, and those within it, is built with to be small."""
    from transformers import PreTrainedConfig

    fields: dict[str, Any] = {}
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = {"model_type": value.model_type, **_small_fields(value)}
        elif name in SMALL and (isinstance(value, int) or name in _OPTIONAL):
            fields[name] = SMALL[name]
        elif name in LISTS and isinstance(value, (list, tuple)):
            fields[name] = LISTS[name][: len(value)]
        elif isinstance(value, float) and value and _RANDOM.search(name):
            fields[name] = 0.0
        elif isinstance(value, (list, tuple)) and name.startswith("drop"):
            fields[name] = [0.0] * len(value)
    if "kv_lora_rank" in fields:
        # Latent attention has as many keys as queries, and rotates a part of each head.
        fields.update({n: 4 for n in ("num_key_value_heads",) if n in fields})
    return {**fields, **SIZES.get(default.model_type, {})}
