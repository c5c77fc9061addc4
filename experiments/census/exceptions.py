"""List what is set beside the sizes, by model type, so that a configuration builds tiny."""

from __future__ import annotations

from typing import Any

_HYBRID = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 8,
    "ngram_vocab_size_base": 128,
}

_WINDOWS = {"window_size": 2, "patch_size": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

SIZES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1},
    "bit": {"num_groups": 4},
    "bros": {"hidden_size": 128},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "cvt": {"depth": [1, 2, 4]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "donut-swin": _WINDOWS,
    "dots1": {"n_shared_experts": 1},
    "dots3_note_audio_encoder": {
        "adapter_input_size": 32,
        "adapter_out_dim": 32,
        "downsample_hidden_size": 8,
    },
    "dots3_note_vision_encoder": {
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
        "mlp_layer_types": ["dense"] * 4,
    },
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hgnet_v2": {"depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048]},
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "longformer": {"attention_window": 4},
    "mamba2": {"num_heads": 8},
    "markuplm": {"max_depth": 4},
    "mistral4": {"head_dim": 16},
    "mobilevit": {"patch_size": 2},
    "mobilevitv2": {"patch_size": 2},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 16},
    "perceiver": {
        "max_position_embeddings": 12,
        "d_latents": 32,
        "num_latents": 8,
        "num_blocks": 1,
        "num_self_attends_per_block": 4,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 1,
    },
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": _INDEXER,
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [3, 4],
        "attn_layers": ["local"] * 4,
        "local_attn_chunk_length": 4,
    },
    "siglip2_vision_model": {"num_patches": 16},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "textnet": {"hidden_sizes": [64, 64, 128, 256, 512]},
    "timm_backbone": {"backbone": "resnet18"},
    "timm_wrapper": {
        "architecture": "vit_tiny_patch16_224",
        "model_args": {"img_size": 32, "embed_dim": 32, "depth": 4, "num_heads": 4},
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": _HYBRID},
    "zamba2": {"layers_block_type": _HYBRID},
    "zaya": {"num_experts_per_tok": 1},
}

FIELDS: dict[str, dict[str, Any]] = {"ReformerModelWithLMHead": {"is_decoder": True}}
"""What is set for one class alone."""

IMAGE_SIZES = {
    **dict.fromkeys(("levit", "convnext", "convnextv2", "swin", "swinv2", "donut-swin"), 64),
    "mobilevitv2": 128,
}
"""Pixels of an image's side, by model type; else 32."""
