"""A callback that freezes nothing changes nothing, also where a model gathers inner results.

transformers gathers router logits and attentions by hooks on inner modules, while the model's
forward runs. A callback once ran a block a second time, and these hooks with it: the loss of the
routers had 8 logits for 4 blocks, and 39 weights ended elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

from pipetransformer import FreezeCallback
from tests.helpers.marks import slow

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16, "num_experts_per_tok": 2,
    "max_position_embeddings": 32, "router_aux_loss_coef": 0.5, "attn_implementation": "eager",
}  # fmt: skip


def qwen(**options: Any) -> nn.Module:
    config = Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, **options)
    return Qwen3MoeForCausalLM(config)


def mixtral(**options: Any) -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, **options))


class Texts:
    """Hold a few made-up texts."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.randint(5, 40, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


def train(
    model: nn.Module, folder: Path, callbacks: list[Any]
) -> tuple[list[Mapping[str, int]], list[float]]:
    """Train two epochs; return how much each forward gathers, and its loss."""
    gathered: list[Mapping[str, int]] = []
    losses: list[float] = []

    def note(model: nn.Module, args: Any, answer: Any) -> None:
        losses.append(answer.loss.item())
        gathered.append({name: len(one) for name, one in answer.items() if type(one) is tuple})

    model.register_forward_hook(note)
    arguments = TrainingArguments(
        str(folder),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=0.05,
        optim="sgd",
        per_device_train_batch_size=2,
        num_train_epochs=2,
        save_strategy="no",
    )
    Trainer(model, arguments, train_dataset=Texts(), callbacks=callbacks).train()  # type: ignore[arg-type]
    return gathered, losses


@pytest.mark.parametrize(
    ("settings", "option", "build"),
    [
        ({"freeze": 0, "cache": False}, "output_router_logits", qwen),
        ({"freeze": 2, "dry_run": True}, "output_attentions", qwen),
        slow({"freeze": 2, "dry_run": True}, "output_router_logits", mixtral),
    ],
    ids=["cache=False", "dry_run", "mixtral"],
)
def test_a_callback_adds_nothing_to_what_a_model_gathers(
    settings: Any, option: str, build: Callable[..., nn.Module], tmp_path: Path
) -> None:
    found = []
    for callbacks in ([], [FreezeCallback(**settings)]):
        torch.manual_seed(0)
        model = build(**{option: True})
        found.append((*train(model, tmp_path, callbacks), model.state_dict()))
    (gathered, losses, weights), (ours, our_losses, our_weights) = found
    assert {4} == {one[option.removeprefix("output_")] for one in gathered}
    assert ours == gathered and our_losses == losses
    assert [name for name in weights if not torch.equal(weights[name], our_weights[name])] == []
