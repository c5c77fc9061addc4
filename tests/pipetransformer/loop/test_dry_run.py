"""A dry run changes no number of a training, and says at its end what would have frozen when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BartConfig, BartForConditionalGeneration, TrainerCallback

from freeze import FreezeContext, NeverFreeze
from pipetransformer import FreezeCallback, attach
from tests.helpers.any_models import KINDS, build, data, mean_loss, sgd
from tests.helpers.marks import slow
from tests.helpers.pool import Pool
from tests.pipetransformer.loop.test_cached_loop import Samples
from tests.pipetransformer.loop.test_callbacks import Training

KIND = KINDS["gpt2_classifier"]
SAID = "of 3 layers would have frozen: 1 after step 0, 2 after step 10. That would save at least"


def one_then_two(context: FreezeContext) -> int:
    return 2 if context.step >= 10 else 1


def dropping(model: nn.Module) -> nn.Module:
    """Have a model draw random numbers in each forward."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    return model


def assert_untouched(ours: nn.Module, plain: nn.Module) -> None:
    """Assert that all bits are equal, all weights train, and no hook is left."""
    expected = plain.state_dict()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    assert all(p.requires_grad for p in ours.parameters())
    hooks = [
        [len(one._forward_pre_hooks) + len(one._forward_hooks) for one in model.modules()]
        for model in (ours, plain)
    ]
    assert hooks[0] == hooks[1]


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        slow({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}, {}),
        (
            {"gradient_checkpointing": True, "eval_strategy": "epoch"},
            {"cache": False, "every_steps": 2},
        ),
    ],
    ids=["accumulates", "checkpoints_layers"],
)
def test_a_dry_run_in_transformers_changes_no_number(
    settings: dict[str, Any],
    given: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, ours = (Training(tmp_path / name, change=dropping) for name in ("plain", "ours"))
    plain.train(TrainerCallback(), **settings)
    drawn = torch.rand(3)
    callback = FreezeCallback(one_then_two, dry_run=True, **given)
    ours.train(callback, **settings)
    assert torch.equal(drawn, torch.rand(3))
    assert ours.losses == plain.losses and len(ours.losses) >= 20
    assert_untouched(ours.model, plain.model)
    assert SAID in caplog.text and callback.stats.hits == 0
    assert [*(tmp_path / "ours").rglob("*")] == [*(tmp_path / "plain").rglob("*")]


def test_a_dry_run_in_lightning_changes_no_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch import Callback

    from pipetransformer import LightningFreezeCallback
    from tests.pipetransformer.loop.test_lightning_callback import Module, fit

    # With two parts that have weights, rows would need the name of one.
    plain, ours = Module(KIND, head=True), Module(KIND, head=True)
    for module, used in (
        (plain, Callback()),
        (ours, LightningFreezeCallback(one_then_two, dry_run=True)),
    ):
        dropping(module)
        fit(module, used, tmp_path / str(id(module)))
    assert ours.losses == plain.losses and len(ours.losses) > 15
    assert_untouched(ours, plain)
    assert SAID in caplog.text


def run(model: nn.Module, dry_run: bool, freeze: Any = one_then_two) -> tuple[list[float], Any]:
    """Train by a loop of one's own; return its losses, and what a dry run has noted."""
    loader: DataLoader[Any] = DataLoader(
        Samples(dict(data(KIND).tensors)), batch_size=2, shuffle=True
    )
    optimizer, losses = sgd([*model.named_parameters()]), list[float]()
    cached = attach(model, freeze=freeze, optimizer=optimizer, num_epochs=4, dry_run=True)
    torch.manual_seed(3)
    for _ in range(4):
        for batch in cached.epoch(loader) if dry_run else loader:
            loss = mean_loss(KIND, model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert cached.num_frozen == 0
    cached.close()
    return [*losses, *torch.rand(2).tolist()], cached.advice


def test_a_dry_run_of_a_loop_changes_no_number(caplog: pytest.LogCaptureFixture) -> None:
    plain, ours = dropping(build(KIND)), dropping(build(KIND))
    expected, _ = run(plain, False)
    caplog.clear()
    losses, advice = run(ours, True)
    assert losses == expected
    assert_untouched(ours, plain)
    assert SAID in caplog.text and str(advice) in caplog.text
    assert advice.changes == ((0, 1), (10, 2)) and 0 < advice.costs.saved_share(2, cached=True) < 1


def test_a_schedule_is_said_of_a_loop_s_dry_run() -> None:
    _, advice = run(build(KIND), True, [0, 2])
    assert advice.changes == ((5, 2),)


def test_advice_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    training, file = Training(tmp_path), tmp_path / "freeze_advice.json"
    callback = FreezeCallback(one_then_two, every_steps=5, dry_run=True)
    training.train(callback)
    assert not file.exists()
    callback.advice.write(file)
    written = json.loads(file.read_text())
    assert written["text"] == str(callback.advice) and written["dry_run"]
    assert [look["step"] for look in written["looks"]] == [0, 5, 10, 15, 20]
    assert all(0 < update < 1 for update in written["looks"][1]["updates"])


def test_a_dry_run_says_what_freezes_and_when(tmp_path: Path) -> None:
    freezes = FreezeCallback("linear:0,0.75", every_steps=2, cache=False)
    watches = FreezeCallback("linear:0,0.75", every_steps=2, dry_run=True)
    for callback in (freezes, watches):
        Training(tmp_path).train(callback)
    assert freezes.advice.changes == watches.advice.changes != ()
    assert str(freezes.advice).startswith("of 3 layers froze: ")


def test_a_dry_run_goes_on_in_a_resumed_training(tmp_path: Path) -> None:
    whole = FreezeCallback(one_then_two, every_steps=3, dry_run=True)
    Training(tmp_path).train(whole, save_strategy="steps", save_steps=6)
    resumed = FreezeCallback(one_then_two, every_steps=3, dry_run=True)
    Training(tmp_path).train(resumed, resume=str(tmp_path / "checkpoint-6"))
    assert resumed.advice.changes == whole.advice.changes
    assert [one.step for one in resumed.advice.looks] == [0, 3, 6, 9, 12, 15, 18]


def replicated(folder: Path, dry_run: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train on every rank, in a way in which nothing could freeze."""
    training = Training(folder, change=dropping)
    callback: Any = FreezeCallback(one_then_two, dry_run=True) if dry_run else TrainerCallback()
    training.train(callback, ddp_find_unused_parameters=False, per_device_train_batch_size=1)
    return training.losses, {name: t.clone() for name, t in training.model.state_dict().items()}


def test_a_dry_run_watches_where_nothing_could_freeze(two_ranks: Pool, tmp_path: Path) -> None:
    ours, plain = (two_ranks.run(replicated, tmp_path, dry) for dry in (True, False))
    for (losses, weights), (expected, others) in zip(ours, plain, strict=True):
        assert losses == expected
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, others[name], rtol=0, atol=0)


def bart() -> nn.Module:
    sizes = {"d_model": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=10, encoder_ffn_dim=8, decoder_ffn_dim=8, **sizes)
    )


def test_what_a_dry_run_of_a_loop_cannot_be_is_refused() -> None:
    model, other = build(KIND), bart()
    optimizer = sgd([*model.named_parameters()])
    with pytest.raises(ValueError, match="FreezeSchedule in a dry run may look at what the opt"):
        attach(model, freeze=2, dry_run=True)
    given: dict[str, Any] = {"optimizer": optimizer, "num_epochs": 2, "dry_run": True}
    with pytest.raises(ValueError, match="lists of equal blocks.*; attach the part of the model"):
        attach(other, freeze=2, **given)
    cached = attach(model, freeze=NeverFreeze(), **given)
    with pytest.raises(ValueError, match="a dry run freezes nothing; attach the model without"):
        cached.freeze_bottom(2)
    cached.close()
