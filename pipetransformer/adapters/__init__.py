"""Present models as sequences of sublayers that share their very parameters.

timm_vit, transformers_bert, transformers_vit, sequential, or yours ─► base: LayeredModel
"""

from pipetransformer.adapters.base import LayeredModel, Sublayer
from pipetransformer.adapters.parameters import has_hooks, laid_out_as, refuse_hooks
from pipetransformer.adapters.registry import adapt, register_adapter

__all__ = [
    "LayeredModel", "Sublayer", "adapt", "has_hooks", "laid_out_as", "refuse_hooks",
    "register_adapter",
]  # fmt: skip
