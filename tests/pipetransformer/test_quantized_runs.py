"""The Trainer over a quantized base, in one process: LoRA learns above frozen weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.optim import SGD

from pipetransformer import Trainer
from pipetransformer.checks.model_checks import refuse_moving_opaque
from pipetransformer.cli import main
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

_ALL = ["4 bits", *map(slow, ["8 bits", "torchao", "any other"])]


def trainer_of(model: Any, **settings: Any) -> Trainer:
    return Trainer(
        model,
        texts(),
        optimizer=lambda named: SGD([p for _, p in named], lr=0.1),
        **{
            "freeze": [0, 2, 2],
            "epochs": 3,
            "global_batch_size": 4,
            "progress": False,
            "seed": 1,
            **settings,
        },
    )


def trained(model: Any, **settings: Any) -> tuple[list[float], dict[str, Any]]:
    """Return the losses, and the adapters."""
    losses = []
    with trainer_of(model, **settings) as trainer:
        while not trainer.is_over:
            losses.append(trainer.step().loss)
    return losses, learned(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_equals_a_plain_loop(kind: str) -> None:
    reference, model = adapted(kind), adapted(kind)
    for one in (reference, model):
        keep_layout(one)
    losses, _ = trained(model, freeze=0, global_batch_size=len(texts()))
    batch = {name: torch.stack([one[name] for one in texts()]) for name in texts()[0]}
    weights = [p for p in reference.parameters() if p.requires_grad]
    optimizer = SGD(weights, lr=0.1)
    for loss in losses:
        reference.train()
        expected = reference(**batch).loss
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Micro-batches are summed in another order.
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    ours = learned(model)
    for name, one in learned(reference).items():
        torch.testing.assert_close(ours[name], one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", _ALL)
def test_rows_and_a_resume_change_nothing(kind: str, tmp_path: Path) -> None:
    expected, adapters = trained(adapted(kind, learns=range(1, 4)), cache=False)
    settings = {"folder": tmp_path, "checkpoint_every_epochs": 1}
    first = adapted(kind, learns=range(1, 4))
    with trainer_of(first, **settings) as trainer:
        losses = [trainer.step().loss for _ in range(5)]
    second = adapted(kind, learns=range(1, 4))
    with trainer_of(second, **settings, resume="auto") as trainer:
        trainer.begin()
        losses = losses[: trainer.global_step]
        while not trainer.is_over:
            losses.append(trainer.step().loss)
        trainer.save_pretrained(tmp_path / "adapter")
        assert trainer.report.cache_hits > 0
    assert losses == expected
    ours = learned(second)
    assert all(torch.equal(ours[name], one) for name, one in adapters.items())
    # The base is in no checkpoint, but for its words, head and norms.
    for path in tmp_path.rglob("*.safetensors"):
        assert "up_proj" not in path.read_bytes().decode(errors="ignore")


@pytest.mark.slow
def test_no_step_runs_on_what_an_evaluation_has_made_of_weights(tmp_path: Path) -> None:
    model = adapted("4 bits")
    weight = weight_of(model, block=3)
    before, scales = weight.detach().clone(), weight.quant_state.absmax
    with trainer_of(model, freeze=[0, 1], epochs=2, eval_dataset=texts(4)) as trainer:
        while not trainer.is_over:
            trainer.step()
            assert weight.shape == before.shape and weight.quant_state.absmax is scales
        trainer.evaluate()
        trainer.state_dict()
    assert torch.equal(weight, before) and weight.quant_state.absmax is scales


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_adapters_come_back(kind: str, tmp_path: Path) -> None:
    model = adapted(kind)
    settings = {"folder": tmp_path, "load_best_model_at_end": True, "eval_dataset": texts(4)}
    with trainer_of(model, freeze=[0, 2], epochs=2, **settings) as trainer:
        trainer.fit()
        best = trainer.evaluate()["loss"]
        trainer.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(KINDS[kind](), tmp_path / "adapter")
    with trainer_of(again, eval_dataset=texts(4), freeze=0) as trainer:
        assert trainer.evaluate()["loss"] == pytest.approx(best, rel=1e-5)


def test_another_base_does_not_continue_a_run(tmp_path: Path) -> None:
    settings = {"folder": tmp_path, "checkpoint_every_steps": 1}
    with trainer_of(adapted("any other"), **settings) as trainer:
        trainer.step()
        trainer.step()
    other = adapted("any other")
    with torch.no_grad():
        weight_of(other).stored.mul_(2)
    with pytest.raises(ValueError, match="quantized weights.*the same quantized weights"):
        trainer_of(other, **settings, resume="auto").begin()


def test_what_trains_must_be_plain() -> None:
    model = adapted("any other")
    blocks_of(model)[0].mlp.up_proj.weight.requires_grad_()
    with pytest.raises(ValueError, match=r"up_proj.weight' is a Halves and trains"):
        trainer_of(model)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"is a Halves, which is never moved.*train in one"):
        trainer_of(adapted("any other"))


def test_a_base_on_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"it is on cpu while this run trains on cuda"):
        refuse_moving_opaque(adapted("any other"), torch.device("cuda"))


@pytest.mark.slow
def test_files_of_a_run_say_what_they_lack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with trainer_of(adapted("torchao"), folder=tmp_path, checkpoint_every_steps=1) as trainer:
        trainer.step()
        trainer.step()
        with pytest.raises(ValueError, match="is a Int8Tensor.*save_pretrained"):
            trainer.save_model(tmp_path / "model.safetensors")
    assert main(["export", str(tmp_path), str(tmp_path / "exported")]) == 0
    assert "quantized weights are not among them" in capsys.readouterr().out


def test_verify_says_that_it_compares_other_dtypes() -> None:
    with trainer_of(adapted("any other")) as trainer:
        with pytest.raises(ValueError, match="compared in another dtype"):
            trainer.verify()
