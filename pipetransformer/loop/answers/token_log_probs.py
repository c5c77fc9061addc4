"""Keep of a reference model what preference losses read, and not a vocabulary for each token."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.nn.functional import pad


class TokenAnswer(NamedTuple):
    """Hold how likely a model finds a text.

    Attributes:
        log_probs: (N, S - 1) float32, of each token but the first; 0 where its label is -100.
    """

    log_probs: Tensor


@final
class TokenLogProbs(nn.Module):
    """Give the log-probabilities of a text's own tokens, in the place of TRL's reference model.

        reference = TokenLogProbs(trainer.ref_model)
        prepare = trainer.accelerator.prepare_model  # Autocast, as for the reference before.
        trainer.ref_model = prepare(reference, evaluation_mode=True)
        trainer.add_callback(FreezeCallback(parts=[reference.rows]))

    Args:
        model: a causal language model, with images or without; it returns `logits`, (N, S, C).
    Attributes:
        rows: the part. It returns (N, S, 1) float32 of the model's inputs alone, with 0 for the
            first token and for padding.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.rows = _rows_of(model)

    def forward(
        self, *, labels: Tensor | None = None, fused_lm_head: bool = True, **inputs: Any
    ) -> TokenAnswer:
        """Return log-probabilities of the labels, which are `input_ids` or -100."""
        log_probs: Tensor = self.rows(**inputs)[:, 1:, 0]
        if labels is not None:
            log_probs = log_probs.masked_fill(labels[:, 1:] == -100, 0)
        return TokenAnswer(log_probs)


class _Rows(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def _log_probs(self, *, input_ids: Tensor, **inputs: Any) -> Tensor:
        logits = self.model(input_ids=input_ids, **inputs).logits[:, :-1].float()
        own = logits.gather(-1, input_ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)
        if (mask := inputs.get("attention_mask")) is not None:
            own = own.masked_fill(mask[:, 1:] == 0, 0)
        # A place for each token, as hidden states have, so that a row has its text's length.
        return pad(own, (1, 0))[..., None]


def _rows_of(model: nn.Module) -> nn.Module:
    """Return a part that names the model's own inputs: these say what it is given of a batch."""

    @functools.wraps(type(model).forward)
    def forward(self: _Rows, **inputs: Any) -> Tensor:
        return self._log_probs(**inputs)

    return type("TokenRows", (_Rows,), {"forward": forward})(model)
