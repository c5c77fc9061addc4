"""Others' trainers, with a callback of ours: those of transformers, TRL and Lightning."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import lightning
import torch
import transformers
import trl
from datasets import Dataset
from torch import Tensor, nn

from experiments.foreign_loops import tiny as t
from experiments.foreign_loops.loops import BERT, LLAMA, NEXT, SPEECH, T5, VIT, WHISPER
from experiments.foreign_loops.runner import FREEZE, NUM_EPOCHS, NUM_SAMPLES, ForeignLoop
from pipetransformer import FreezeCallback, LightningFreezeCallback

ARGUMENTS: dict[str, Any] = {
    "output_dir": tempfile.gettempdir(), "per_device_train_batch_size": 4, "learning_rate": 5e-4,
    "num_train_epochs": NUM_EPOCHS, "use_cpu": True, "report_to": [], "disable_tqdm": True,
    "save_strategy": "no", "logging_strategy": "no", "bf16": False, "eval_strategy": "epoch",
    "remove_unused_columns": False,
}  # fmt: skip
QUIET: dict[str, Any] = {
    "default_root_dir": tempfile.gettempdir(), "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu",
}  # fmt: skip


def trained(model: Any, data: Any, collator: Any = None) -> nn.Module:
    trainer = transformers.Trainer(
        model,
        args=transformers.TrainingArguments(**ARGUMENTS),
        train_dataset=data,
        eval_dataset=data,
        data_collator=collator,
        callbacks=[FreezeCallback(freeze=FREEZE)],  # new
    )
    trainer.train()
    return model


def tuned(model: Any, data: Any, kind: str) -> nn.Module:
    """Train by one of TRL's trainers."""
    make: Any = getattr(trl, f"{kind}Trainer")
    trainer = make(
        model,
        args=getattr(trl, f"{kind}Config")(**ARGUMENTS, max_length=16),
        train_dataset=data,
        eval_dataset=data,
        processing_class=t.tokenizer(),
        **({"ref_model": copy.deepcopy(model)} if kind == "DPO" else {}),
        callbacks=[FreezeCallback(freeze=FREEZE)],  # new
    )
    trainer.train()
    return model


def fit(module: Any, model: str | None = None) -> nn.Module:
    trainer = lightning.Trainer(
        max_epochs=NUM_EPOCHS,
        gradient_clip_val=1.0,
        **QUIET,
        callbacks=[LightningFreezeCallback(freeze=FREEZE, model=model)],  # new
    )
    trainer.fit(module, t.loader_of(t.padded()))
    return module


class Module(lightning.LightningModule):
    """Hold a model of transformers, or a BERT and a head as parts."""

    def __init__(self, *, in_parts: bool) -> None:
        super().__init__()
        self.bert = t.tiny("BertModel" if in_parts else BERT)
        self.head = nn.Linear(16, 2) if in_parts else None

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.head is None:
            return self.bert(**batch).loss
        pooled = self.bert(batch["input_ids"], attention_mask=batch["attention_mask"])[1]
        return nn.functional.cross_entropy(self.head(pooled), batch["labels"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=5e-4)


TAGS = [[word % 2 for word in one] for one in t.tokens()["input_ids"]]
SPANS = t.padded(start_positions=t.CLASSES, end_positions=t.CLASSES)
PREFERRED = {"chosen": t.sentences(), "rejected": t.sentences(NUM_SAMPLES)}
PROMPTED = {"prompt": ["w4 w5"] * NUM_SAMPLES, **PREFERRED}

LOOPS = (
    ForeignLoop("Trainer: run_glue", "cached", trained, lambda: (
        t.tiny(BERT), t.ragged(), transformers.DataCollatorWithPadding(t.tokenizer()))),
    ForeignLoop("Trainer: run_ner, padded by batch", "cached", trained, lambda: (
        t.tiny("BertForTokenClassification"), t.ragged(labels=TAGS),
        transformers.DataCollatorForTokenClassification(t.tokenizer()))),
    ForeignLoop("Trainer: run_qa", "cached", trained,
                lambda: (t.tiny("BertForQuestionAnswering"), SPANS)),
    ForeignLoop("Trainer: run_mlm", "uncached", trained, lambda: (
        t.tiny("BertForMaskedLM"), t.ragged().remove_columns("labels"),
        transformers.DataCollatorForLanguageModeling(t.tokenizer()))),
    ForeignLoop("Trainer: run_image_classification", "cached", trained,
                lambda: (t.tiny(VIT), t.pictures(t.FIXED))),
    ForeignLoop("Trainer: run_image_classification, crops", "uncached", trained,
                lambda: (t.tiny(VIT), t.pictures(t.RANDOM))),
    ForeignLoop("Trainer: Whisper", "cached", trained,
                lambda: (t.tiny(WHISPER), t.rows_of(SPEECH))),
    ForeignLoop("Trainer: T5", "refused", trained, lambda: (t.tiny(T5), t.padded(labels=NEXT))),
    ForeignLoop("TRL: SFTTrainer", "cached", tuned, lambda: (
        t.tiny(LLAMA), Dataset.from_dict({"text": t.sentences()}), "SFT")),
    ForeignLoop("TRL: DPOTrainer", "cached", tuned,
                lambda: (t.tiny(LLAMA), Dataset.from_dict(PROMPTED), "DPO")),
    ForeignLoop("TRL: RewardTrainer", "cached", tuned, lambda: (
        t.tiny("LlamaForSequenceClassification", num_labels=1), Dataset.from_dict(PREFERRED),
        "Reward")),
    ForeignLoop("Lightning: one part", "cached", fit, lambda: (Module(in_parts=False),)),
    ForeignLoop("Lightning: a BERT and a head", "refused", fit, lambda: (Module(in_parts=True),)),
    ForeignLoop("Lightning: its BERT by name", "cached", fit,
                lambda: (Module(in_parts=True), "bert")),
)  # fmt: skip
