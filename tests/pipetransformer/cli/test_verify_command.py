"""Prove that `pipetransformer verify` tells models that train rightly from others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.cli import main
from pipetransformer.cli import verify_command as verify_command
from tests.helpers.marks import slow
from tests.pipetransformer.cli.test_configured_models import QWEN2_7B, saved, written

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


@pytest.mark.parametrize("architecture", [slow("LlamaForCausalLM"), "BertForTokenClassification"])
def test_a_small_model_is_verified_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, architecture: str
) -> None:
    assert main(["verify", saved(tmp_path, architecture, num_hidden_layers=4)]) == 0
    text = capsys.readouterr().out
    assert f"  assumed: {architecture}, which the configuration names\n" in text
    assert "4 layers can freeze" in text
    assert "It trains as its own forward does." in text


def test_a_model_that_this_machine_has_no_memory_for_is_refused_before_it_is_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_command, "_free_bytes", lambda: 64_000_000_000)
    path = written(tmp_path / "config.json", QWEN2_7B)
    assert main(["verify", path]) == 1
    captured = capsys.readouterr()
    assert (
        captured.out == ""
        and "takes about 709.3 GiB of memory, and 59.6 GiB are free" in captured.err
    )


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
