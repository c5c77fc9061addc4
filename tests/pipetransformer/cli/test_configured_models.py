"""Prove that a configuration without weights is planned for as its model would be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from autopipe.cluster.description import load_cluster, modelled_profile
from autopipe.cluster.kernel_counts import count_bytes
from autopipe.profile.chain import chain_bytes
from pipetransformer.cli import main
from pipetransformer.cli.named_model import ModelChoice, build_named
from pipetransformer.cli.places import profiled
from tests.helpers.marks import slow

CLUSTER = "docs/clusters/8x8-h100.toml"
TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2_7B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_positions": 32},
    "LlamaForCausalLM": {},
    "Gemma3ForCausalLM": {"head_dim": 4, "sliding_window": 8},
    "BloomForCausalLM": {},
    "DebertaV2ForTokenClassification": {"relative_attention": True, "max_relative_positions": 8},
    "BertForQuestionAnswering": {},
    "ModernBertForSequenceClassification": {"cls_token_id": 3, "sep_token_id": 4},
    "MPNetForMaskedLM": {"max_position_embeddings": 520},
    "SwinForImageClassification": {"image_size": 32, "patch_size": 4, "embed_dim": 8,
                                   "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
}  # fmt: skip
QUICK = ("GPT2LMHeadModel", "LlamaForCausalLM", "BertForQuestionAnswering")


def saved(folder: Path, architecture: str, **further: Any) -> str:
    """Save a tiny configuration; return its folder."""
    kind: Any = getattr(transformers, architecture)
    sizes = {} if "embed_dim" in further else TINY
    config = kind.config_class(**{**sizes, **further}, architectures=[architecture])
    config.save_pretrained(folder)
    return str(folder)


def written(path: Path, values: Mapping[str, Any]) -> str:
    path.write_text(json.dumps(values))
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments, "--cluster", CLUSTER, "--dtype", "bfloat16"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "architecture", [name if name in QUICK else slow(name) for name in FAMILIES]
)
def test_bytes_counted_without_values_are_those_of_the_model_with_values(
    architecture: str, tmp_path: Path
) -> None:
    choice = ModelChoice(saved(tmp_path, architecture, **FAMILIES[architecture]))
    shaped, real = (build_named(choice, device=device) for device in ("meta", "cpu"))
    assert [sub.name for sub in shaped.model.sublayers] == [s.name for s in real.model.sublayers]
    batch = {name: torch.empty_like(entry, device="meta") for name, entry in real.batch(2).items()}
    counted = count_bytes(profiled(shaped), batch)
    kept = chain_bytes(profiled(real), real.batch(2))
    for name in ("parameter_bytes", "gradient_bytes", "buffer_bytes", "output_bytes"):
        assert [one[name] for one in counted] == [one[name] for one in kept]


def test_activations_counted_without_values_are_those_that_a_run_keeps(tmp_path: Path) -> None:
    # Its attention is the fused kernel in both.
    choice = ModelChoice(saved(tmp_path, "GPT2LMHeadModel", resid_pdrop=0.0, attn_pdrop=0.0))
    shaped, real = (build_named(choice, device=device) for device in ("meta", "cpu"))
    batch = {name: torch.empty_like(entry, device="meta") for name, entry in real.batch(2).items()}
    counted = [one["saved_bytes"] for one in count_bytes(profiled(shaped), batch)]
    kept = [one["saved_bytes"] for one in chain_bytes(profiled(real), real.batch(2))]
    assert counted[1:-1] == kept[1:-1]


@pytest.mark.slow
def test_experts_are_counted_in_the_dtype_of_their_kernels(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    choice = ModelChoice(saved(tmp_path, "MixtralForCausalLM", **sizes), dtype="bfloat16")
    named = build_named(choice, device="meta")
    profile = modelled_profile(profiled(named), named.sample, load_cluster(CLUSTER))
    held = sum(parameter.nbytes for parameter in named.model.model.parameters())
    assert sum(cost.parameter_bytes for cost in profile.sublayers) == held
    assert all(cost.forward_s[0] > 0 for cost in profile.sublayers)


@pytest.mark.slow
def test_equal_blocks_cost_the_same_and_share_what_the_prologue_makes(tmp_path: Path) -> None:
    named = build_named(ModelChoice(saved(tmp_path, "LlamaForCausalLM")), device="meta")
    costs = modelled_profile(profiled(named), named.sample, load_cluster(CLUSTER)).sublayers
    first, *others = costs[1:-1]
    for other in others:
        assert other.forward_s == first.forward_s and other.backward_s == first.backward_s
        assert other.saved_bytes == first.saved_bytes


def test_answer_says_what_was_assumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = saved(tmp_path, "LlamaForCausalLM")
    asked = ("--task", "sequence-classification")
    lines = plan(capsys, folder, "--seq-length", "8", *asked).splitlines()
    assert lines[0].startswith(f"{folder} in bfloat16: 4 sublayers, ")
    assert lines[1:4] == [
        "  assumed: LlamaForSequenceClassification, for --task sequence-classification",
        "  assumed: 8 tokens a sample",
        "  assumed: no sample is padded",
    ]
    values = json.loads(plan(capsys, f"{folder}/config.json", "--json"))
    assert values["assumed"][:2] == [
        "LlamaForCausalLM, which the configuration names", "32 tokens a sample"
    ]  # fmt: skip


def test_a_name_of_the_hub_is_found_in_the_cache_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert main(["plan", "some/model", "--cluster", CLUSTER]) == 1
    error = capsys.readouterr().err
    assert "no model is called 'some/model'" in error
    assert f"in its cache alone ({tmp_path}), as nothing is downloaded" in error
    kept = tmp_path / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    saved(kept / "snapshots" / "abc", "LlamaForCausalLM")
    assert plan(capsys, "some/model").startswith("some/model in bfloat16: 4 sublayers")


@pytest.mark.parametrize(
    ("values", "arguments", "message"),
    [
        ({}, [], "config.json: Unrecognized model in "),
        ({"model_type": "llama"}, [], "names no class; say what the model is for by --task, f"),
        ({"model_type": "llama", "architectures": ["LlamaModel"]}, [], "LlamaModel, which has no"),
        ({"model_type": "llama", "architectures": ["Odd"]}, [], "names Odd, which transformers d"),
        ({"model_type": "llama"}, ["--task", "masked"], "llama has no class for --task masked; i"),
        (QWEN2_7B, ["--seq-length", "131073"], "seq_length is 131073; "),
        (QWEN2_7B, ["--image-size", "8"], "image_size does not apply to "),
        (QWEN2_7B, ["--seq-length", "0"], "seq_length is 0; give at least 1"),
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}, [],
         "which takes input_values: no sample of that is made up here; give "),
    ],
)  # fmt: skip
def test_a_configuration_that_says_too_little_ends_with_the_reason(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    values: dict[str, Any],
    arguments: list[str],
    message: str,
) -> None:
    path = written(tmp_path / "config.json", values)
    assert main(["plan", path, *arguments, "--cluster", CLUSTER]) == 1
    assert message in capsys.readouterr().err


def test_folders_and_files_without_a_configuration_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", str(tmp_path), "--cluster", CLUSTER]) == 1
    assert f"transformers cannot read {tmp_path}: " in capsys.readouterr().err
    (tmp_path / "text.json").write_text("no JSON")
    assert main(["plan", str(tmp_path / "text.json"), "--cluster", CLUSTER]) == 1
    assert "text.json' is not a valid JSON file" in capsys.readouterr().err


@pytest.mark.slow
def test_seven_billion_parameters_are_planned_for_in_four_gigabytes(tmp_path: Path) -> None:
    path = written(tmp_path / "config.json", QWEN2_7B)
    program = (
        "import resource, sys; from pipetransformer.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    question = [
        "plan",
        path,
        "--cluster",
        CLUSTER,
        "--dtype",
        "bfloat16",
        "--json",
    ]
    answer = subprocess.run(
        [sys.executable, "-c", program, *question], capture_output=True, text=True, check=True
    )
    values, peak_kib = map(json.loads, answer.stdout.splitlines())
    assert values["answers"][0]["chosen"]["peak_bytes"]
    assert peak_kib * 1024 < 4e9
    named = build_named(ModelChoice(path), device="meta")
    assert sum(p.numel() for p in named.model.model.parameters()) == 7_615_616_512
