"""Keep of a teacher what distillation reads, and not a vocabulary for each token."""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn


class TopAnswer(NamedTuple):
    """Hold the largest logits at each place, and what makes them probabilities.

    Attributes:
        logits: (..., k), largest first, in the model's dtype.
        indices: (..., k) int32, of the classes or tokens.
        log_sum: (...) float32, the log-sum-exp of all logits.
    """

    logits: Tensor
    indices: Tensor
    log_sum: Tensor

    @property
    def log_probs(self) -> Tensor:
        """Return (..., k) float32 log-probabilities of the indices."""
        return self.logits.float() - self.log_sum[..., None]


@final
class TopLogits(nn.Module):
    """Give a model's largest logits alone, so that a row of a teacher is small.

        teacher = TopLogits(model, 64)
        with attach(student, parts=[teacher]) as cached: ...

    Args:
        model: returns logits, (..., C), or a tuple or a ModelOutput that has them.
        num: how many are kept, k.
    Raises:
        ValueError: `num` is less than 1; later, there are fewer logits, or none.
    """

    def __init__(self, model: nn.Module, num: int) -> None:
        super().__init__()
        if num < 1:
            raise ValueError(f"num is {num}; keep at least 1 logit")
        self.model, self.num = model, num

    def forward(self, *args: Any, **kwargs: Any) -> TopAnswer:
        answer = self.model(*args, **kwargs)
        if not isinstance(answer, Tensor):
            answer = getattr(answer, "logits", answer[0])
        if not isinstance(answer, Tensor) or answer.shape[-1] < self.num:
            raise ValueError(
                f"{type(self.model).__name__} does not return logits of {self.num} classes or more"
            )
        logits, indices = answer.topk(self.num, dim=-1)
        return TopAnswer(logits, indices.to(torch.int32), answer.float().logsumexp(-1))
