"""A collator that makes labels of tokens gives an evaluation its loss, as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainingArguments

from pipetransformer.hf import Trainer
from tests.helpers.any_models import KINDS, build


def with_labels(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([item["input_ids"] for item in items])
    return {"input_ids": ids, "labels": ids}


def test_labels_that_the_collator_makes_are_evaluated(tmp_path: Path) -> None:
    texts = Dataset.from_dict({"input_ids": torch.randint(3, 40, (8, 6)).tolist()})
    arguments = TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=1, per_device_train_batch_size=4,
        eval_strategy="epoch", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    model = build(KINDS["gpt2"]).float()
    trainer = Trainer(
        model=model, args=arguments, train_dataset=texts, eval_dataset=texts,
        data_collator=with_labels,
    )  # fmt: skip
    trainer.train()
    ids = torch.tensor(texts["input_ids"])
    expected = float(model.eval()(input_ids=ids, labels=ids).loss)
    assert abs(trainer.evaluate()["eval_loss"] - expected) < 1e-5
    assert any("eval_loss" in entry for entry in trainer.state.log_history)
