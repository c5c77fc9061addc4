"""List a small model of each of timm's modules that attends, and what makes it smaller."""

from __future__ import annotations

from typing import Any

_BLOCKS = {"embed_dim": 32, "depth": 4, "num_heads": 4}
_VIT = {"img_size": 32, "patch_size": 8, **_BLOCKS}
_STAGES = {"depths": (1, 1, 2, 1), "num_heads": (2, 2, 4, 4)}
_WINDOWS = {"img_size": 64, "embed_dim": 16, "window_size": 2, **_STAGES}
_TWO_SCALES = {"patch_size": (12, 16), "embed_dim": (32, 32), "num_heads": (4, 4)}
_TWINS = {"embed_dims": (16, 32, 64, 64), "depths": (1, 1, 2, 1)}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "beit": ("beit_base_patch16_224", _VIT),
    "cait": ("cait_xxs24_224", _VIT),
    "coat": ("coat_lite_tiny", {"img_size": 64}),
    "convit": ("convit_tiny", {**_VIT, "embed_dim": 8, "local_up_to_layer": 2}),
    "crossvit": ("crossvit_tiny_240", {"img_size": 48, "img_scale": (1.0, 1.0), **_TWO_SCALES}),
    "csatv2": ("csatv2", {}),
    "davit": ("davit_tiny", {"embed_dims": (16, 16, 32, 32), **_STAGES}),
    "deepseek_vit": ("deepseek_vit_412m", {"img_size": 28, **_BLOCKS}),
    "deit": ("deit_tiny_distilled_patch16_224", _VIT),
    "edgenext": ("edgenext_xx_small", {}),
    "efficientformer": ("efficientformer_l1", {"img_size": 224}),
    "efficientformer_v2": ("efficientformerv2_s0", {"img_size": 64}),
    "efficientvit_mit": ("efficientvit_b0", {}),
    "efficientvit_msra": ("efficientvit_m0", {"img_size": 64}),
    "eva": ("eva02_tiny_patch14_224", _VIT),
    "fastvit": ("fastvit_t8", {}),
    "focalnet": ("focalnet_tiny_srf", {}),
    "gcvit": ("gcvit_xxtiny", {"img_size": 224, "embed_dim": 16}),
    "gemma4_vit": ("gemma4_vit_167m", _BLOCKS),
    "hiera": ("hiera_tiny_224", {"img_size": 64, "embed_dim": 16}),
    "hieradet_sam2": ("sam2_hiera_tiny", {"embed_dim": 16}),
    "iformer": ("iformer_t", {}),
    "levit": ("levit_128s", {"img_size": 224}),
    "lowformer": ("lowformer_b0", {}),
    "maxxvit": ("coatnet_nano_cc_224", {"img_size": 64}),
    "metaformer": ("caformer_s18", {}),
    "mlp_mixer": ("mixer_s32_224", {"img_size": 64}),
    "mobilevit": ("mobilevit_xxs", {}),
    "mvitv2": ("mvitv2_tiny", {"img_size": 64}),
    "naflexvit": ("naflexvit_base_patch16_gap", {"patch_size": 8, **_BLOCKS}),
    "nest": ("nest_tiny_jx", {"img_size": 64}),
    "nextvit": ("nextvit_small", {"stem_chs": (16, 16, 16)}),
    "pit": ("pit_ti_224", {"img_size": 64}),
    "pvt_v2": ("pvt_v2_b0", {}),
    "qwen3_vit": ("qwen3_vit_88m", _BLOCKS),
    "shvit": ("shvit_s1", {}),
    "swiftformer": ("swiftformer_xs", {}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", _WINDOWS),
    "swin_transformer_v2": ("swinv2_tiny_window8_256", _WINDOWS),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", _WINDOWS),
    "tiny_vit": ("tiny_vit_5m_224", {"embed_dims": (16, 32, 32, 64), "num_heads": (2, 2, 4, 4)}),
    "tnt": ("tnt_s_legacy_patch16_224", {"img_size": 32, "embed_dim": 48, "depth": 4}),
    "twins": ("twins_svt_small", {"img_size": 64, **_TWINS}),
    "visformer": ("visformer_tiny", {"img_size": 64}),
    "vision_transformer": ("vit_tiny_patch16_224", _VIT),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", {"img_size": 64, "depth": 4}),
    "vision_transformer_relpos": ("vit_relpos_small_patch16_224", _VIT),
    "vision_transformer_sam": ("samvit_base_patch16_224", _VIT),
    "vitamin": ("vitamin_small_224", {"img_size": 64}),
    "volo": ("volo_d1_224", {"img_size": 64}),
    "xcit": ("xcit_nano_12_p16_224", {"img_size": 64, "depth": 4}),
}
