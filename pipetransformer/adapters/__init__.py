"""Present models as sequences of sublayers that share their very parameters.

timm_vit, transformers_vit ──────────────────────────┐
transformers_texts ─► transformers_bert, _modernbert ┴► registry, or yours ─► base
"""

from pipetransformer.adapters.base import LayeredModel, Sublayer
from pipetransformer.adapters.parameters import (
    has_hooks,
    laid_out_as,
    large_embeddings,
    named_tensors,
    refuse_hooks,
)
from pipetransformer.adapters.registry import adapt, register_adapter
from pipetransformer.adapters.transformer import qualified_name

__all__ = [
    "LayeredModel", "Sublayer", "adapt", "has_hooks", "laid_out_as",
    "large_embeddings", "named_tensors", "qualified_name", "refuse_hooks", "register_adapter",
]  # fmt: skip
