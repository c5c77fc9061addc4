"""Know the loss that a model computes, so that those of a batch's parts add up.

transformers_losses: by what it returned   word_head: over many words, without all logits
"""

from pipetransformer.model.losses.transformers_losses import (
    classification_loss,
    own_loss_of,
    span_loss,
    token_loss,
)
from pipetransformer.model.losses.word_head import UnreadLogits, WordHead, word_head

__all__ = [
    "UnreadLogits", "WordHead", "classification_loss", "own_loss_of", "span_loss", "token_loss",
    "word_head",
]  # fmt: skip
