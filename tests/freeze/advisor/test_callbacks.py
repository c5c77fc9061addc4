"""Prove that the callbacks watch and freeze within the real trainers, and survive a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from freeze import FreezeContext
from freeze.advisor import FreezeAdvisor
from tests.freeze.test_in_place import Net, same, state


class Sentences(Dataset[dict[str, Tensor]]):
    """Hold a few made-up sentences."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(index)
        ids = torch.randint(5, 40, (6,), generator=chance)
        return {"input_ids": ids, "labels": torch.tensor(index % 2)}


def two_by_step_four(context: FreezeContext) -> int:
    return 2 if context.step >= 4 else 0


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )


def train(folder: Path, callbacks: list[Any], model: nn.Module, **further: Any) -> Trainer:
    resume = further.pop("resume", None)
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        report_to=[],
        use_cpu=True,
        save_strategy="steps",
        save_steps=4,
        disable_tqdm=True,
        seed=3,
        **further,
    )
    trainer = Trainer(model, arguments, train_dataset=Sentences(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_a_run_of_transformers_is_watched_and_not_changed(tmp_path: Path) -> None:
    advisor, watched, alone = FreezeAdvisor(two_by_step_four, every_steps=2), bert(), bert()
    train(tmp_path / "watched", [advisor], watched)
    train(tmp_path / "alone", [], alone)
    assert same(state(watched), state(alone))
    said = json.loads((tmp_path / "watched" / "freeze_advice.json").read_text())
    assert said["text"].startswith("layers 0-1 of 4 quiet since step 4: freezing them would save")
    assert [look["step"] for look in said["looks"]] == [2, 4, 6, 8]
    assert all(0 < one < 1 for one in said["looks"][0]["updates"])


def test_a_run_of_transformers_freezes_and_resumes_frozen(tmp_path: Path) -> None:
    model = bert()
    train(tmp_path, [FreezeAdvisor(two_by_step_four, every_steps=2, act=True)], model)
    resumed, middle = bert(), bert()
    checkpoint = tmp_path / "checkpoint-4"
    middle.load_state_dict(BertForSequenceClassification.from_pretrained(checkpoint).state_dict())
    again = FreezeAdvisor(two_by_step_four, every_steps=2, act=True)
    train(tmp_path, [again], resumed, resume=str(checkpoint))
    assert same(state(resumed), state(model))
    assert same(state(middle.bert.encoder.layer[1]), state(resumed.bert.encoder.layer[1]))
    assert not same(state(middle.bert.encoder.layer[2]), state(resumed.bert.encoder.layer[2]))
    assert again.advice.num_frozen == 2 and again.advice.since == 4


def test_lightning_s_trainer_freezes_and_resumes_frozen(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from freeze.advisor import LightningFreezeAdvisor

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        """Train the net as Lightning wants it."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.net(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def fit(module: Any, advisor: Any, **further: Any) -> None:
        data = torch.utils.data.TensorDataset(torch.ones(32, 3))
        every = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path / "saved", every_n_train_steps=4, save_top_k=-1, filename="{step}"
        )
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[advisor, every],
            default_root_dir=tmp_path,
        )
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4), **further)

    module, advisor = Module(), LightningFreezeAdvisor(two_by_step_four, every_steps=2, act=True)
    fit(module, advisor)
    assert str(advisor.advice).startswith("layers 0-1 of 4 frozen since step 4: saves")
    (saved,) = (tmp_path / "saved").glob("step=4.ckpt")
    middle = torch.load(saved, weights_only=True)["state_dict"]
    resumed = Module()
    again = LightningFreezeAdvisor(two_by_step_four, every_steps=2, act=True)
    fit(resumed, again, ckpt_path=saved)
    assert again.advice.num_frozen == 2
    assert torch.equal(resumed.net.blocks[1].linear.weight, middle["net.blocks.1.linear.weight"])
    assert not torch.equal(resumed.net.head.weight, middle["net.head.weight"])
