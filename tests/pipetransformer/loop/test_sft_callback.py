"""A callback serves rows in TRL's SFTTrainer: numbers are those of freezing without rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import tokenizers
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from pipetransformer import FreezeCallback
from tests.helpers.any_models import KINDS, WORDS, Kind, build
from tests.helpers.marks import slow

trl = pytest.importorskip("trl")

LLAMA, GPT2 = KINDS["llama"], KINDS["gpt2"]
EXPERTS = Kind(
    "Qwen3MoeForCausalLM",
    "model.layers",
    ("model.embed_tokens",),
    {
        **LLAMA.options,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
)
UNTIED = replace(GPT2, options={**GPT2.options, "tie_word_embeddings": False})
BY_EPOCH = (0, 2, 2, 1)
LORA = {"r": 2, "init_lora_weights": False, "target_modules": ["q_proj"]}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, WORDS)}}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    plain = tokenizers.Tokenizer(model)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **names)


def texts() -> datasets.Dataset:
    """Make texts of several lengths."""
    return datasets.Dataset.from_dict(
        {
            "text": [
                " ".join(
                    f"w{3 + (7 * text + 3 * word) % (WORDS - 3)}" for word in range(3 + text % 5)
                )
                for text in range(10)
            ]
        }
    )


def train(
    kind: Kind, callback: Any, folder: Path, *, lora: bool = False, **settings: Any
) -> tuple[list[float], nn.Module]:
    """Return the losses, with the last evaluation's, and the model."""
    torch.manual_seed(0)
    model: Any = build(kind).float()
    arguments = trl.SFTConfig(
        str(folder),
        **{
            "per_device_train_batch_size": 2,
            "num_train_epochs": len(BY_EPOCH),
            "max_length": 16,
            "bf16": False,
            **settings,
        },
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        eval_strategy="epoch",
        logging_steps=1,
    )
    trainer = trl.SFTTrainer(
        model,
        arguments,
        train_dataset=texts(),
        eval_dataset=texts(),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(**LORA) if lora else None,  # type: ignore[arg-type]
        callbacks=[callback],
    )
    trainer.train()
    history = trainer.state.log_history
    losses = [log[name] for log in history for name in ("loss", "eval_loss") if name in log]
    return losses, trainer.model


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        slow(UNTIED, {}),
        slow(LLAMA, {"gradient_accumulation_steps": 2}),
        slow(LLAMA, {"lora": True}),
        slow(LLAMA, {"packing": True, "packing_strategy": "wrapped"}),
        slow(KINDS["qwen3"], {"loss_type": "dft"}),
        slow(EXPERTS, {"router_aux_loss_coef": 0.5}),
        (LLAMA, {"packing": True}),
        slow(LLAMA, {"padding_free": True, "max_length": None, "gradient_accumulation_steps": 2}),
        slow(LLAMA, {"packing": True, "gradient_checkpointing": False, "bf16": True}),
        slow(EXPERTS, {"packing": True, "router_aux_loss_coef": 0.5}),
    ],
)
def test_rows_change_nothing_that_is_fine_tuned(
    kind: Kind, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = FreezeCallback(BY_EPOCH, cache=False)
    expected, reference = train(kind, plain, tmp_path / "plain", **settings)
    ours = FreezeCallback(BY_EPOCH, cache_folder=tmp_path)
    losses, model = train(kind, ours, tmp_path / "ours", **settings)
    assert losses == pytest.approx(expected, rel=1e-5)
    weights = reference.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-6)
    assert ours.stats.hits > 0
    assert "given other inputs" not in caplog.text
