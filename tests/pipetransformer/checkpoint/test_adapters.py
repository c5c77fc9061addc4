"""Of a peft model the adapters are written alone, as peft reads them, at any time of a run."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from pipetransformer.checkpoint import write_model_folder
from pipetransformer.cli import main
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.peft_models import (
    CAUSAL,
    MODELS,
    batch_of,
    bert,
    llama,
    loop,
    lora,
    make_trainer,
    moved,
    samples_for,
)
from tests.helpers.pool import Pool


def base_of(name: str) -> Any:
    """Build the base that a model of this name was given."""
    torch.manual_seed(0)
    return (bert() if "BERT" in name else llama()).double()


def outputs_of(model: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model.eval()(**{**batch_of(model), "labels": None}).logits
    return output


@measuring(never)
def save(name: str, folder: Path, length: int) -> Tensor:
    """Save after two steps of which the second had a frozen layer; return the outputs then."""
    model = MODELS[name]()
    with make_trainer(model, (0, 1, 1), pipeline_length=length) as trainer:
        trainer.step()
        trainer.step()
        trainer.save_pretrained(folder)
        return torch.as_tensor(trainer.predict(samples_for(model)).predictions).double()


@pytest.mark.parametrize("name", [slow("lora of BERT"), "p-tuning", "lora of words and head"])
def test_peft_loads_the_adapter_of_a_run_in_a_pipeline(
    two_ranks: Pool, tmp_path: Path, name: str
) -> None:
    expected = two_ranks.run(save, name, tmp_path / "ours", 2)[0]
    loaded = PeftModel.from_pretrained(base_of(name), tmp_path / "ours").double()
    # Predictions are told in float32.
    torch.testing.assert_close(outputs_of(loaded), expected, rtol=1e-5, atol=1e-6)
    MODELS[name]().save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert {p.name for p in (tmp_path / "ours").iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }


@pytest.mark.parametrize("name", ["prompt", "p-tuning"])
def test_a_prompt_is_written_as_it_was_at_the_save_while_training_goes_on(
    tmp_path: Path, name: str
) -> None:
    model, saved = MODELS[name](), MODELS[name]()
    live = {parameter: weight.clone() for parameter, weight in model.state_dict().items()}
    for parameter in saved.prompt_encoder.parameters():
        parameter.data *= 2
    write_model_folder(model, saved.state_dict(), tmp_path / "ours", None)
    saved.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("ours", "theirs")
    )
    assert torch.equal(ours["prompt_embeddings"], theirs["prompt_embeddings"])
    for parameter, weight in model.state_dict().items():
        assert torch.equal(weight, live[parameter]), parameter


def test_adapters_with_names_are_in_folders_of_their_own(tmp_path: Path) -> None:
    expected = save("two adapters", tmp_path, 1)
    base = base_of("two adapters")
    loaded = PeftModel.from_pretrained(base, tmp_path / "second", adapter_name="second").double()
    torch.testing.assert_close(outputs_of(loaded), expected, rtol=1e-5, atol=1e-6)
    modes = {
        stat.S_IMODE(path.stat().st_mode)
        for folder in ("first", "second")
        for path in (tmp_path / folder).iterdir()
    }
    assert len(modes) == 1


def test_adapters_that_transformers_has_added_are_written_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It asks for a newer peft than may be installed, but for loading only needs it.
    monkeypatch.setattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "0.1")
    model = base_of("BERT")
    model.add_adapter(lora(target_modules=["query", "value"], modules_to_save=["classifier"]))
    moved(model)
    with make_trainer(model, (0, 1)) as trainer:
        trainer.fit()
        trainer.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    loaded = PeftModel.from_pretrained(base_of("BERT"), tmp_path).double()
    torch.testing.assert_close(outputs_of(loaded), outputs_of(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "saves",
    [
        slow({"modules_to_save": ["embed_tokens", "lm_head"]}),
        {"modules_to_save": ["model.embed_tokens"], "ensure_weight_tying": True},
    ],
)
@pytest.mark.parametrize("is_tied", [True, False])
def test_an_untied_head_of_an_adapter_is_loaded_as_it_was_trained(
    tmp_path: Path, saves: dict[str, Any], is_tied: bool
) -> None:
    # With ensure_weight_tying the head was the embedding once more: outputs were off by 0.1.
    def base() -> Any:
        torch.manual_seed(0)
        return llama(tie_word_embeddings=True).double()

    config = lora(target_modules=["q_proj"], **saves, **CAUSAL)
    model = moved(get_peft_model(base(), config))
    with make_trainer(model, (0, 1, 0), tied_weights="untie") as trainer:
        trainer.fit()
        trainer.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    words, head = (tensor for name, tensor in sorted(saved.items()) if "lora" not in name)
    assert words.shape == head.shape and not torch.equal(words, head)
    fresh = base()
    if not is_tied:
        fresh.lm_head.weight = nn.Parameter(fresh.lm_head.weight.detach().clone())
        fresh.config.tie_word_embeddings = False
    loaded = PeftModel.from_pretrained(fresh, tmp_path).double()
    torch.testing.assert_close(outputs_of(loaded), outputs_of(model), rtol=1e-9, atol=1e-12)


def run(name: str, folder: Path, length: int, steps: int) -> dict[str, Tensor]:
    """Train, or go on, up to a step; return rank 0's weights then."""
    settings = {"folder": folder, "resume": "auto", "checkpoint_every_steps": 1}
    with make_trainer(MODELS[name](), pipeline_length=length, **settings) as trainer:
        trainer.begin()
        while trainer.global_step < steps:
            trainer.step()
        return trainer.state_dict()


@pytest.mark.parametrize("name", ["lora of BERT", "lora of timm"])
@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_with_another_pipeline(
    two_ranks: Pool, tmp_path: Path, name: str
) -> None:
    two_ranks.run(run, name, tmp_path, 2, 3)
    ours = run(name, tmp_path, 1, 5)
    for parameter, weight in loop(name).weights.items():
        torch.testing.assert_close(ours[parameter], weight, rtol=1e-8, atol=1e-10, msg=parameter)
    assert main(["export", str(tmp_path), str(tmp_path / "exported")]) == 0
    model = MODELS[name]()
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    # A head that an adapter's copy replaces is read by no forward, and not in checkpoints.
    missing, unexpected = model.load_state_dict(exported, strict=False)
    assert not unexpected and all("original_module" in key for key in missing)
    for parameter, weight in model.state_dict().items():
        assert torch.equal(weight, ours[parameter]), parameter
