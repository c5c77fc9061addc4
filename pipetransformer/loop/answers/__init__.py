"""Keep of a frozen model's answer what a loss reads, and not a vocabulary for each token.

token_log_probs: for preference losses             top_logits: for distillation
"""

from pipetransformer.loop.answers.token_log_probs import TokenAnswer, TokenLogProbs
from pipetransformer.loop.answers.top_logits import TopAnswer, TopLogits

__all__ = ["TokenAnswer", "TokenLogProbs", "TopAnswer", "TopLogits"]
