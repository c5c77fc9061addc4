"""Rows of blocks with quantized weights: nothing that is fine-tuned above them changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from pipetransformer import FreezeCallback, attach
from tests.helpers.marks import slow
from tests.helpers.quantized import (
    KINDS,
    adapted,
    blocks_of,
    keep_layout,
    learned,
    texts,
    weight_of,
)

_FROZEN, _EPOCHS = 2, 3
_KINDS = ["4 bits", *map(slow, ["8 bits", "torchao", "any other"])]


class Calls:
    """Count how often the mlp of a block runs; what a module notes itself is not cached."""

    def __init__(self, block: nn.Module, patch: pytest.MonkeyPatch) -> None:
        self.num, inner = 0, block.get_submodule("mlp")
        kind = type(inner)
        run = kind.forward

        def counted(module: nn.Module, *args: Any) -> Any:
            self.num += module is inner
            return run(module, *args)

        patch.setattr(kind, "forward", counted)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(texts(), batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]


def step(model: Any, batch: Any, optimizer: SGD) -> float:
    loss: Tensor = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


Edit = Callable[[Any], object]


def nothing(_: Any) -> None:
    """Edit nothing."""


def plain_losses(model: Any, edit: Edit = nothing) -> list[float]:
    """Train in a loop that knows nothing of rows, with frozen blocks in eval mode."""
    model.train()
    blocks_of(model)[:_FROZEN].eval()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    batches, losses = loader(), list[float]()
    for _ in range(_EPOCHS):
        for batch in batches:
            losses.append(step(model, batch, optimizer))
            if len(losses) == 3:  # Within the second epoch.
                edit(model)
    return losses


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("names", ["blocks", slow("parts")])
def test_losses_and_adapters_are_those_of_a_plain_loop(
    kind: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, model = adapted(kind), adapted(kind)
    expected = plain_losses(reference)
    calls = Calls(blocks_of(model)[0], monkeypatch)
    model.train()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    batches, losses, hits = loader(), [], []
    what: Any = {"freeze": _FROZEN}
    if names == "parts":
        stem = "base_model.model.model.layers"
        what = {"parts": [f"{stem}.{i}" for i in range(_FROZEN)], "cache": True}
    with attach(model, **what, cache_folder=tmp_path) as cached:
        for _ in range(_EPOCHS):
            calls.num = 0
            losses += [step(model, batch, optimizer) for batch in cached.epoch(batches)]
            hits.append(cached.stats.hits)
    assert losses == expected
    ours, theirs = learned(model), learned(reference)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert hits[1:] == [8, 8] if names == "blocks" else hits[-1] >= 8
    assert calls.num == 0


def _turned(model: Any) -> None:
    weight = weight_of(model)
    weight.copy_(weight.flip(0).clone())


def _copied(model: Any) -> None:
    weight_of(model).copy_(weight_of(model, block=1))


def _scaled(model: Any) -> None:
    weight_of(model).quant_state.state2.absmax.mul_(2)


EDITS: list[Any] = [
    slow("4 bits", _turned),
    slow("4 bits", _scaled),
    slow("8 bits", _turned),
    slow("8 bits", lambda model: blocks_of(model)[0].mlp.up_proj.state.SCB.mul_(2)),
    ("torchao", _copied),
    slow("torchao", lambda model: weight_of(model).scale.mul_(2)),
    slow("any other", _copied),
    ("any other", lambda model: weight_of(model).stored.mul_(2)),
]


@pytest.mark.parametrize(
    ("kind", "edit"), EDITS, ids=["bytes", "code", "int8", "scale", "copy", "inner", "own", "half"]
)
def test_an_edit_of_a_quantized_weight_is_noticed(
    kind: str, edit: Edit, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unedited, reference, model = (adapted(kind) for _ in range(3))
    for one in (unedited, reference, model):
        keep_layout(one)
    expected = plain_losses(reference, torch.no_grad()(edit))
    assert expected != plain_losses(unedited)
    model.train()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    batches, losses = loader(), list[float]()
    with attach(model, freeze=_FROZEN, cache_folder=tmp_path) as cached:
        for _ in range(_EPOCHS):
            for batch in cached.epoch(batches):
                losses.append(step(model, batch, optimizer))
                if len(losses) == 3:
                    with torch.no_grad():
                        edit(model)
        assert cached.stats.hits > 0
    assert losses == expected
    assert "computed anew" in caplog.text


@pytest.mark.parametrize("kind", ["4 bits", *map(slow, ["8 bits", "torchao", "any other"])])
@pytest.mark.parametrize("frozen", [(0, 2, 2), slow((2, 0, 1))], ids=["deeper", "thawed"])
def test_a_callback_changes_nothing_in_a_trainer_that_saves(
    kind: str, frozen: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(callback: FreezeCallback, name: str) -> tuple[list[float], Any, int]:
        model = adapted(kind, learns=range(4))
        keep_layout(model)
        calls = Calls(blocks_of(model)[0], monkeypatch)
        arguments = transformers.TrainingArguments(
            str(tmp_path / name),
            per_device_train_batch_size=4,
            num_train_epochs=len(frozen),
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="epoch",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )

        class Epochs(transformers.TrainerCallback):
            def on_epoch_begin(self, *_: Any, **__: Any) -> None:
                calls.num = 0

        callbacks = [callback, Epochs()]
        trainer = transformers.Trainer(
            model, arguments, train_dataset=texts(), callbacks=callbacks
        )
        trainer.train()
        history = trainer.state.log_history
        return [log["loss"] for log in history if "loss" in log], model, calls.num

    expected, reference, _ = train(FreezeCallback(frozen, cache=False), "plain")
    ours = FreezeCallback(frozen, cache_folder=tmp_path)
    losses, model, num_calls = train(ours, "ours")
    assert losses == expected
    adapters = learned(reference)
    assert all(torch.equal(one, adapters[name]) for name, one in learned(model).items())
    if frozen[-1] == 2:
        assert ours.stats.hits == len(texts()) and num_calls == 0
    saved = max((tmp_path / "ours").glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    again = peft.PeftModel.from_pretrained(KINDS[kind](), saved)
    batch = next(iter(loader()))
    for one in (model, again):
        one.eval()
        keep_layout(one)
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)


def test_a_quantized_part_is_not_released(tmp_path: Path) -> None:
    model = adapted("any other")
    parts = ["base_model.model.model.layers.0"]
    with pytest.raises(ValueError, match=r"\(Halves\), which are never moved: leave it out"):
        attach(model, parts=parts, release=True, cache_folder=tmp_path)
