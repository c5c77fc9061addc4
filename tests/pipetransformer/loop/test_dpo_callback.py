"""Reference log-probabilities have rows in TRL's DPOTrainer, and frozen towers have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import CLIPImageProcessor, LlavaProcessor, TrainerCallback

from pipetransformer import FreezeCallback, TokenLogProbs
from tests.helpers.any_models import KINDS, build
from tests.helpers.hf_runs import numbers
from tests.helpers.marks import slow
from tests.helpers.part_models import CASES
from tests.pipetransformer.loop.test_sft_callback import tokenizer

trl = pytest.importorskip("trl")
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference  # noqa: E402

NUM = 8
FEATURES = {"prompt": "string", "chosen": "string", "rejected": "string"}
TOWER = "model.vision_tower"


class _Runs(TrainerCallback):  # type: ignore[misc]
    """Count a module's forwards in the last epoch and its evaluation."""

    def __init__(self, module: nn.Module) -> None:
        self.num, run = 0, module.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num += 1
            return run(*args, **kwargs)

        # Not by a hook, as those must not wait in vain.
        module.forward = counted  # type: ignore[method-assign]

    def on_epoch_begin(self, *args: Any, **facts: Any) -> None:
        self.num = 0


def _words(text: int, num: int) -> str:
    return " ".join(f"w{3 + (7 * text + 3 * word) % 20}" for word in range(num))


def _preferences(*, before: str = "", changed: int | None = None) -> Any:
    """Make texts of several lengths."""
    texts = {
        "prompt": [before + _words(place, 2 + place % 3) for place in range(NUM)],
        "chosen": [" " + _words(place + 1, 2 + place % 4) for place in range(NUM)],
        "rejected": [" " + _words(place + 2, 3 + place % 2) for place in range(NUM)],
    }
    if changed is not None:
        texts["chosen"][changed] = " w3 w4 w5"
    return datasets.Dataset.from_dict(texts)


def _with_images() -> tuple[Any, Any]:
    """Return preferences about images, and a processor of them."""
    draws = np.random.default_rng(0)
    pixels = draws.integers(0, 255, (NUM, 20, 20, 3), dtype=np.uint8)
    features = datasets.Features(
        {
            "images": datasets.Sequence(datasets.Image()),
            **{name: datasets.Value(kind) for name, kind in FEATURES.items()},
        }
    )
    texts = _preferences(before="<image> ").to_dict()
    columns = {"images": [[Image.fromarray(one)] for one in pixels], **texts}
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
        tokenizer=words, patch_size=8, vision_feature_select_strategy="default",
        image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip
    return datasets.Dataset.from_dict(columns, features=features), processor


class _PaddedAlike(DataCollatorForVisionPreference):  # type: ignore[misc]
    """Pad with zeros alone: TRL's own takes two values, by the other samples' lengths."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super().torch_call(examples)
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 0)
        return batch


def _trainer(folder: Path, model: Any, data: Any, processor: Any, **given: Any) -> Any:
    settings = given.pop("settings", {})
    arguments = trl.DPOConfig(
        str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=4,
        num_train_epochs=3, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        eval_strategy="epoch", logging_steps=1, max_length=None, learning_rate=0.01,
        **{"bf16": False, **settings},
    )  # fmt: skip
    return trl.DPOTrainer(
        model, args=arguments, train_dataset=data, eval_dataset=data, processing_class=processor,
        **given,
    )  # fmt: skip


def _serve_reference(trainer: Any, **settings: Any) -> FreezeCallback:
    reference = TokenLogProbs(trainer.ref_model)
    trainer.ref_model = trainer.accelerator.prepare_model(reference, evaluation_mode=True)
    callback = FreezeCallback(parts=[reference.rows], cache=True, **settings)
    trainer.add_callback(callback)
    return callback


def _assert_same(ours: Any, plain: Any, rounding: float = 1e-5) -> None:
    logs, expected = (list(map(numbers, one.state.log_history)) for one in (ours, plain))
    assert sum("eval_loss" in one for one in logs) == 3
    for one, other in zip(logs[:-1], expected[:-1], strict=True):
        assert one == pytest.approx(other, rel=rounding, abs=rounding)
    for a, b in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rounding * 10, atol=rounding)


def _text(folder: Path, rows: bool, data: Any, **settings: Any) -> tuple[Any, int, int]:
    """Train on texts; return the trainer, hits, and runs of the reference in the last epoch."""
    torch.manual_seed(0)
    model: Any = build(KINDS["llama"]).float()
    reference = copy.deepcopy(model)
    trainer = _trainer(folder, model, data, tokenizer(), ref_model=reference, settings=settings)
    kept = {"cache_keep": True, "cache_folder": folder}
    callback = _serve_reference(trainer, **kept) if rows else None
    runs = _Runs(reference.model.layers[0])
    trainer.add_callback(runs)
    trainer.train()
    return trainer, callback.stats.hits if callback else 0, runs.num


@pytest.mark.parametrize("goes_on", [False, slow(True)], ids=["one run", "later runs"])
def test_reference_log_probabilities_are_kept_and_checked_by_sample(
    goes_on: bool, tmp_path: Path
) -> None:
    plain, _, runs = _text(tmp_path, False, _preferences())
    assert runs == 4
    first, hits, runs = _text(tmp_path, True, _preferences())
    _assert_same(first, plain)
    assert hits >= 2 * 2 * NUM and runs == 0
    if not goes_on:
        return
    later, hits, runs = _text(tmp_path, True, _preferences())
    _assert_same(later, plain)
    assert hits == 3 * 2 * NUM and runs == 0
    # One of sixteen texts is another one.
    other, _, _ = _text(tmp_path, False, _preferences(changed=2))
    changed, hits, runs = _text(tmp_path, True, _preferences(changed=2))
    _assert_same(changed, other)
    assert 2 * 2 * NUM <= hits < 3 * 2 * NUM and runs == 0


@pytest.mark.slow
def test_reference_log_probabilities_are_computed_in_autocast(tmp_path: Path) -> None:
    plain, _, _ = _text(tmp_path, False, _preferences(), bf16=True)
    ours, hits, runs = _text(tmp_path, True, _preferences(), bf16=True)
    _assert_same(ours, plain, rounding=2e-2)  # Of bfloat16, which TRL's own head rounds less.
    assert hits >= 2 * 2 * NUM and runs == 0


@pytest.mark.parametrize("kind", [slow("reference"), slow("tower"), slow("adapters")])
def test_preferences_about_images_have_rows(kind: str, tmp_path: Path) -> None:
    data, processor = _with_images()
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    found = []
    for has_rows in (False, True):
        torch.manual_seed(0)
        model: Any = CASES["llava"].build()
        model.config.image_token_id = model.config.image_token_index = image
        model.get_submodule(TOWER).requires_grad_(False)
        reference = copy.deepcopy(model)
        # The reference is the model without its adapters, and has no object of its own.
        given: dict[str, Any] = {"ref_model": reference}
        if kind == "adapters":
            target = ".*language_model.*q_proj"
            lora = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=target)  # type: ignore[arg-type]
            given = {"peft_config": lora}
        if kind == "reference":
            given["data_collator"] = _PaddedAlike(processor)
        trainer = _trainer(tmp_path, model, data, processor, **given)
        tower = model.get_submodule(TOWER)
        runs = _Runs((reference if kind == "reference" else model).get_submodule(TOWER))
        trainer.add_callback(runs)
        if has_rows and kind == "reference":
            callback = _serve_reference(trainer)
        elif has_rows:
            # The reference needs the images, too.
            callback = FreezeCallback(parts=[tower], cache=True, reads=("pixel_values",))
            trainer.add_callback(callback)
        trainer.train()
        found.append((trainer, runs.num))
    (plain, num_plain), (ours, num) = found
    _assert_same(ours, plain)
    assert callback.stats.hits == 2 * 2 * NUM
    # With adapters the tower runs for the reference, too; and that has the same rows.
    assert (num_plain, num) == (8 if kind == "adapters" else 4, 0)


def test_a_reference_that_follows_the_model_is_refused(tmp_path: Path) -> None:
    """TRL writes into it by `.data`, which is noticed with the next epoch alone."""
    model: Any = build(KINDS["llama"]).float()
    trainer = _trainer(
        tmp_path, model, _preferences(), tokenizer(), ref_model=copy.deepcopy(model),
        settings={"sync_ref_model": True, "ref_model_sync_steps": 1},
    )  # fmt: skip
    _serve_reference(trainer)
    with pytest.raises(ValueError, match="set sync_ref_model=False"):
        trainer.train()
