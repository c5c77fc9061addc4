"""Prove that the lines that change on the page about other caches train the same model."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.test_pages import blocks
from tests.helpers.any_models import KINDS, build
from tests.pipetransformer.loop.test_dpo_callback import _preferences
from tests.pipetransformer.loop.test_sft_callback import tokenizer

PAGE = "docs/from-other-caches.md"
DIFFS = dict(zip(("by hand", "torchcache", "quaterion", "trl"), blocks(PAGE, "diff"), strict=True))
NUM, EPOCHS = 32, 3


def side(name: str, sign: str) -> str:
    """Return a diff's program before the change, "-", or behind it, "+"."""
    lines = [line for line in DIFFS[name].splitlines() if line[:1] in (" ", sign)]
    return "\n".join(line[1:] for line in lines)


def ran(program: str, **given: Any) -> dict[str, Any]:
    exec(compile(program, PAGE, "exec"), given)
    return given


def trained(name: str, sign: str) -> dict[str, Any]:
    (start,) = blocks(PAGE, "python")
    return ran(f"{start}\n{side(name, sign)}")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["by hand", "torchcache"])
def test_a_loop_has_the_same_losses_before_and_behind_the_change(name: str) -> None:
    ours = trained(name, "+")
    assert ours["cached"].stats.hits == NUM
    # Without the package its loop is that of the dict, which has the same batches.
    has_package = importlib.util.find_spec("torchcache") is not None
    before = trained(name if has_package else "by hand", "-")
    assert len(ours["losses"]) == EPOCHS * NUM // 8
    assert ours["losses"] == pytest.approx(before["losses"], abs=1e-5)
    for one, other in zip(ours["model"].parameters(), before["model"].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_pairs_have_rows_of_both_columns_and_the_losses_of_a_plain_loop() -> None:
    ours = trained("quaterion", "+")
    assert ours["cached"].stats.hits == 2 * NUM
    plain = side("quaterion", "+").replace("cached.epoch(loader)", "loader")
    (start,) = blocks(PAGE, "python")
    without = ran("\n".join([start, *(one for one in plain.splitlines() if "attach" not in one)]))
    assert ours["losses"] == pytest.approx(without["losses"], abs=1e-5)
    assert ours["losses"][-1] < ours["losses"][0]


def test_preferences_have_the_same_losses_before_and_behind_the_change(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    found = []
    for sign in "-+":
        torch.manual_seed(0)
        model: Any = build(KINDS["llama"]).float()
        arguments = trl.DPOConfig(
            str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True,
            bf16=False, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1,
            learning_rate=0.01, max_length=None,
        )  # fmt: skip
        start = "import pipetransformer as pt\nfrom trl import DPOTrainer\n"
        names = ran(
            start + side("trl", sign).replace("cache_keep=True", "cache=True"),
            model=model, reference=copy.deepcopy(model), args=arguments, data=_preferences(),
            tokenizer=tokenizer(),
        )  # fmt: skip
        found.append([one["loss"] for one in names["trainer"].state.log_history if "loss" in one])
    before, ours = found
    assert len(ours) == 4 and ours == pytest.approx(before, rel=1e-4, abs=1e-5)
