"""Prove that `pipetransformer verify` tells models that train rightly from others."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, MixtralConfig

from pipetransformer.cli import main
from pipetransformer.cli import verify_command as verify_command
from pipetransformer.cli.smaller_config import smaller
from tests.pipetransformer.cli.test_configured_models import QWEN2_7B, TINY, saved, written

HERE = "tests.pipetransformer.cli.test_verify_command"


class Centred(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden - hidden.mean(0))


def split_dependent() -> tuple[nn.Module, dict[str, Tensor]]:
    model = nn.Sequential(nn.Linear(8, 8), Centred(8, 8), nn.Linear(8, 3))
    return model, {"x": torch.rand(4, 8), "y": torch.zeros(4, dtype=torch.int64)}


def right() -> tuple[nn.Module, dict[str, Tensor]]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    return model, {"x": torch.rand(4, 8), "y": torch.zeros(4, dtype=torch.int64)}


def parameters(config: Any) -> int:
    """Count a decoder's parameters, roughly as it has them."""
    wide, words = config.hidden_size, config.vocab_size
    block = 4 * wide**2 + 3 * wide * config.intermediate_size * getattr(
        config, "num_local_experts", 1
    )
    return int(2 * words * wide + config.num_hidden_layers * block)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "BertForTokenClassification"])
def test_a_small_model_is_verified_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, architecture: str
) -> None:
    assert main(["verify", saved(tmp_path, architecture, num_hidden_layers=4)]) == 0
    text = capsys.readouterr().out
    assert f"  assumed: {architecture}, which the configuration names\n" in text
    assert "in small" not in text and "4 layers can freeze" in text
    assert "It trains as its own forward does." in text


def test_a_large_model_is_verified_in_small_and_the_answer_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_command, "_MOST_PARAMETERS", 100_000)
    sizes = {"num_hidden_layers": 4, "vocab_size": 2048, "intermediate_size": 1024}
    folder = saved(tmp_path, "LlamaForCausalLM", **sizes)
    assert main(["verify", folder, "--lora", "1"]) == 0
    text = capsys.readouterr().out
    assert "  in small: num_hidden_layers 3 of 4, vocab_size 1024 of 2048, hidden_size 8" in text
    assert "LoRA of rank 1 on q_proj, v_proj" in text


def test_a_model_that_depends_on_the_split_of_a_batch_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", f"{HERE}:split_dependent"]) == 1
    assert "depends on how a batch is split" in capsys.readouterr().err


def test_a_model_without_a_loss_is_verified_with_a_made_up_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", f"{HERE}:right"]) == 0
    assert "the mean square of its output is its loss" in capsys.readouterr().out


def test_seven_billion_parameters_become_few_of_the_same_form(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(written(tmp_path / "config.json", QWEN2_7B))
    config.bos_token_id = config.eos_token_id = 151_643
    before = copy.deepcopy(config)
    small, lowered = smaller(config, parameters, most=50_000_000)
    assert parameters(small) <= 50_000_000 and config.to_dict() == before.to_dict()
    assert small.eos_token_id == small.bos_token_id == 1023
    assert (small.num_attention_heads, small.num_key_value_heads) == (7, 1)
    assert lowered[0] == "num_hidden_layers 3 of 28" and len(lowered) == 6


def test_each_kind_of_block_stays_and_experts_become_few() -> None:
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 2
    sizes = {**TINY, "num_hidden_layers": 12}
    config = LlamaConfig(**sizes)
    config.layer_types = kinds
    small, _ = smaller(config, parameters, most=parameters(config) - 1)
    assert small.layer_types == kinds[:6] and small.num_hidden_layers == 6
    experts = MixtralConfig(**TINY, num_local_experts=64, num_experts_per_tok=2)
    small, lowered = smaller(experts, parameters, most=30_000)
    assert small.num_local_experts == 4 and "num_local_experts 4 of 64" in lowered


def test_a_model_that_stays_large_is_refused() -> None:
    with pytest.raises(ValueError, match="stays one of 0 million with few blocks, words, experts"):
        smaller(LlamaConfig(**TINY), parameters, most=10)
