"""Build a tiny BERT and sentences of unequal lengths, padded batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from autodp.sampler import EpochSampler, shuffled
from pipetransformer.model import adapt

PAD = 0


def tiny_bert(*, num_layers: int = 3, num_labels: int = 3, dropout: float = 0.0) -> Any:
    """Build a classifier, the same float64 weights on every call."""
    sizes = {"hidden_size": 16, "num_hidden_layers": num_layers, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=50,
                intermediate_size=32,
                max_position_embeddings=40,
                num_labels=num_labels,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
                initializer_range=0.2,
                **sizes,
            )
        )
    return model.double()


def sentences(num: int = 22) -> list[dict[str, Any]]:
    """Make tokenised sentences of 3 to 18 tokens, as a tokenizer without padding gives them."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 19, (num,), generator=generator).tolist()
    return [
        {
            "sentence": f"sentence {index}",
            "input_ids": torch.randint(1, 50, (length,), generator=generator).tolist(),
            "attention_mask": [1] * length,
            "label": length % 3,
        }
        for index, length in enumerate(lengths)
    ]


def pad_to_longest(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad as transformers' DataCollatorWithPadding does, whose tokenizer is not at hand."""
    assert all("sentence" not in item for item in items), "a column that the model does not take"
    most = max(len(item["input_ids"]) for item in items)
    return {
        "input_ids": torch.tensor([_padded(item["input_ids"], most) for item in items]),
        "attention_mask": torch.tensor([_padded(item["attention_mask"], most) for item in items]),
        "labels": torch.tensor([item["label"] for item in items]),
    }


def _padded(values: list[int], most: int) -> list[int]:
    return values + [PAD] * (most - len(values))


def plain_losses(
    model: Any, rows: Sequence[dict[str, Any]], *, frozen: tuple[int, ...], batch_size: int
) -> list[float]:
    """Train in a hand-written loop, with frozen layers by epoch; return the loss of every step."""
    layered, sampler, losses = (
        adapt(model),
        EpochSampler(len(rows), shuffled(len(rows), seed=0)),
        [],
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch, num_frozen in enumerate(frozen):
        fixed = {n for i in range(layered.first_active(num_frozen)) for n in layered.tensors(i)}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in fixed if num_frozen else True)
        for position in range(0, len(rows), batch_size):
            ids = sampler.global_batch(epoch, position, batch_size).tolist()
            known = ({k: v for k, v in rows[i].items() if k != "sentence"} for i in ids)
            optimizer.zero_grad(set_to_none=True)
            loss = model(**pad_to_longest(list(known))).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
