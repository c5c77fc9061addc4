"""Present models of known classes by hand, with cuts within their blocks.

timm_vit, transformers_vit                  of images
transformers_bert, transformers_modernbert  of texts ─► transformers_texts: what these share
transformer                                 what all share
"""

from pipetransformer.model.adapters import (
    timm_vit,
    transformers_bert,
    transformers_modernbert,
    transformers_vit,
)

__all__ = ["timm_vit", "transformers_bert", "transformers_modernbert", "transformers_vit"]
